"""Translation as a task of the loop: batches, loss, methods, scores, and what a run leaves."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lab_runs import log_of, losses, metrics, outcome, run, settings_of, trained_methods
from labo.lab.config import RecipeError
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.recipes import load_recipe, recipe_of
from labo.lab.run.directory import RunDirectory
from labo.lab.text.teacher import store
from labo.lab.translation.model import EOS, NUM_SPECIAL, PAD
from labo.lab.translation.task import TranslationTask, switchout

DATA = ["data.size=400", "data.vocabulary=400"]
MODEL = ["model.width=16", "model.ffn=32", "model.heads=2", "model.positions=128"]
MODEL += ["model.encoder_layers=1", "model.decoder_layers=1", "model.dropout=0.0"]
TRAIN = ["train.batch_tokens=256", "train.epochs=2", "train.log_every=1", "decode.beam=2"]
TINY = [*DATA, *MODEL, *TRAIN, "optim.warmup_steps=5"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The phrases are made once for all runs of this file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABO_CACHE", str(folder))
        yield folder


def train(out: Path, cache: Path, settings: list[str], world: int = 1, kill=None) -> set[int]:
    arguments = ["train", "cldr", *TINY, *settings, "--out", str(out)]
    return run(arguments, log_of(out), world, kill, {"LABO_CACHE": str(cache)})


def task(*settings: str) -> TranslationTask:
    return TranslationTask(load_recipe("cldr", [*TINY, *settings]))


@pytest.fixture(scope="module")
def small(cache):
    return task()


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(out, cache, ["method=ls"]) == {0}, log_of(out).read_text()
    return out


# ------------------------------------------------------------------ batches


@pytest.mark.parametrize("limit", [64, 5000])
def test_every_sentence_is_in_one_batch_and_no_batch_is_too_large(limit, cache):
    small = task(f"train.batch_tokens={limit}")
    split = small.data.split("train")
    batches = [small.global_batch(0, i) for i in range(small.steps_per_epoch)]
    assert sorted(torch.cat(batches).tolist()) == list(range(len(split)))
    for index in batches:
        batch = small.batch(index, 0)
        longest = max(batch.inputs.source.shape[1], batch.target.shape[1])
        assert len(index) * longest <= limit
    # Of two neighbours in size, the larger does not fit into what the smaller left free.
    assert len(batches) <= 2 * sum(b.numel() for b in batches) * 40 / limit + 1


def test_sentences_to_score_that_are_longer_than_the_model_are_refused(small):
    longest = int(small.data.split("valid").longest().max())
    with pytest.raises(
        RequestError, match=rf"model.positions has 12 positions, .* {longest} tokens in the valid"
    ):
        task("model.positions=12")


def test_a_batch_is_padded_text(small):
    index = small.global_batch(0, 0)
    batch, split = small.batch(index, 0), small.data.split("train")
    for row, i in enumerate(index.tolist()):
        source, target = split.source(i).tolist(), split.target(i).tolist()
        assert batch.inputs.source[row, : len(source)].tolist() == source
        assert batch.inputs.source[row, len(source) :].eq(PAD).all()
        assert batch.target[row, : len(target)].tolist() == target
        assert batch.target[row, len(target) :].eq(-100).all()
        assert batch.inputs.prefix[row, : len(target)].tolist() == [EOS, *target[:-1]]
        assert batch.inputs.prefix[row, len(target) :].eq(PAD).all()
    assert small.count(index, 0) == (batch.target != -100).sum()


def test_sentences_too_long_for_a_batch_are_left_out_and_said_so(cache):
    small = task("train.batch_tokens=16")
    kept = sum(len(small.global_batch(0, i)) for i in range(small.steps_per_epoch))
    missing = len(small.data.split("train")) - kept
    assert small.notes == [f"{missing} training pairs are too long for a batch and are not used"]


# ------------------------------------------------------------------ the loss


def test_the_first_type_is_behind_specials_and_tags(small, cache):
    assert small._first_type == NUM_SPECIAL
    several = task("data.languages=[de-en,fr-en]")
    assert several._first_type == NUM_SPECIAL + 2
    first = several.data.split("train").source(0)[0]
    assert several.data.tokenizer.convert_ids_to_tokens(int(first)) in ("<de>", "<fr>")


def test_vocabulary_groups_follow_the_counts(small):
    groups = small.vocabulary_groups()
    source, target = small.data.frequencies("source"), small.data.frequencies("target")
    assert groups[:NUM_SPECIAL].eq(1).all()
    for i in range(NUM_SPECIAL, len(groups)):
        expected = {(True, False): 2, (False, True): 0}.get((source[i] > 0, target[i] > 0), 1)
        assert groups[i] == expected
    assert set(groups.tolist()) == {0, 1, 2}


# ------------------------------------------------------------------ SwitchOut


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0.1, 20.0),
    st.integers(0, 2**31),
)
def test_switchout_replaces_words_by_other_words(length, temperature, seed):
    chance = torch.Generator().manual_seed(seed)
    first, size = 6, 30
    ids = torch.full((5, 14), PAD)
    ids[:, 0] = 4  # a tag
    ids[:, 1 : length + 1] = torch.randint(first, size, (5, length), generator=chance)
    ids[:, length + 1] = EOS
    u = torch.rand(5, 29, generator=chance)
    found = switchout(ids, u, temperature, first, size)
    words = (ids >= first) & (ids < size)
    assert torch.equal(found[~words], ids[~words])
    assert ((found[words] >= first) & (found[words] < size)).all()
    assert torch.equal(switchout(ids, u, temperature, first, size), found)


def test_switchout_replaces_as_many_as_its_law_says():
    chance = torch.Generator().manual_seed(0)
    length, temperature, n = 8, 2.0, 40_000
    ids = torch.randint(4, 50, (n, length), generator=chance)
    found = switchout(ids, torch.rand(n, 1 + 2 * length, generator=chance), temperature, 4, 50)
    k = torch.arange(length + 1.0)
    law = (-k / temperature).softmax(0)
    expected = float((law * k).sum())  # k words replaced on average, given k
    assert (found != ids).sum(-1).float().mean().item() == pytest.approx(expected, rel=0.02)
    unchanged = (law * (1 - k / length) ** length).sum().item()
    assert (found == ids).all(-1).float().mean().item() == pytest.approx(unchanged, rel=0.02)


def test_switchout_is_for_training_only(cache):
    small = task("data.switchout_source=3.0", "data.switchout_target=3.0")
    index = small.global_batch(0, 0)
    plain = task().batch(index, 0)
    noisy, again, later = small.batch(index, 0), small.batch(index, 0), small.batch(index, 1)
    assert not torch.equal(noisy.inputs.source, plain.inputs.source)
    assert not torch.equal(noisy.target, plain.target)
    assert torch.equal(noisy.inputs.source, again.inputs.source)
    assert not torch.equal(noisy.inputs.source, later.inputs.source)
    # The replaced word is label and context alike.
    shifted = noisy.target[:, :-1].masked_fill(noisy.target[:, 1:] == -100, PAD)
    assert torch.equal(noisy.inputs.prefix[:, 1:], shifted.masked_fill(shifted == -100, PAD))
    valid = small._batch(small.data.split("valid"), torch.arange(3), 0, training=False)
    assert valid.inputs.source[0, : len(small.data.split("valid").source(0))].tolist() == list(
        small.data.split("valid").source(0)
    )


# ------------------------------------------------------------------ runs


@pytest.mark.parametrize("method", trained_methods("translation"))
def test_two_processes_give_the_curve_of_one_and_a_killed_run_ends_alike(
    method, finished, cache, tmp_path
):
    chosen = [*settings_of(method, finished), "train.accumulate=2", "train.save_every=4"]
    chosen += ["train.batch_tokens=640"]
    if method == "topk-kd":
        store(finished, task().data.path, tmp_path / "stored", top_k=8)
        chosen.append(f"method.stored={tmp_path / 'stored'}")
    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    assert train(one, cache, chosen) == {0}, log_of(one).read_text()
    assert train(two, cache, chosen, world=2) == {0}, log_of(two).read_text()
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-4, atol=1e-5)
    death = ("step", random.Random(method).randint(3, 14))
    assert train(killed, cache, chosen, kill=death) == {-signal.SIGKILL}
    assert train(killed, cache, chosen) == {0}, log_of(killed).read_text()
    assert outcome(killed) == outcome(one)


def test_the_selected_model_is_a_hugging_face_folder_that_translates_alike(finished):
    best = finished / "best"
    model = AutoModelForSeq2SeqLM.from_pretrained(best)
    tokenizer = AutoTokenizer.from_pretrained(best)
    for record in records(finished)[:4]:
        inputs = tokenizer(record["source"], return_tensors="pt")
        longest = len(record["tokens"]) + 1  # a hypothesis may have been cut off
        ids = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_length=longest
        )[0]
        # The first id starts the decoder.
        assert tokenizer.convert_ids_to_tokens(ids.tolist()[1:]) == record["tokens"]


def records(out: Path) -> list[dict[str, Any]]:
    file = out / "records" / "test.jsonl"
    if not file.exists():
        evaluate_run(out, ("test",), {"beams": [1, 3]})
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_records_say_what_the_scores_rest_on(finished):
    lines = records(finished)
    results = json.loads((finished / "results.json").read_text())
    data = recipe_of(RunDirectory(finished))
    split = TranslationTask(data).data.split("test")
    assert [line["reference"] for line in lines] == [
        split.target_text(i) for i in range(len(split))
    ]
    hypotheses = [line["hypothesis"] for line in lines]
    expected = sacrebleu.corpus_bleu(hypotheses, [[line["reference"] for line in lines]])
    assert results["test"]["bleu"] == pytest.approx(expected.score)
    assert "tok:13a" in results["sacrebleu"]["bleu"]
    tokens = [p for line in lines for p in line["forced"]["probabilities"]]
    nll = -torch.tensor(tokens).double().log().mean().item()
    assert results["test"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert len({line["forced"]["tempered"]["temperature"] for line in lines}) == 1
    for line in lines:
        forced = line["forced"]
        tempered = forced.pop("tempered")
        sizes = {len(values) for values in forced.values()}
        sizes |= {len(tempered[key]) for key in ("probabilities", "confidence")}
        assert sizes == {line["reference_length"]}
        assert len(line["tokens"]) == len(line["probabilities"])
        assert set(line["lengths"]) == {"1", "3"}
        assert all(
            p <= c + 1e-5
            for p, c in zip(forced["probabilities"], forced["confidence"], strict=True)
        )


def test_the_loop_can_select_by_bleu_of_some_sentences(cache, tmp_path):
    out, greedy = tmp_path / "run", "train.select=bleu"
    settings = ["train.select_beam=2", "train.select_sentences=10", "train.epochs=1"]
    assert train(out, cache, [greedy, *settings]) == {0}
    scores = [line for line in metrics(out) if "valid" in line][-1]["valid"]
    assert "beam_bleu" in scores
    assert "bleu" not in scores  # the name of the final search
    results = json.loads((out / "results.json").read_text())
    log = log_of(out).read_text()
    assert "selected by beam_bleu" in log
    assert log.count(results["sacrebleu"]["bleu"]) == 2  # in the header and with the scores
    assert task(greedy).recipe.selected_by == "greedy_bleu"


def test_several_languages_have_a_score_each(cache):
    several = task("data.languages=[de-en,fr-en]")
    scores = several.evaluate(several.build_model(), "test", Accelerator(cpu=True)).metrics
    assert {"bleu", "bleu_de_en", "bleu_fr_en"} <= scores.keys()


def test_training_learns(finished):
    assert losses(finished)[-1] < 0.9 * losses(finished)[0]


def test_scores_do_not_depend_on_how_the_split_is_cut(small):
    torch.manual_seed(0)
    model = small.build_model()
    whole = small.validate(model, Accelerator(cpu=True))
    split = small.data.split("valid")
    index = torch.arange(len(split))
    batch = small._batch(split, index, 0, training=False)
    states, weight, *_ = model(batch.inputs.source, batch.inputs.mask, batch.inputs.prefix)
    nll = F.cross_entropy((states @ weight.T).flatten(0, 1), batch.target.flatten())
    assert whole["nll"] == pytest.approx(nll.item(), rel=1e-5)


# ------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["method=cs-kd"], "cs-kd needs peers, which translation does not provide"),
        (["data.name=prepared"], "needs path=FOLDER, made by `labo prepare`"),
        (["model.heads=3"], "width 16 must be even and divisible by heads 3"),
        (["model.fixnorm=true", "model.embeddings=separate"], "fixnorm needs embeddings"),
        (
            ["train.batch_size=3"],
            "unknown key 'train.batch_size'; did you mean 'train.batch_tokens'",
        ),
    ],
)
def test_wrong_recipes(settings, problem):
    with pytest.raises(RecipeError) as error:
        load_recipe("cldr", [*TINY, *settings])
    assert problem in str(error.value)


# What only the built-in phrases have: their defaults.
OTHER = ["data.name=prepared", "data.languages=[]", "data.size=20000", "data.vocabulary=2000"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([*OTHER, "data.path=/nowhere"], "/nowhere"),
        (["method=kd", "method.teacher=/nowhere"], "/nowhere is no run"),
    ],
)
def test_wrong_requests_leave_no_trace(settings, problem, cache, tmp_path):
    out = tmp_path / "run"
    assert train(out, cache, settings) == {2}
    assert problem in log_of(out).read_text().splitlines()[-1]
    assert not out.exists()


def test_a_teacher_of_another_vocabulary_is_refused(finished, cache, tmp_path):
    out = tmp_path / "run"
    chosen = ["method=kd", f"method.teacher={finished}", "data.data_seed=5"]
    assert train(out, cache, chosen) == {2}
    assert "a different target vocabulary" in log_of(out).read_text().splitlines()[-1]
