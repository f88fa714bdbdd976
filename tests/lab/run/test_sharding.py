"""A model that is split over processes (FSDP2) is trained as one that is whole on each."""

from __future__ import annotations

import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gloo import Processes, World
from lab_runs import Kill, log_of, losses, metrics, outcome, run
from labo.lab.errors import RequestError
from labo.lab.images import task as images
from labo.lab.images.networks import CONVNETS
from labo.lab.language_modeling import task as language_modeling
from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.options import Tokenization
from labo.lab.language_modeling.prepare import prepare_documents
from labo.lab.recipes import load_recipe
from labo.lab.run.sharding import FullySharded, blocks, separate_blocks, spread
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
    settings = [*more, "train.max_steps=7"]  # an epoch has five
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


def test_a_killed_run_ends_as_if_nothing_had_happened(split, texts, tmp_path):
    out = tmp_path / "run"
    # While the first process writes its part of the checkpoint of step 4.
    assert -signal.SIGKILL in train(out, texts, [SPLIT], 2, ("rename", 23))
    unfinished = out / "checkpoints" / ".step-00000004.tmp"
    assert len(list(unfinished.glob("shards/*"))) == 2
    assert not (unfinished / "manifest.json").exists()
    train(out, texts, [SPLIT], 2)
    assert f"continuing {out} at step 2" in log_of(out).read_text()
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


# ------------------------------------------------------------------ the parts


class States(NamedTuple):
    states: Tensor
    weight: Tensor


class Model(nn.Module):
    """Two layers, and an output layer that is applied by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 1, 5, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> States:
        for layer in self.layers:
            x = layer(x)
        return States(x, self.head.weight)


def shares(world: World) -> None:
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=world.size,
        mixed_precision="no",
        is_main_process=world.rank == 0,
    )
    whole, learned = Model(), nn.Parameter(torch.ones(3))
    expected = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    parallel = FullySharded(accelerator)
    model = parallel.place(whole)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        share = expected[name].chunk(world.size)[world.rank]  # 3 + 3 of 6 rows, 3 + 2 of 5
        assert torch.equal(parameter.to_local(), share)
    x = torch.randn(2, 3, 6)
    for _ in range(3):
        states, weight = model(x)
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (5, 6)  # whole, until the backward pass has ended
        assert not isinstance(weight, DTensor)
        assert isinstance(model.layers[0].linear1.weight, DTensor)  # split again
        ((states @ weight.T).square().sum() + learned.square().sum()).backward()
        assert not weight._backward_hooks
    gradients = [p.grad.full_tensor() for p in model.parameters()] + [learned.grad.clone()]
    norm = parallel.clip([*model.parameters(), learned], 0.5)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in gradients]).norm())
    torch.testing.assert_close(learned.grad, gradients[-1] * 0.5 / norm)
    gathered = parallel.whole(model.state_dict())
    assert gathered.keys() == (expected.keys() if world.rank == 0 else set())
    assert all(torch.equal(gathered[name], expected[name]) for name in gathered)


def test_a_process_has_its_share_of_each_parameter(tmp_path):
    started = Processes(2, tmp_path)
    try:
        started.run(2, shares)
    finally:
        started.stop()


def calls_and_samples(task: Any, model: nn.Module, world: int, rank: int) -> tuple[int, int]:
    """Of one process that evaluates its share: passes of the model, and targets."""
    accelerator = SimpleNamespace(
        num_processes=world, process_index=rank, device=torch.device("cpu"), autocast=nullcontext
    )
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(rank))
    targets = sum(len(target) for _, target in task.logits(model, "valid", accelerator))
    hook.remove()
    return len(calls), targets


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_evaluation_runs_the_model_equally_often_on_every_process(kind, texts, monkeypatch):
    if kind == "images":
        task: Any = images.ImageTask(load_recipe("digits", IMAGES))
        count = len(task.data.valid.labels)
    else:
        recipe = load_recipe("lm-manual", [*TEXT, f"data.path={texts}"])
        task = language_modeling.LanguageModelingTask(recipe)
        count = len(task._held_out("valid").packing)
    world = next(n for n in range(2, count) if count % n)
    monkeypatch.setattr(images, "_EVALUATED_AT_ONCE", count // world)
    monkeypatch.setattr(language_modeling, "TOKENS_AT_ONCE", 24 * (count // world))
    model = task.build_model()
    found = [calls_and_samples(task, model, world, rank) for rank in range(world)]
    assert [calls for calls, _ in found] == [2] * world  # the last one has no second batch
    assert sum(targets for _, targets in found) == calls_and_samples(task, model, 1, 0)[1]


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


def test_a_parameter_without_dimensions_is_refused():
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(RequestError, match="cannot split the parameter scale"):
        FullySharded.place(SimpleNamespace(), module)  # type: ignore[arg-type]
