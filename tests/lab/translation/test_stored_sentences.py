"""labo teacher for translation: stored predictions, and training with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import labo
from lab_runs import losses
from labo.lab.errors import DataError, RequestError
from labo.lab.recipes import load_recipe
from labo.lab.text.head import head_loss
from labo.lab.text.stored import StoredTeacher
from labo.lab.text.teacher import store
from labo.lab.train import train
from labo.lab.translation import teacher
from labo.lab.translation.finetuning import load_translator
from labo.lab.translation.options import choose
from labo.lab.translation.prepare import prepare
from labo.lab.translation.prepared import Prepared
from labo.lab.translation.task import TranslationTask
from tiny_folders import pair_of, save_pretrained, write_corpus

OWN = ["data.size=300", "data.vocabulary=400", "model.width=16", "model.ffn=32", "model.heads=2"]
OWN += ["model.encoder_layers=1", "model.decoder_layers=1", "model.dropout=0", "decode.beam=1"]
TRAIN = ["train.batch_tokens=256", "train.epochs=2", "train.log_every=1", "optim.warmup_steps=5"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def cldr(*settings: str) -> TranslationTask:
    return TranslationTask(load_recipe("cldr", [*OWN, *TRAIN, *settings]))


def start_from(folder: Path, data: Path) -> TranslationTask:
    settings = [f"model={{pretrained: {folder}}}", f"data.path={data}", "train.batch_tokens=256"]
    return TranslationTask(load_recipe("translation-sft", settings))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A run of this project, on phrases in two directions, with tags."""
    out = tmp_path_factory.mktemp("own") / "run"
    languages = "data.languages=[de-en, fr-en]"
    train(load_recipe("cldr", [*OWN, *TRAIN, languages, "method=ls", "train.epochs=1"]), out)
    return out


@pytest.fixture(scope="module", params=["own", "nllb", "t5"])
def case(request, own, tmp_path_factory) -> tuple[Path, Path, TranslationTask]:
    """A model, data prepared with its tokenizer, and a task that learns from it."""
    if request.param == "own":
        task = cldr("data.languages=[de-en, fr-en]")
        return own, task.data.path, task
    folder = tmp_path_factory.mktemp(request.param)
    model = save_pretrained(folder / request.param, request.param)
    text = str(write_corpus(folder / "raw", request.param))
    options = {"pair": [pair_of(request.param)], "train": [text], "holdout": 8, "holdout_test": 8}
    prepare(choose(None, options | {"tokenizer": str(model)}), folder / "data")
    return model, folder / "data", start_from(model, folder / "data")


def test_all_classes_are_dense_distillation(case, tmp_path):
    """For every batch: the predictions, and value and gradient of the teacher beside."""
    model, data, task = case
    types = len(task.data.target_tokenizer)
    found = store(model, data, tmp_path / "stored", top_k=types, precision="float32")
    assert found["targets"] == int(task.data.split("train").lengths("target").sum())
    folder = model / "best" if (model / "best").is_dir() else model
    beside = load_translator(folder).eval()
    _, read = task.stored_teacher(str(tmp_path / "stored"))
    torch.manual_seed(0)
    student = task.build_model()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    losses: list[nn.Module] = [
        labo.DistillationLoss(alpha=0.5, tau=1.0),
        labo.TopKDistillationLoss(alpha=0.5, tail="bucket"),
    ]
    for position in range(task.steps_per_epoch):
        batch = task.batch(task.global_batch(0, position), 0)
        head, target = task.outputs(student, batch), task.tokens(batch)
        with torch.no_grad():
            theirs = task.outputs(beside, batch)
        indices, log_p = read(batch)
        dense = theirs.logits(theirs.states).float().log_softmax(-1)
        found = torch.full((len(target), types), torch.nan).scatter_(1, indices, log_p)
        torch.testing.assert_close(found, dense[:, :types], rtol=1e-4, atol=1e-5)
        if len(theirs.weight) > types:  # what no token has is not stored
            continue
        values = [
            head_loss(loss, head, target, second)
            for loss, second in zip(losses, (theirs, (indices, log_p)), strict=True)
        ]
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(v, head.weight, retain_graph=True)[0] for v in values]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
    empty = read(batch.without_targets())
    assert [tuple(column.shape) for column in empty] == [(0, types)] * 2


def test_training_from_files(own, tmp_path):
    languages = "data.languages=[de-en, fr-en]"
    stored, task = tmp_path / "stored", cldr(languages)
    store(own, task.data.path, stored, top_k=8)
    method = ["method=topk-kd", f"method.stored={stored}"]
    noise = "data.switchout_source=0.5"  # changes no target
    train(load_recipe("cldr", [*OWN, *TRAIN, languages, *method, noise]), tmp_path / "run")
    values = losses(tmp_path / "run")
    assert values[-1] < values[0]


def test_what_is_refused(own, tmp_path):
    task = cldr("data.languages=[de-en, fr-en]")
    data, out = task.data.path, tmp_path / "stored"
    with pytest.raises(RequestError, match="--block is for documents"):
        store(own, data, out, block=8)
    with pytest.raises(RequestError, match="--top-k 9999: the vocabulary has 400 types"):
        store(own, data, out, top_k=9999)
    with pytest.raises(DataError, match="no prepared text here; `labo prepare` or `labo"):
        store(own, tmp_path, out)
    with pytest.raises(RequestError, match="was not prepared with the tokenizer of"):
        store(own, cldr("data.vocabulary=350").data.path, out)
    store(own, data, out, top_k=2)
    assert StoredTeacher(out).about.data == Prepared(data).fingerprint
    with pytest.raises(DataError, match="no prepared text here"):
        store(own, out, tmp_path / "again")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "prepared.json").write_text("{")
    with pytest.raises(RequestError, match=r"damaged/prepared\.json: not JSON"):
        store(own, tmp_path / "damaged", tmp_path / "again")
    with pytest.raises(RequestError, match="was made for other data"):
        cldr("data.languages=[de-en]").stored_teacher(str(out))
    for setting in ("data.bpe_dropout=0.1", "data.switchout_target=0.5"):
        name = setting.split("=")[0]
        with pytest.raises(RequestError, match=f"{name} changes the targets.*method=kd"):
            cldr("data.languages=[de-en, fr-en]", setting).stored_teacher(str(out))


def test_a_model_that_is_too_short_is_refused(own, tmp_path, monkeypatch):
    data = cldr("data.languages=[de-en, fr-en]").data
    longest = int(data.split("train").longest().max())
    monkeypatch.setattr(teacher, "positions_of", lambda config: longest - 1)
    with pytest.raises(RequestError, match=f"of {longest} tokens, but .*best takes {longest - 1}:"):
        store(own, data.path, tmp_path / "stored")


def test_a_model_for_another_task_is_refused(tmp_path):
    train(load_recipe("digits", ["method=base", "train.epochs=1"]), tmp_path / "digits")
    with pytest.raises(RequestError, match="holds a model for image_classification, not for tran"):
        store(tmp_path / "digits", cldr().data.path, tmp_path / "stored")
