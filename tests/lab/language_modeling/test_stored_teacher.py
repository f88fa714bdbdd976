"""labo teacher: stored predictions, and training with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

import labo
from lab_runs import losses
from labo.lab.errors import DataError, RequestError
from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.model import LanguageModel, causal_config
from labo.lab.language_modeling.options import Tokenization
from labo.lab.language_modeling.prepare import prepare_documents
from labo.lab.language_modeling.prepared import IGNORED, PreparedDocuments
from labo.lab.language_modeling.task import LanguageModelingTask
from labo.lab.language_modeling.teacher import DocumentPredictions
from labo.lab.methods import METHODS
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.text import folder
from labo.lab.text.head import head_loss
from labo.lab.text.stored import StoredTeacher
from labo.lab.text.teacher import store
from labo.lab.train import train
from tiny_language import SENTENCES, learned_tokenizer

BLOCK = 24
TINY = ["model.width=16", "model.layers=1", "model.heads=2", "model.dropout=0"]


def prepare(out: Path, kind: str) -> Path:
    parts = [*SENTENCES[:12], "\n".join(SENTENCES[12:16]), "x"]
    documents = [
        RawDocument(f"{n}", "text", (Part(text, True),))
        if kind == "text"
        else RawDocument(f"{n}", "prompt", (Part(f"say {text[:9]}", False), Part(text[:7], True)))
        for n, text in enumerate(parts)
    ]
    options = Tokenization(holdout=5, holdout_test=5)
    prepare_documents(out, {"train": documents}, options, tokenizer=learned_tokenizer())
    return out


@pytest.fixture(scope="module", params=["text", "prompt"])
def data(request, tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp(request.param) / "data", request.param)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("texts") / "data", "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Hugging Face folder with an untrained model and the tokenizer of the data."""
    out = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    size = {"width": 16, "layers": 1, "heads": 2}
    tokenizer = learned_tokenizer()
    config = causal_config("gpt2-tiny", len(tokenizer), positions=BLOCK, dimensions=size)
    causal = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.mul_(4)
    causal.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def task_of(data: Path, *settings: str) -> LanguageModelingTask:
    chosen = ["data.name=prepared", f"data.path={data}", f"data.block={BLOCK}"]
    chosen += ["train.batch_tokens=96", *TINY, *settings]
    return LanguageModelingTask(load_recipe("lm-manual", chosen))


def test_all_classes_are_dense_distillation(data, model, tmp_path):
    """For every batch, and with any packing: value and gradient of the teacher beside."""
    types = len(learned_tokenizer())
    store(model, data, tmp_path / "stored", top_k=types, precision="float32")
    teacher = LanguageModel(GPT2LMHeadModel.from_pretrained(model)).eval()
    task = task_of(data)
    _, read = task.stored_teacher(str(tmp_path / "stored"))
    torch.manual_seed(0)
    student = task.build_model()
    dense, stored = (
        labo.DistillationLoss(alpha=0.5, tau=1.0),
        labo.TopKDistillationLoss(alpha=0.5, tail="bucket"),
    )
    for position in range(task.steps_per_epoch):
        batch = task.batch(task.global_batch(0, position), 0)
        target = batch.target[batch.target != IGNORED]
        head = task.outputs(student, batch)
        with torch.no_grad():
            theirs = task.outputs(teacher, batch)
        values = [
            head_loss(dense, head, target, theirs),
            head_loss(stored, head, target, read(batch)),
        ]
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(v, head.weight, retain_graph=True)[0] for v in values]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
    empty = read(batch.without_targets())
    assert [tuple(column.shape) for column in empty] == [(0, types)] * 2


def test_a_few_classes_and_their_size(texts, model, tmp_path):
    found = store(model, texts, tmp_path / "stored", top_k=3)
    stored = StoredTeacher(tmp_path / "stored")
    assert found["targets"] == stored.about.targets > 0
    indices, log_p = stored.sample(2)
    assert indices.shape == log_p.shape
    assert (log_p[:, :-1] >= log_p[:, 1:]).all()


def test_an_interrupted_command_goes_on(texts, model, tmp_path, monkeypatch):
    """What is complete is not computed again, and the files are those of one go."""
    small = {"top_k": 4, "part_targets": 60}
    store(model, texts, tmp_path / "whole", **small)
    calls = []
    own = DocumentPredictions.samples

    def stops(predictions, first, last, top_k):
        calls.append(first)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(predictions, first, last, top_k)

    monkeypatch.setattr(DocumentPredictions, "samples", stops)
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, tmp_path / "parts", **small)
    assert not (tmp_path / "parts").exists()
    interrupted = calls.copy()
    store(model, texts, tmp_path / "parts", **small)
    assert calls[3] == interrupted[2]
    files = [sorted(p.name for p in (tmp_path / f).iterdir()) for f in ("whole", "parts")]
    assert files[0] == files[1]
    assert len(files[0]) > 3
    for name in files[0]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    # Other settings begin anew.
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, tmp_path / "other", **small)
    store(model, texts, tmp_path / "other", top_k=5, part_targets=60)
    assert StoredTeacher(tmp_path / "other").top_k == 5


