"""A model that is split over processes (FSDP2) is trained as one that is whole on each."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lab_runs import Kill, log_of, losses, metrics, outcome, run
from labo.lab.errors import RequestError
from labo.lab.images.networks import CONVNETS
from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.options import Tokenization
from labo.lab.language_modeling.prepare import prepare_documents
from labo.lab.recipes import load_recipe
from labo.lab.run.sharding import blocks, separate_blocks, spread
from tiny_language import SENTENCES

SPLIT = "train.parallel=fsdp"
# Micro-batches, clipping, tied embeddings, and vectors of 16 numbers, which three processes share
# unevenly.
TEXT = ["data.name=prepared", "data.block=24", "train.batch_tokens=96", "train.accumulate=2"]
TEXT += ["model.width=16", "model.layers=2", "model.heads=2", "model.dropout=0", "method=ls"]
TEXT += ["train.max_steps=8", "train.eval_every_steps=4", "train.save_every=2", "train.log_every=1"]
TEXT += ["optim.warmup_steps=2", "train.keep_last=1"]
# 1293 images in batches of 323: in the last one, of one image, a process has nothing to do. The
# validation split is evaluated 256 at a time.
IMAGES = ["model.name=vit-lite", "model.patch=4", "model.width=8", "model.layers=2"]
IMAGES += ["model.heads=2", "train.epochs=2", "train.batch_size=323", "train.log_every=1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    documents = [RawDocument(f"{n}", "text", (Part(s, True),)) for n, s in enumerate(SENTENCES)]
    folder = tmp_path_factory.mktemp("texts") / "data"
    prepare_documents(
        folder, {"train": documents}, Tokenization(vocabulary=290, holdout=4, holdout_test=5)
    )
    return folder


def train(out: Path, data: Path | None, more: list[str], world: int, kill: Kill | None = None):
    """A language model on texts, or a vision transformer on digits if there are none."""
    settings = ["digits", *IMAGES] if data is None else ["lm-manual", *TEXT, f"data.path={data}"]
    codes = run(["train", *settings, *more, "--out", str(out)], log_of(out), world, kill)
    assert kill is not None or codes == {0}, log_of(out).read_text()
    return codes


def assert_same_run(one: Path, two: Path, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(losses(two), losses(one), rtol=rtol, atol=1e-6)
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        torch.testing.assert_close(
            ours.get("valid", {}), theirs.get("valid", {}), rtol=1e-4, atol=1e-5
        )
    ours, theirs = (load_file(out / "best" / "model.safetensors") for out in (two, one))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def one(texts, tmp_path_factory) -> Path:
    """One process with the whole model."""
    out = tmp_path_factory.mktemp("one") / "run"
    train(out, texts, [], 1)
    return out


@pytest.fixture(scope="module")
def split(texts, tmp_path_factory) -> Path:
    """Two processes with a half each."""
    out = tmp_path_factory.mktemp("split") / "run"
    train(out, texts, [SPLIT], 2)
    return out


# ------------------------------------------------------------------ the same training


def test_halves_of_a_language_model_give_the_curve_of_the_whole(one, split):
    assert_same_run(one, split)
    assert "2 processes with a share of the model each" in log_of(split).read_text()
    kept = [load_file(next((out / "kept").glob("*.safetensors"))) for out in (one, split)]
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        ["method=labo", "method.refresh=epoch"],  # a second model, of the start of the epoch
        ["method=connet", "model.preset=llama-tiny"],  # parameters of the loss, inner states
        ["method=labo", "method.outer_steps=2", "train.ema=0.9", "model.lora.rank=2"],
    ],
    ids=["epoch start", "connet", "lora"],
)
def test_language_models(more, texts, tmp_path):
    settings = [*more, "train.max_steps=5"]
    train(tmp_path / "one", texts, settings, 1)
    train(tmp_path / "two", texts, [*settings, SPLIT], 2)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "more",
    [
        ["method=beta-ls", "train.average_last=2"],  # an averaged model
        ["method=cs-kd", "train.ema=0.9", "model.freeze=[vit.embeddings]"],  # two forward passes
    ],
    ids=["beta-ls", "cs-kd"],
)
def test_image_models(more, tmp_path):
    train(tmp_path / "one", None, more, 1)
    train(tmp_path / "two", None, [*more, SPLIT], 2)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_bfloat16(one, texts, tmp_path):
    train(tmp_path / "two", texts, [SPLIT, "train.precision=bf16"], 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(one), rel=0.02)


# ------------------------------------------------------------------ checkpoints


def test_each_process_writes_its_share(split, one):
    whole = max((one / "checkpoints").iterdir())
    newest = max((split / "checkpoints").iterdir())
    files = sorted((newest / "shards").iterdir())
    assert len(files) == 2
    for group in ("model", "optimizer"):
        expected = {
            name: tensor
            for name, tensor in load_file(whole / f"{group}.safetensors").items()
            if tensor.dim() > 0
        }
        found: dict[str, list[torch.Tensor]] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    if key.startswith(f"{group}/"):
                        found.setdefault(key.removeprefix(f"{group}/"), []).append(
                            file.get_tensor(key)
                        )
        assert found.keys() == expected.keys()
        for name, parts in found.items():
            assert [len(part) for part in parts] == [len(expected[name]) // 2] * 2
            torch.testing.assert_close(torch.cat(parts), expected[name], rtol=1e-3, atol=1e-5)
    plain = load_file(newest / "optimizer.safetensors")
    assert all(name.endswith(".step") for name in plain)


@pytest.mark.parametrize("kill", [("step", 5), ("rename", 14)], ids=str)
def test_a_killed_run_ends_as_if_nothing_had_happened(kill, split, texts, tmp_path):
    out = tmp_path / "run"
    assert -signal.SIGKILL in train(out, texts, [SPLIT], 2, kill)
    train(out, texts, [SPLIT], 2)
    assert "continuing" in log_of(out).read_text()
    assert outcome(out) == outcome(split)


def test_a_run_goes_on_with_another_number_of_processes(one, texts, tmp_path):
    out = tmp_path / "run"
    for world in (2, 3, 1):  # from step 0, 2 and 4
        assert 0 not in train(out, texts, [SPLIT], world, ("step", 3))
    train(out, texts, [SPLIT], 2)
    assert_same_run(one, out)
    assert "processes:2>3>1>2|" in (out / "results.json").read_text()
    assert "note: train.parallel=fsdp has no effect with one process" in log_of(out).read_text()


def test_damage_is_found_and_best_is_written_again(split, tmp_path):
    out = shutil.copytree(split, tmp_path / "run")
    (out / "best" / "model.safetensors").unlink()
    log = tmp_path / "evaluate.log"
    assert run(["evaluate", str(out)], log) == {0}, log.read_text()
    assert "was written again from the checkpoint" in log.read_text()
    assert outcome(out) == outcome(split)
    shard = max(max((out / "checkpoints").iterdir()).glob("shards/*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (out / "results.json").unlink()
    recipe = ["lm-manual", *TEXT, f"data.path={load_recipe(str(out / 'recipe.yaml')).data.path}"]
    assert run(["train", *recipe, SPLIT, "--out", str(out)], log, 2) == {0}, log.read_text()
    assert f"{shard} is damaged" in log.read_text()
    assert outcome(out) == outcome(split)


# ------------------------------------------------------------------ blocks and refusals


def test_blocks_are_layers_and_residual_blocks():
    network = CONVNETS["resnet18"](10, 3)
    assert [type(block).__name__ for block in blocks(network)] == ["BasicBlock"] * 8
    assert blocks(CONVNETS["small"](10, 1)) == []


def test_blocks_that_share_a_parameter_are_not_split_apart():
    layers = [nn.TransformerEncoderLayer(4, 1, 4) for _ in range(3)]
    layers[1].linear1.weight = layers[0].linear1.weight
    assert separate_blocks(nn.Sequential(*layers)) == layers[2:]


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("cldr", [], "train.parallel: translation does not support fsdp; leave it at data"),
        ("digits", ["train.precision=fp16"], "fsdp goes with precision no or bf16"),
    ],
)
def test_refused_in_the_recipe(recipe, more, message):
    with pytest.raises(RequestError, match=message):
        load_recipe(recipe, [SPLIT, *more])


def test_the_plugins_of_accelerate_are_refused():
    with pytest.raises(RequestError, match=r"told to use FSDP.*train\.parallel=fsdp"):
        spread("data", SimpleNamespace(distributed_type=DistributedType.FSDP))  # type: ignore[arg-type]
