"""Translation that starts from a model folder: Marian, T5, BART, mBART and NLLB."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right

from lab_runs import log_of, losses, run
from labo.lab.calibrate import calibrate_run
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import write_model
from labo.lab.text import pretrained_tokenizer
from labo.lab.translation.decoding import decode
from labo.lab.translation.export import export
from labo.lab.translation.framing import PairTokens, folder_tokenizers, frame_pairs
from labo.lab.translation.model import load_translator, start_tokens
from labo.lab.translation.options import Decode, parse_pairs
from labo.lab.translation.prepared import Prepared
from labo.lab.translation.task import TranslationTask
from labo.lab.translation.translate import Translator
from tiny_corpus import labo, refused
from tiny_folders import (
    FAMILIES,
    assert_adapters_agree,
    pair_of,
    prepare_corpus,
    save_pretrained,
    sentences,
    tokenizer_of,
    write_corpus,
)

SETTINGS = ["train.batch_tokens=64", "train.epochs=15", "train.eval_every=15", "method=ls"]
SETTINGS += ["train.log_every=1", "optim.lr=0.02", "optim.warmup_steps=10"]
SETTINGS += ["decode.beam=3", "decode.max_extra=6"]


@pytest.fixture(scope="module", params=FAMILIES)
def pretrained(request, tmp_path_factory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def nllb(tmp_path_factory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("model") / "nllb", "nllb")


def prepared(folder: Path) -> Path:
    """The corpus of a family, prepared with the tokenizer of its folder."""
    out = folder.parent / "data"
    return out if out.exists() else prepare_corpus(out, folder.name, tokenizer=str(folder))


def settings(folder: Path, *more: str) -> list[str]:
    return [f"model={{pretrained: {folder}}}", f"data.path={prepared(folder)}", *SETTINGS, *more]


def train(out: Path, folder: Path, *more: str, kill=None, world=1) -> set[int]:
    arguments = ["train", "translation-sft", *settings(folder, *more), "--out", str(out)]
    return run(arguments, log_of(out), world, kill)


def task(folder: Path, *more: str) -> TranslationTask:
    return TranslationTask(load_recipe("translation-sft", settings(folder, *more)))


# ------------------------------------------------------------------ model and tokens


def test_states_and_output_layer_make_the_logits_of_the_model(pretrained):
    small = task(pretrained)
    model, batch = small.build_model().eval(), small.batch(torch.arange(8), 0)
    inputs = batch.inputs
    assert inputs.mask is not None
    head = model(inputs.source, inputs.mask, inputs.prefix, inner_layers=1)
    plain = AutoModelForSeq2SeqLM.from_pretrained(pretrained).eval()
    expected = plain(
        input_ids=inputs.source,
        attention_mask=inputs.mask.long(),
        decoder_input_ids=inputs.prefix,
        output_hidden_states=True,
    )
    torch.testing.assert_close(head.logits(head.states), expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.inner, expected.decoder_hidden_states[1])
    assert small.num_classes == expected.logits.shape[-1]
    model.fold_temperature(2.5)
    folded = model(inputs.source, inputs.mask, inputs.prefix)
    logits = expected.logits / 2.5
    torch.testing.assert_close(folded.logits(folded.states), logits, rtol=1e-4, atol=1e-4)


def test_sentences_are_framed_as_transformers_does(pretrained):
    family, (german, english) = pretrained.name, sentences(3)[2]
    data = Prepared(prepared(pretrained))
    (pair,) = data.pairs
    tokens = PairTokens(pair, data.tokenizer, data.target_tokenizer)
    source, target = pair_of(family).split("-")
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    if hasattr(tokenizer, "src_lang"):
        tokenizer.src_lang, tokenizer.tgt_lang = source, target
    theirs = tokenizer(german, text_target=english)
    assert tokens.sources([german]) == [theirs.input_ids]
    model = AutoModelForSeq2SeqLM.from_pretrained(pretrained)
    labels = torch.tensor([theirs.labels])
    if family == "nllb":
        inputs = shift_tokens_right(labels, tokenizer.pad_token_id, 2)
    else:
        inputs = model.prepare_decoder_input_ids_from_labels(labels=labels)
    (ours,) = tokens.targets([english])
    start = start_tokens(model.config, pair)
    given = [*start, *ours[:-1]]
    assert inputs[0, : len(given)].tolist() == given
    assert ours[-1] == tokenizer.eos_token_id
    # What is written like a special token is text.
    (ids,) = tokens.sources(["</s>"])
    assert ids.count(tokenizer.eos_token_id) == 1


def test_several_directions_and_tags(nllb, tmp_path):
    tokenizers = folder_tokenizers(nllb)
    one, other = frame_pairs(parse_pairs(["deu-eng", "eng-deu"]), nllb, *tokenizers)
    german, english = tokenizers[0].convert_tokens_to_ids(["deu_Latn", "eng_Latn"])
    assert (one.frame.before, one.frame.target_before) == ([german], [english])
    assert (other.frame.before, other.frame.target_before) == ([english], [german])
    assert tokenizers[0].src_lang == "deu_Latn"
    # mBART-50 has another frame than mBART, and so has an old NLLB.
    newer = transformers.MBart50Tokenizer(vocab=[("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0)])
    older = tokenizer_of("nllb")
    older.legacy_behaviour = True
    for languages, tokenizer, kind in (("de-en", newer, "mbart"), ("deu-eng", older, "m2m_100")):
        (pair,) = frame_pairs(parse_pairs([languages]), tmp_path, tokenizer, tokenizer)
        config = AutoConfig.for_model(kind, decoder_start_token_id=2)
        start = tokenizer.convert_ids_to_tokens(start_tokens(config, pair))
        assert start == ["</s>", tokenizer.tgt_lang]
    marian = tokenizer_of("marian")
    (pair,) = frame_pairs(parse_pairs(["de-en"], "target"), tmp_path, marian, marian, "{source}: ")
    assert pair.frame.before == [marian.convert_tokens_to_ids(">>en<<")]
    assert pair.frame.prefix == "de: "
    for languages, message in (
        (["de-eng"], r"--pair: unknown language of .*nllb 'de'"),
        (["deu-eng", "xx_yy-eng"], "unknown language"),
    ):
        with pytest.raises(RequestError, match=message):
            frame_pairs(parse_pairs(languages), nllb, *tokenizers)
    with pytest.raises(RequestError, match="no tag <de> or >>de<<; --tag none leaves tags out"):
        frame_pairs(parse_pairs(["de-en"], "source"), tmp_path, marian, marian)


def test_each_direction_has_its_own_start(nllb):
    directions = ["deu_Latn-eng_Latn", "eng_Latn-deu_Latn"]
    out = prepare_corpus(nllb.parent / "both", "nllb", pair=directions, tokenizer=str(nllb))
    both = task(nllb, f"data.path={out}")
    german, english = both.data.tokenizer.convert_tokens_to_ids(["deu_Latn", "eng_Latn"])
    index = torch.tensor([0, both.size - 1])  # one of each direction
    batch = both.batch(index, 0)
    assert batch.inputs.source[:, 0].tolist() == [german, english]
    assert batch.inputs.prefix[:, :2].tolist() == [[2, english], [2, german]]
    assert batch.target[:, 0].eq(-100).all()
    assert both.count(index, 0) == (batch.target != -100).sum()
    # A search over both directions is that over each.
    model, split = both.build_model(), both.data.split("test")
    found = both._decode(model, split, Accelerator(cpu=True), Decode(beam=2, max_extra=4))
    for i in (0, len(split) - 1):
        start = (2, english if split.pair[i] == 0 else german)
        source = [split.source(i).tolist()]
        ((alone,),) = decode(model.network, source, Decode(beam=2, max_extra=4), start=start)
        assert found[i].ids == alone.ids
        assert found[i].probabilities == pytest.approx(alone.probabilities, rel=1e-4)


def test_a_tokenizer_written_in_python(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    tokenizers = folder_tokenizers(tmp_path / "byt5")
    pairs = frame_pairs(parse_pairs(["de-en"]), tmp_path, *tokenizers, "to English: ")
    tokens = PairTokens(pairs[0], *tokenizers)
    assert tokens.sources(["ab"]) == [tokenizers[0]("to English: ab").input_ids]
    assert tokens.targets(["ab"]) == [tokenizers[0]("ab").input_ids]


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "source.spm").write_bytes(b"")
    monkeypatch.setattr(pretrained_tokenizer, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'torch-labo\[sentencepiece\]'"):
        folder_tokenizers(tmp_path)


# ------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def finished(pretrained) -> Path:
    out = pretrained.parent / "run"
    assert train(out, pretrained) == {0}, log_of(out).read_text()
    return out


def test_the_fine_tuned_model_is_a_plain_folder(pretrained, finished):
    assert losses(finished)[-1] < 0.5 * losses(finished)[0]
    before, after = (load_file(f / "model.safetensors") for f in (pretrained, finished / "best"))
    assert before.keys() == after.keys()
    translator, lines = Translator(finished), [german for german, _ in sentences(12)]
    said = translator.nbest(lines, 1)
    assert all(len(best.tokens) == len(best.probabilities) for (best,) in said)
    plain = AutoModelForSeq2SeqLM.from_pretrained(finished / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "best")
    for line, (best,) in zip(lines, said, strict=True):
        found = plain.generate(**tokenizer(line, return_tensors="pt"), return_dict_in_generate=True)
        assert tokenizer.decode(found.sequences[0], skip_special_tokens=True).strip() == best.text


def test_evaluation_and_calibration(pretrained, finished):
    before = evaluate_run(finished, ["test"])["test"]
    lines = (finished / "records" / "test.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    nll = [-math.log(p) for record in records for p in record["forced"]["probabilities"]]
    assert sum(nll) / len(nll) == pytest.approx(before["nll"], rel=1e-3)
    assert all(record["forced"]["tokens"][-1] == "</s>" for record in records)
    if pretrained.name in ("bart", "mbart"):
        return  # right about everything: no temperature is best
    calibrate_run(finished, fold=True)
    after = evaluate_run(finished, ["test"])["test"]
    assert after["nll"] != before["nll"]
    assert after["token_accuracy"] == before["token_accuracy"]


# ------------------------------------------------------------------ adapters and frozen weights


def test_adapters_are_merged_or_apart(nllb, tmp_path):
    small = task(nllb, "model.lora={rank: 3, alpha: 5, save: both}")
    model = small.build_model().eval()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    inputs = small.batch(small.global_batch(0, 0), 0).inputs
    ids = {"input_ids": inputs.source, "decoder_input_ids": inputs.prefix}
    assert_adapters_agree(small, model, nllb, tmp_path, 1e-3, **ids)


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_model_of_a_run_goes_on(tokenizer, tmp_path):
    """Training goes on from RUN/best, with the data of the run or other data."""
    data = prepare_corpus(tmp_path / "data", "marian", share="nothing", vocabulary=280)
    model = "model={preset: tiny, width: 8, ffn: 8, embeddings: decoder}"
    first = TranslationTask(load_recipe("translation", [f"data.path={data}", model]))
    fresh = first.build_model().eval()
    write_model(tmp_path / "best", *first.model_files(fresh, fresh.state_dict()))
    if tokenizer:
        data = prepare_corpus(tmp_path / "other", "marian", tokenizer=str(tmp_path / "best"))
    changes = [f"data.path={data}", f"model={{pretrained: {tmp_path / 'best'}}}"]
    second = TranslationTask(load_recipe("translation", changes))
    batch = second.batch(torch.arange(8), 0)
    again = second.build_model().eval()
    torch.testing.assert_close(
        second.outputs(again, batch).states, first.outputs(fresh, batch).states
    )
    write_model(tmp_path / "next", *second.model_files(again, again.state_dict()))
    for saved in (tmp_path / "best", tmp_path / "next"):
        assert Translator(saved, beam=1).translate(["eins"]) is not None
    loaded = second.load_model(tmp_path / "next").eval()
    torch.testing.assert_close(
        second.outputs(loaded, batch).states, first.outputs(fresh, batch).states
    )


# ------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.preset=tiny"], "give preset or pretrained, and not both"),
        (
            ["model.width=8", "model.dropout=0.3"],
            r"width, dropout: a pretrained model has its own \(model={pretrained: FOLDER} leaves",
        ),
        (["model.pretrained=null", "model.preset=tiny"], "set model.pretrained to its folder"),
        (["model.pretrained=nowhere"], "nowhere: no such folder"),
        (["data.bpe_dropout=0.1"], "data.bpe_dropout: only for subwords that `labo prepare` lear"),
        (["model.lora={targets: [lm_head]}"], "lm_head is the output layer"),
        (
            ["model.pretrained=null", "model.preset=tiny", "model.lora.rank=2"],
            "adapters are for a pretrained model",
        ),
    ],
)
def test_wrong_requests(nllb, more, message):
    with refused(message, RequestError):
        task(nllb, *more).build_model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "is_encoder_decoder": False}, "gpt2, which is no encoder-decoder"),
        ({"pad_token_id": 7}, "pad_token_id is 7 in config.json and 1 in the tokenizer"),
        ({"vocab_size": 5}, "more types than its output layer"),
    ],
)
def test_folders_that_hold_no_translation_model(nllb, tmp_path, changes, message):
    path = shutil.copytree(nllb, tmp_path / "copy") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with refused(message, RequestError):
        task(nllb, f"model.pretrained={path.parent}")


def test_data_of_another_tokenizer_is_refused(nllb, tmp_path):
    other = save_pretrained(tmp_path / "t5", "t5")
    recipe = load_recipe("translation-sft", settings(nllb, f"model={{pretrained: {other}}}"))
    prepare_corpus(tmp_path / "learned", "t5", vocabulary=280)
    changes = [f"model.pretrained={other}", f"data.path={tmp_path / 'learned'}"]
    for wrong in (recipe, load_recipe("translation-sft", changes)):
        with pytest.raises(RequestError, match="was not prepared with the tokenizer of"):
            TranslationTask(wrong)


def test_the_command_prepares_with_a_tokenizer(nllb, tmp_path, capsys):
    text = str(write_corpus(tmp_path / "raw", "nllb"))
    command = ["prepare", str(tmp_path / "out"), "--pair", "deu_Latn-eng_Latn", "--train", text]
    command += ["--holdout", "8", "--holdout-test", "8"]
    assert labo(*command, "--tokenizer", tmp_path / "nowhere") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert labo(*command, "--tokenizer", nllb) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert (
        f"labo train translation-sft data.path={tmp_path / 'out'} model.pretrained={nllb}" in said
    )


def test_a_run_is_exported_by_ctranslate2_itself(nllb, tmp_path):
    small, best = task(nllb), tmp_path / "best"
    model = small.build_model()
    _, files = small.model_files(model, model.state_dict())
    best.mkdir()
    (best / "config.json").write_bytes(str(files["config.json"]).encode())
    with pytest.raises(RequestError, match="ct2-transformers-converter --model"):
        export(tmp_path, tmp_path / "out")


def test_settings_of_the_folder_do_not_change_the_search(nllb, tmp_path):
    """Search follows the recipe, not the generation_config.json of the folder."""
    network = load_translator(nllb).network
    network.save_pretrained(tmp_path)
    settings = {"no_repeat_ngram_size": 1, "forced_eos_token_id": 2, "max_new_tokens": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    start, sources = (2, 30), [[4, 5, 6, 2], [7, 2]]
    found = [
        decode(load_translator(folder).network, sources, Decode(beam=2, max_extra=9), start=start)
        for folder in (nllb, tmp_path)
    ]
    assert found[0] == found[1]
    assert max(len(best.ids) for (best,) in found[0]) > 2
