"""labo teacher: stored predictions, and training with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import GPT2LMHeadModel

import labo
from lab_runs import losses
from labo.lab.errors import DataError, RequestError
from labo.lab.language_modeling.model import LanguageModel
from labo.lab.language_modeling.prepared import PreparedDocuments
from labo.lab.language_modeling.task import DocumentRecipe, LanguageModelingTask
from labo.lab.language_modeling.teacher import DocumentPredictions
from labo.lab.methods import METHODS
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.text import folder
from labo.lab.text.head import head_loss
from labo.lab.text.stored import StoredTeacher
from labo.lab.text.teacher import store
from labo.lab.train import train
from labo.lab.translation import teacher
from labo.lab.translation.model import load_translator
from labo.lab.translation.prepared import Prepared
from labo.lab.translation.task import TranslationTask
from tiny_folders import prepare_corpus, save_pretrained
from tiny_language import few_documents, save_causal
from tiny_translation import image_folder

BLOCK = 24
TINY = ["model.width=16", "model.layers=1", "model.heads=2", "model.dropout=0"]
OWN = ["data.size=300", "data.vocabulary=400", "model.width=16", "model.ffn=32", "model.heads=2"]
OWN += ["model.encoder_layers=1", "model.decoder_layers=1", "model.dropout=0", "decode.beam=1"]
OWN += ["train.batch_tokens=256", "train.epochs=2", "train.log_every=1", "optim.warmup_steps=5"]
BOTH = "data.languages=[de-en, fr-en]"
SMALL = {"top_k": 4, "part_targets": 60}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# ------------------------------------------------------------------ models and data


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return few_documents(tmp_path_factory.mktemp("texts") / "data", "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_causal(tmp_path_factory.mktemp("model"), BLOCK)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A run of this project, on phrases in two directions, with tags."""
    out = tmp_path_factory.mktemp("own") / "run"
    train(load_recipe("cldr", [*OWN, BOTH, "method=ls", "train.epochs=1"]), out)
    return out


def language_recipe(data: Path, *settings: str) -> DocumentRecipe:
    chosen = ["data.name=prepared", f"data.path={data}", f"data.block={BLOCK}"]
    return load_recipe("lm-manual", [*chosen, "train.batch_tokens=96", *TINY, *settings])


def cldr(*settings: str) -> TranslationTask:
    return TranslationTask(load_recipe("cldr", [*OWN, *settings]))