def test_nothing_is_lost_when_the_last_step_is_interrupted(texts, model, tmp_path, monkeypatch):
    small = {"top_k": 4, "part_targets": 60}
    store(model, texts, tmp_path / "whole", **small)
    for name in ("write_json", "sha256"):  # while the files are hashed, and before the manifest

        def stops(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(folder, name, stops)
            with pytest.raises(KeyboardInterrupt):
                store(model, texts, tmp_path / name, **small)
        with monkeypatch.context() as patch:
            patch.setattr(DocumentPredictions, "samples", stops)  # nothing is computed again
            store(model, texts, tmp_path / name, **small)
        for path in (tmp_path / "whole").iterdir():
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_part_is_made_again(texts, model, tmp_path, monkeypatch, capsys, damage):
    """The part and those after it; with another size of parts too, nothing is left out."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small = {"top_k": 4, "part_targets": 40}
    store(model, texts, whole, **small)
    own, calls = DocumentPredictions.samples, []

    def stops(predictions, first, last, top_k):
        calls.append(first)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(predictions, first, last, top_k)

    monkeypatch.setattr(DocumentPredictions, "samples", stops)
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, parts, **small)
    part = tmp_path / ".parts.unfinished/part-00001.arrow"
    content = part.read_bytes()
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(content[:-8] if damage == "cut" else content[:-1] + b"x")
    store(model, texts, parts, **small)
    how = "is missing" if damage == "missing" else "is damaged (its checksum does not fit)"
    line = f"labo: {part} {how}; it and all after it are made again\n"
    assert capsys.readouterr().err == line
    assert calls[4] == calls[1]
    for path in whole.iterdir():
        assert path.read_bytes() == (parts / path.name).read_bytes()
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, tmp_path / "sizes", **small)
    store(model, texts, tmp_path / "sizes", top_k=4, part_targets=70)
    assert len(StoredTeacher(tmp_path / "sizes")) == len(StoredTeacher(whole))


def test_training_from_files(texts, model, tmp_path):
    stored = tmp_path / "stored"
    store(model, texts, stored, top_k=8)
    recipe = load_recipe(
        "lm-manual",
        [
            "data.name=prepared",
            f"data.path={texts}",
            f"data.block={BLOCK}",
            "train.batch_tokens=96",
            "train.epochs=2",
            "method=topk-kd",
            f"method.stored={stored}",
            "method.tail=labo",
            *TINY,
        ],
    )
    train(recipe, tmp_path / "run")
    values = losses(tmp_path / "run")
    assert values[-1] < values[0]

    held = StoredTeacher(stored)

    # Another store under the same name is another experiment.
    signature = RunDirectory(tmp_path / "run").results()["signature"]
    (tmp_path / "run" / "results.json").unlink()
    store(model, texts, stored, top_k=4, force=True)
    with pytest.raises(DataError, match="was replaced while it was read"):
        held.sample(0)
    with pytest.raises(RequestError, match=r"the teacher of .* has changed: stored@"):
        train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "other")
    assert RunDirectory(tmp_path / "other").results()["signature"] != signature


def test_what_is_refused(texts, model, tmp_path):
    out = tmp_path / "stored"
    with pytest.raises(RequestError, match="--top-k 9999: the vocabulary has"):
        store(model, texts, out, top_k=9999)
    with pytest.raises(RequestError, match="--block"):
        store(model, texts, out, block=BLOCK + 1)
    with pytest.raises(RequestError, match=r"neither a run nor a model folder"):
        store(tmp_path, texts, out)
    store(model, texts, out, top_k=2)
    with pytest.raises(RequestError, match="exists; --force replaces it"):
        store(model, texts, out, top_k=2)
    other = prepare(tmp_path / "other", "prompt")
    with pytest.raises(RequestError, match="was made for other data"):
        task_of(other).stored_teacher(str(out))
    with pytest.raises(DataError, match="no prepared data here; `labo teacher` makes it"):
        StoredTeacher(tmp_path / "nothing")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RequestError, match=r"cannot write .*/y: .*file is a file, not a folder"):
        store(model, texts, file / "y", top_k=2)
    part = out / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="damaged"):
        StoredTeacher(out)


def test_what_is_read_or_made_by_another_command_is_kept(texts, model, tmp_path):
    """--force replaces only what labo teacher made, and nothing that the command reads."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(texts, data)
    shutil.copytree(model, run / "best")
    for out, where in (
        (data, "is the input .*data"),
        (tmp_path, "contains the input .*data"),
        (data / "stored", "is inside the input .*data"),
        (run, "contains the input .*best"),
        (run / "best/stored", "is inside the input .*best"),
    ):
        with pytest.raises(RequestError, match=f"{where}: choose another folder to write"):
            store(run, data, out, top_k=2, force=True)
    other = prepare(tmp_path / "other", "text")
    with pytest.raises(RequestError, match="other exists and was not made by `labo teacher`"):
        store(run, data, other, top_k=2, force=True)
    for path in (data, other):
        assert PreparedDocuments(path).fingerprint
    store(run, data, run / "stored", top_k=2)
    store(run, data, run / "stored", top_k=3, force=True)
    assert StoredTeacher(run / "stored").top_k == 3


def test_the_method_is_for_text():
    assert METHODS["topk-kd"].needs == {"stored_teacher"}
    with pytest.raises(RequestError, match="does not provide"):
        load_recipe("digits", ["method=topk-kd", "method.stored=x"])
