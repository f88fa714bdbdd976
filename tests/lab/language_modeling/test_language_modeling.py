"""The task: blocks of documents, losses and scores that do not depend on how they are packed."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig

from lab_runs import log_of, losses, metrics, outcome, run, settings_of, trained_methods
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.language_modeling.manual import manual_data, manual_sections
from labo.lab.language_modeling.model import (
    LanguageModel,
    causal_config,
    check_head,
    check_packing,
    fresh_model,
)
from labo.lab.language_modeling.task import LanguageModelingTask
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.tasks import load_model
from labo.lab.text.arrow import IGNORED
from tiny_language import SENTENCES, log_probabilities, prepare_prompts, prepare_texts

# Stored teachers have a file of their own; ls learns examples.
METHODS_HERE = [m for m in trained_methods("language_modeling") if m not in ("topk-kd", "ls", "fl")]
TINY = ["model.width=16", "model.layers=2", "model.heads=2", "model.dropout=0"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """40 documents of one line to four, and two long ones."""
    parts = [*SENTENCES, "\n".join(SENTENCES[:10]), "\n".join(SENTENCES[10:20])][::-1]
    return prepare_texts(tmp_path_factory.mktemp("texts") / "data", parts, vocabulary=290)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    return prepare_prompts(tmp_path_factory.mktemp("examples") / "data")


def given(folder: Path) -> list[str]:
    return ["data.name=prepared", f"data.path={folder}", "data.block=24", "train.batch_tokens=96"]


def task(folder: Path, *settings: str) -> LanguageModelingTask:
    return LanguageModelingTask(load_recipe("lm-manual", [*given(folder), *TINY, *settings]))


# ------------------------------------------------------------------ blocks and batches


@pytest.mark.parametrize(
    ("kind", "packing", "limit"),
    [("texts", "true", 96), ("texts", "false", 24), ("examples", "true", 200)],
)
def test_every_token_that_is_learned_is_a_target_once(kind, packing, limit, request):
    """All but the first of a text, the answer of an example; with its place in the document."""
    settings = [f"data.packing={packing}", f"train.batch_tokens={limit}"]
    settings += ["data.block=64"] if kind == "examples" else []
    small = task(request.getfixturevalue(kind), *settings)
    split = small.data.split("train")
    found = []
    for position in range(small.steps_per_epoch):
        index = small.global_batch(0, position)
        batch = small.batch(index, 0)
        targets = batch.target[batch.target != IGNORED].tolist()
        assert batch.inputs.ids.shape == batch.target.shape
        assert batch.target.numel() <= limit
        assert small.count(index, 0) == len(targets)
        places = small._train.target_places(index.tolist()).tolist()
        assert [split.tokens(document)[place] for document, place in places] == targets
        found += targets
    labels = [t for i in range(len(split)) for t in split.labels(i)[1:].tolist()]
    assert sorted(found) == sorted(label for label in labels if label != IGNORED)


def test_padding_has_no_targets(texts):
    small = task(texts, "data.packing=false")
    lengths = small._train.lengths
    batch = small.batch(torch.tensor([int(lengths.argmin()), int(lengths.argmax())]), 0)
    assert batch.target[0, int(lengths.min()) :].eq(IGNORED).all()
    assert batch.inputs.positions[0].tolist() == list(range(int(lengths.max())))


def test_examples_longer_than_a_block_are_left_out_and_said_so(examples):
    small = task(examples, "data.block=24")
    long = int((small.data.split("train").lengths - 1 > 24).sum())
    assert long > 0
    assert small.notes == [f"{long} training examples are longer than a block and left out"]
    with pytest.raises(RequestError, match="no training example is as short as 8 tokens"):
        task(examples, "data.block=8")


# ------------------------------------------------------------------ the model


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-small"])
def test_presets_are_models_of_transformers(preset):
    config = causal_config(
        preset, 40, positions=16, dimensions={"width": 24, "layers": 1, "heads": 2, "ffn": 20}
    )
    model = fresh_model(config)
    check_head(model)
    check_packing(model)
    assert config.hidden_size == 24
    inner = config.n_inner if "gpt2" in preset else config.intermediate_size
    assert inner == 20


@pytest.mark.parametrize(("preset", "size"), [("gpt2-124m", 124.4e6), ("llama-124m", 123.6e6)])
def test_the_largest_presets_have_the_size_of_gpt2(preset, size):
    with torch.device("meta"):
        model = fresh_model(causal_config(preset, 50_257, positions=1024))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_documents_of_a_block_do_not_see_each_other(texts, preset):
    """States and losses are those of each document by itself."""
    small = task(texts, f"model.preset={preset}", "data.block=64")
    torch.manual_seed(0)
    model = small.build_model().eval()
    packed = small._train
    for block in range(len(packed.packing)):
        batch = small.batch(torch.tensor([block]), 0)
        head = model(batch.inputs.ids, batch.inputs.positions)
        column = 0
        for document, first, length in packed.packing.pieces(block):
            tokens = packed.documents.tokens(document, first, length)
            ids = torch.tensor(tokens.tolist())[None]
            alone = model.causal(ids, output_hidden_states=True).hidden_states[-1]
            together = head.states[:, column : column + length]
            torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
            column += length


class Scaled(LanguageModel):
    """Its output layer is not all there is to its logits."""

    def forward(self, ids, positions):
        head = super().forward(ids, positions)
        return head._replace(weight=head.weight * 2)


def test_models_that_would_be_trained_wrongly_are_refused():
    with pytest.raises(RequestError, match="changes its logits after its output layer"):
        check_head(Scaled(fresh_model(causal_config("gpt2-tiny", 40, positions=16)).causal))
    recurrent = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(RequestError, match=r"does not keep the documents .* data\.packing=false"):
        check_packing(fresh_model(recurrent))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.preset=gpt3"], "unknown preset 'gpt3'"),
        (["model.width=30", "model.heads=4"], "width 30 must be divisible by twice the heads 4"),
        (["data.name=manual"], "name: manual takes none"),
        (["train.batch_tokens=16"], "16 is less than a block of data.block=24"),
        (["method=cs-kd"], "cs-kd needs peers"),
        (["data.path=nowhere"], "no prepared data here"),
    ],
)
def test_wrong_recipes(texts, settings, message):
    with pytest.raises(RequestError, match=message):
        task(texts, *settings)


def test_wrong_keys_of_the_config_are_refused(texts):
    with pytest.raises(RequestError, match=r"model\.config: rope: no such key in a llama config"):
        task(texts, "model.preset=llama-tiny", "model.config={rope: 3}").build_model()
    model = task(texts, "model.config={activation_function: relu}").build_model()
    assert model.causal.config.activation_function == "relu"


# ------------------------------------------------------------------ scores


def by_hand(small, model, split: str) -> tuple[list[list[float]], list[int]]:
    """-log p of every learned token of each document, by itself and by all logits."""
    documents, block = small.data.split(split), small.recipe.data.block
    rows = []
    for i in range(len(documents)):
        ids, learned = documents.tokens(i).tolist(), (documents.labels(i) != IGNORED).tolist()
        used = not documents.masked or len(ids) - 1 <= block
        log_p = log_probabilities(model.causal, ids, learned, block) if used else []
        rows.append([-x for x in log_p])
    return rows, documents.bytes.tolist()


@pytest.mark.parametrize(("kind", "packing"), [("texts", "true"), ("examples", "false")])
@torch.no_grad()
def test_scores_are_those_of_each_document_by_itself(kind, packing, request):
    small = task(request.getfixturevalue(kind), f"data.packing={packing}", "data.block=40")
    torch.manual_seed(0)
    model = small.build_model().eval()
    rows, sizes = by_hand(small, model, "valid")
    nll = np.concatenate(rows)
    found = small.validate(model, Accelerator(cpu=True))
    used = sum(size for row, size in zip(rows, sizes, strict=True) if row)
    assert found["nll"] == pytest.approx(nll.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nll.sum() / math.log(2) / used, rel=1e-5)
    evaluation = small.evaluate(model, "valid", Accelerator(cpu=True))
    for record, row in zip(evaluation.records, rows, strict=True):
        assert record["tokens"] == len(row)
        assert record["nll"] == pytest.approx(sum(row), rel=1e-5, abs=1e-9)
        if row:
            recorded = -np.log(record["forced"]["probabilities"])
            np.testing.assert_allclose(recorded, row, rtol=1e-4, atol=1e-5)
    assert evaluation.about["counted"] == {"tokens": len(nll), "bytes": used}


@torch.no_grad()
def test_only_so_many_tokens_are_recorded_one_by_one(texts):
    small = task(texts, "data.recorded_tokens=60")
    records = list(small.evaluate(small.build_model(), "valid", Accelerator(cpu=True)).records)
    detailed = [record for record in records if "forced" in record]
    assert 0 < len(detailed) < len(records)
    assert sum(len(record["forced"]["tokens"]) for record in detailed) <= 60
    assert all(record["nll"] > 0 for record in records)


def test_methods_for_fine_tuning_are_told_from_others(texts):
    assert any("dft is for fine-tuning" in note for note in task(texts, "method=dft").notes)
    assert not any("fine-tuning" in note for note in task(texts, "method=eaft").notes)
    assert task(texts, "method=eaft").recipe.method["top_k"] == 20  # as published


# ------------------------------------------------------------------ the manual


def test_no_paragraph_of_the_manual_occurs_twice():
    paragraphs = [
        " ".join(paragraph.split())
        for section in manual_sections()
        for paragraph in section.text.split("\n\n")
    ]
    assert len(paragraphs) == len(set(paragraphs)) > 1000


def test_the_manual_is_prepared_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path))
    one = manual_data(vocabulary=500)
    monkeypatch.setattr("labo.lab.language_modeling.manual.manual_sections", None)
    assert manual_data(vocabulary=500).fingerprint == one.fingerprint
    assert one.manifest["vocabulary"] == 500
    assert one.manifest["repeated"] == 0


# ------------------------------------------------------------------ runs


RUN = ["train.epochs=2", "train.save_every=2", "train.log_every=1", "optim.warmup_steps=2"]
RUN += ["model.dropout=0.1", "train.accumulate=2", "method.warmup_steps=3"]


def train(out: Path, folder: Path, settings: list[str], world: int = 1, kill=None) -> set[int]:
    chosen = [*given(folder), *TINY[:-1], *settings]
    return run(["train", "lm-manual", *chosen, "--out", str(out)], log_of(out), world, kill)


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(out, texts, RUN) == {0}, log_of(out).read_text()
    return out


@pytest.mark.parametrize(("world", "kill"), [(1, ("flush", 20)), (2, ("step", 5))])
def test_a_killed_run_ends_as_if_nothing_had_happened(texts, tmp_path, world, kill, finished):
    whole, killed = finished, tmp_path / "killed"
    if world == 2:
        whole = tmp_path / "whole"
        assert train(whole, texts, RUN, 2) == {0}, log_of(whole).read_text()
    assert -signal.SIGKILL in train(killed, texts, RUN, world, kill)
    assert train(killed, texts, RUN, world) == {0}, log_of(killed).read_text()
    assert outcome(killed) == outcome(whole)


def learn_alike(tmp_path: Path, folder: Path, *more: str) -> list[float]:
    """Train in one process and in two; the losses, which are the same."""
    settings = [*RUN[:4], "model.dropout=0", *more]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(one, folder, settings) == {0}, log_of(one).read_text()
    assert train(two, folder, settings, world=2) == {0}, log_of(two).read_text()
    torch.testing.assert_close(losses(two), losses(one), rtol=2e-5, atol=1e-6)
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        torch.testing.assert_close(
            ours.get("valid", {}), theirs.get("valid", {}), rtol=1e-4, atol=1e-5
        )
    return losses(one)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_two_processes_give_the_curve_of_one(method, texts, finished, tmp_path):
    settings = settings_of(method, finished)
    assert len(learn_alike(tmp_path, texts, "train.max_steps=8", *settings)) == 8


def test_examples_are_learned_and_two_processes_agree(examples, tmp_path):
    values = learn_alike(tmp_path, examples, "data.block=48", "method=ls", "train.epochs=3")
    assert values[-1] < values[0]


def test_the_recipe_for_gpus_runs_narrowed(texts, tmp_path):
    out = tmp_path / "run"
    settings = [f"data.path={texts}", "data.block=24", "train.batch_tokens=192", *TINY[:-1]]
    settings += ["model.preset=llama-124m", "train.max_steps=6", "train.eval_every_steps=4"]
    settings += ["train.precision=bf16", "method.warmup_steps=3"]
    arguments = ["train", "lm-124m", *settings, "--out", str(out)]
    assert run(arguments, log_of(out)) == {0}, log_of(out).read_text()
    assert [line["step"] for line in metrics(out) if "valid" in line] == [4, 6]


def test_the_selected_model_is_a_plain_folder(finished):
    """transformers loads it, with the same logits and its tokenizer."""
    model = load_model(RunDirectory(finished)).eval()
    plain = AutoModelForCausalLM.from_pretrained(finished / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "best")
    ids = torch.tensor([tokenizer("the dog sees").input_ids])
    with torch.no_grad():
        head = model(ids, torch.arange(ids.shape[1])[None])
        torch.testing.assert_close(head.logits(head.states), plain(ids).logits)
    assert plain.generation_config.eos_token_id == tokenizer.eos_token_id
    facts = RunDirectory(finished).facts()
    assert facts["task"] == "language_modeling"
    assert facts["kind"] == "text"


def test_evaluate_writes_records(finished):
    scores = evaluate_run(finished, ["test"])["test"]
    results = json.loads((finished / "results.json").read_text())["test"]
    calibrated = {name for name in scores if name.startswith("calibrated_")}
    assert calibrated == {"calibrated_nll", "calibrated_ece"}
    assert {name: scores[name] for name in results} == pytest.approx(results)
    lines = (finished / "records" / "test.jsonl").read_text().splitlines()
    forced = [json.loads(line)["forced"] for line in lines]
    p, confidence, right = (
        np.concatenate([row[name] for row in forced])
        for name in ("probabilities", "confidence", "right")
    )
    assert scores["nll"] == pytest.approx(-np.log(p).mean(), rel=1e-4)
    assert scores["token_accuracy"] == pytest.approx(right.mean())
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((confidence - right)[bins == b].sum()) for b in range(15)]
    assert scores["ece"] == pytest.approx(sum(gaps) / len(right), abs=1e-4)
    assert (finished / "records" / "examples.json").is_file()


def test_a_folder_that_is_replaced_does_not_mix_with_the_one_that_is_read(texts, tmp_path):
    small, untouched = task(shutil.copytree(texts, tmp_path / "data")), task(texts)
    shutil.rmtree(tmp_path / "data")  # as prepare-text --force does
    model = untouched.build_model()
    for split in ("valid", "test"):
        wanted = untouched.evaluate(model, split, Accelerator()).metrics
        assert small.evaluate(model, split, Accelerator()).metrics == wanted
    saved = [each.model_files(model, model.state_dict())[1].keys() for each in (small, untouched)]
    assert saved[0] == saved[1]