@pytest.fixture(scope="module", params=["prompt", "text", "own", "nllb", "t5"])
def case(request, tmp_path_factory):
    """A model, data prepared with its tokenizer, a task that learns from it, and its network."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind in ("prompt", "text"):
        model, data = request.getfixturevalue("model"), few_documents(folder / "data", kind)
        beside = LanguageModel(GPT2LMHeadModel.from_pretrained(model))
        return model, data, LanguageModelingTask(language_recipe(data)), beside
    if kind == "own":
        model, task = request.getfixturevalue("own"), cldr(BOTH)
        return model, task.data.path, task, load_translator(model / "best")
    model = save_pretrained(folder / kind, kind)
    data = prepare_corpus(folder / "data", kind, tokenizer=str(model))
    settings = [f"model={{pretrained: {model}}}", f"data.path={data}", "train.batch_tokens=256"]
    task = TranslationTask(load_recipe("translation-sft", settings))
    return model, data, task, load_translator(model)


# ------------------------------------------------------------------ what is stored


def test_all_classes_are_dense_distillation(case, tmp_path):
    """For every batch, however it is packed: predictions, value and gradient of the teacher."""
    model, data, task, beside = case
    types = len(task.target_tokenizer())
    stored = store(model, data, tmp_path / "stored", top_k=types, precision="float32")
    assert stored["targets"] == StoredTeacher(tmp_path / "stored").about.targets > 0
    _, read = task.stored_teacher(str(tmp_path / "stored"))
    beside.eval()
    torch.manual_seed(0)
    student = task.build_model()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    dense = labo.DistillationLoss(alpha=0.5, tau=1.0)
    from_files = labo.TopKDistillationLoss(alpha=0.5, tail="bucket")
    for position in range(task.steps_per_epoch):
        batch = task.batch(task.global_batch(0, position), 0)
        head, target = task.outputs(student, batch), task.tokens(batch)
        with torch.no_grad():
            theirs = task.outputs(beside, batch)
        indices, log_p = read(batch)
        expected = theirs.logits(theirs.states).float().log_softmax(-1)
        found = torch.full((len(target), types), torch.nan).scatter_(1, indices, log_p)
        torch.testing.assert_close(found, expected[:, :types], rtol=1e-4, atol=1e-5)
        if len(theirs.weight) > types:  # what no token has is not stored
            continue
        values = [
            head_loss(dense, head, target, theirs),
            head_loss(from_files, head, target, (indices, log_p)),
        ]
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(v, head.weight, retain_graph=True)[0] for v in values]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
    empty = read(batch.without_targets())
    assert [tuple(column.shape) for column in empty] == [(0, types)] * 2


# ------------------------------------------------------------------ interrupted


def interrupted(monkeypatch, number: int) -> list[int]:
    """Interrupt the work at its n-th part; the first samples of the parts that were asked for."""
    calls: list[int] = []
    own = DocumentPredictions.samples

    def stops(predictions, first, last):
        calls.append(first)
        if len(calls) == number:
            raise KeyboardInterrupt
        return own(predictions, first, last)

    monkeypatch.setattr(DocumentPredictions, "samples", stops)
    return calls


def same_files(one: Path, other: Path) -> None:
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_an_interrupted_command_goes_on(texts, model, tmp_path, monkeypatch):
    """What is complete is not computed again, and the files are those of one go."""
    store(model, texts, tmp_path / "whole", **SMALL)
    assert len(list((tmp_path / "whole").iterdir())) > 3
    calls = interrupted(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, tmp_path / "parts", **SMALL)
    assert not (tmp_path / "parts").exists()
    store(model, texts, tmp_path / "parts", **SMALL)
    assert calls[3] == calls[2]
    same_files(tmp_path / "whole", tmp_path / "parts")
    # Other settings begin anew.
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, tmp_path / "other", **SMALL)
    # With another size of parts nothing is left out.
    store(model, texts, tmp_path / "other", top_k=5, part_targets=70)
    other = StoredTeacher(tmp_path / "other")
    assert (other.top_k, len(other)) == (5, len(StoredTeacher(tmp_path / "whole")))


def test_nothing_is_lost_when_the_last_step_is_interrupted(texts, model, tmp_path, monkeypatch):
    store(model, texts, tmp_path / "whole", **SMALL)
    stops = Mock(side_effect=KeyboardInterrupt)
    for name in ("write_json", "sha256"):  # while the files are hashed, and before the manifest
        with monkeypatch.context() as patch:
            patch.setattr(folder, name, stops)
            with pytest.raises(KeyboardInterrupt):
                store(model, texts, tmp_path / name, **SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(DocumentPredictions, "samples", stops)  # nothing is computed again
            store(model, texts, tmp_path / name, **SMALL)
        same_files(tmp_path / "whole", tmp_path / name)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_part_and_those_after_it_are_made_again(
    texts, model, tmp_path, monkeypatch, capsys, damage
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small = {"top_k": 4, "part_targets": 40}
    store(model, texts, whole, **small)
    calls = interrupted(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        store(model, texts, parts, **small)
    part = tmp_path / ".parts.unfinished/part-00001.arrow"
    how = "is missing" if damage == "missing" else "is damaged (its checksum does not fit)"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    store(model, texts, parts, **small)
    line = f"labo: {part} {how}; it and all after it are made again\n"
    assert capsys.readouterr().err == line
    assert calls[4] == calls[1]
    same_files(whole, parts)


# ------------------------------------------------------------------ training


def test_documents_are_learned_from_files(texts, model, tmp_path):
    stored = tmp_path / "stored"
    store(model, texts, stored, top_k=8)
    method = ["method=topk-kd", f"method.stored={stored}", "method.tail=labo", "train.epochs=2"]
    recipe = language_recipe(texts, *method)
    train(recipe, tmp_path / "run")
    values = losses(tmp_path / "run")
    assert values[-1] < values[0]

    # Another store under the same name is another experiment.
    held = StoredTeacher(stored)
    signature = RunDirectory(tmp_path / "run").results()["signature"]
    (tmp_path / "run" / "results.json").unlink()
    store(model, texts, stored, top_k=4, force=True)
    with pytest.raises(DataError, match="was replaced while it was read"):
        held.sample(0)
    with pytest.raises(RequestError, match=r"the teacher of .* has changed: stored@"):
        train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "other")
    assert RunDirectory(tmp_path / "other").results()["signature"] != signature


def test_translations_are_learned_from_files(own, tmp_path):
    stored = tmp_path / "stored"
    store(own, cldr(BOTH).data.path, stored, top_k=8)
    method = ["method=topk-kd", f"method.stored={stored}"]
    noise = "data.switchout_source=0.5"  # changes no target
    train(load_recipe("cldr", [*OWN, BOTH, *method, noise]), tmp_path / "run")
    values = losses(tmp_path / "run")
    assert values[-1] < values[0]


def test_the_method_is_for_text():
    assert METHODS["topk-kd"].needs == {"stored_teacher"}
    for method, need in ((["topk-kd", "method.stored=x"], "stored_t"), (["mls"], "vocabulary_g")):
        with pytest.raises(RequestError, match=f"needs {need}.* image.* does not provide"):
            load_recipe("digits", [f"method={method[0]}", *method[1:]])


# ------------------------------------------------------------------ what is refused


def test_wrong_requests_for_documents(texts, model, tmp_path):
    out = tmp_path / "stored"
    for options, message in (
        ({"top_k": 9999}, "--top-k 9999: the vocabulary has"),
        ({"precision": "int8"}, "--precision: should be 'float16' or 'float32'"),
        ({"block": BLOCK + 1}, "--block"),
    ):
        with pytest.raises(RequestError, match=message):
            store(model, texts, out, **options)
    with pytest.raises(RequestError, match=r"is no run with best/config\.json"):
        store(tmp_path, texts, out)
    store(model, texts, out, top_k=2)
    with pytest.raises(RequestError, match="exists; --force replaces it"):
        store(model, texts, out, top_k=2)
    other = few_documents(tmp_path / "other", "prompt")
    with pytest.raises(RequestError, match="was made for other data"):
        LanguageModelingTask(language_recipe(other)).stored_teacher(str(out))
    with pytest.raises(DataError, match="no prepared data here; `labo teacher` makes it"):
        StoredTeacher(tmp_path / "nothing")
    part = out / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="damaged"):
        StoredTeacher(out)


def test_wrong_requests_for_translations(own, tmp_path, monkeypatch):
    data, out = cldr(BOTH).data, tmp_path / "stored"
    with pytest.raises(RequestError, match="--block is for documents"):
        store(own, data.path, out, block=8)
    with pytest.raises(DataError, match="no prepared text here; `labo prepare` or `labo"):
        store(own, tmp_path, out)
    with pytest.raises(RequestError, match="was not prepared with the tokenizer of"):
        store(own, cldr("data.vocabulary=350").data.path, out)
    store(own, data.path, out, top_k=2)
    assert StoredTeacher(out).about.data == Prepared(data.path).fingerprint
    with pytest.raises(DataError, match="no prepared text here"):
        store(own, out, tmp_path / "again")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "prepared.json").write_text("{")
    with pytest.raises(RequestError, match=r"damaged/prepared\.json: not JSON"):
        store(own, tmp_path / "damaged", tmp_path / "again")
    for setting in ("data.bpe_dropout=0.1", "data.switchout_target=0.5"):
        name = setting.split("=")[0]
        with pytest.raises(RequestError, match=f"{name} changes the targets.*method=kd"):
            cldr(BOTH, setting).stored_teacher(str(out))
    with pytest.raises(RequestError, match="holds a model for image_classification, not a mod"):
        store(image_folder(tmp_path / "digits"), data.path, tmp_path / "again")
    longest = int(data.split("train").longest().max())
    monkeypatch.setattr(teacher, "positions_of", lambda config: longest - 1)
    with pytest.raises(RequestError, match=f"of {longest} tokens, but .*best takes {longest - 1}:"):
        store(own, data.path, tmp_path / "short")


def test_what_is_read_or_made_by_another_command_is_kept(texts, model, tmp_path):
    """--force replaces only what labo teacher made, and nothing that the command reads."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(texts, data)
    shutil.copytree(model, run / "best")
    for out, where in (
        (data, "is the input .*data"),
        (run / "best/stored", "is inside the input .*best"),
    ):
        with pytest.raises(RequestError, match=f"{where}: choose another folder to write"):
            store(run, data, out, top_k=2, force=True)
    other = few_documents(tmp_path / "other", "text")
    with pytest.raises(RequestError, match="other exists and was not made by `labo teacher`"):
        store(run, data, other, top_k=2, force=True)
    for path in (data, other):
        assert PreparedDocuments(path).fingerprint
    store(run, data, run / "stored", top_k=2)
    store(run, data, run / "stored", top_k=3, force=True)
    assert StoredTeacher(run / "stored").top_k == 3
