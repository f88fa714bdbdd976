"""A fused model under ZeRO-3, where a parameter is empty but for the calls of its module.

Everywhere with a stand-in for the hooks of ZeRO-3, and with DeepSpeed itself where it is installed.
Its packages are not part of the dev extra (the first needs torch and wheel to be installed):

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed \
        einops hjson msgpack ninja nvidia-ml-py py-cpuinfo
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import labo
from gloo import launch
from labo.integrations import huggingface as hf
from labo.integrations.huggingface.models import shifted
from tiny_models import (
    arguments,
    assert_same,
    build,
    by_hand,
    collate,
    examples,
    gradients,
    make_trainer,
    trained,
)

each_tie = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


# ------------------------------------------------------------------ the hooks of ZeRO-3


class Before(torch.autograd.Function):
    """The identity. Its backward pass calls ``function`` first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


class Parameters(dict):
    """Those of a module; remembers which were read as attributes while they were empty."""

    def __init__(self, own: dict[str, Any], read: list[str]) -> None:
        super().__init__(own)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None and parameter.numel() == 0:
            self.read.append(name)
        return parameter


class Released:
    """The parameters of a model as ZeRO-3 has them, in one process and without DeepSpeed.

    A module has its own parameters from its first to its last line. The backward pass gathers them
    when the gradient of an output arrives, and releases them with the gradient of an input. All
    tensors among inputs and outputs are replaced for that.

    Attributes:
        gathered: the names of the modules, each time.
        read: names of parameters that were read while they were empty. DeepSpeed gathers such a
            parameter, and from then on keeps it for the whole call of the module that read it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.gathered: list[str] = []
        self.read: list[str] = []
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        for index, parameter in enumerate(self.whole):
            parameter.ds_id = index  # by this DeepSpeed knows its parameters
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            module._parameters = Parameters(module._parameters, self.read)
            self._add_hooks(module, partial(self.gather, name, own), partial(self.release, own))
        self.release(self.whole)

    def _add_hooks(self, module: nn.Module, gather: Any, release: Any) -> None:
        def replaced(values: Any, function: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: Before.apply(tensor, function), values)

        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: release())
        module.register_forward_hook(lambda _, args, output: replaced(output, gather))
        module.register_forward_pre_hook(lambda _, args: replaced(args, release))

    def gather(self, name: str, own: list[nn.Parameter]) -> None:
        self.gathered += [name] if own else []
        for parameter in own:
            parameter.data = self.whole[parameter]

    def release(self, parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def backward(self, value: Tensor) -> list[Tensor | None]:
        """The gradients. What has no input with a gradient is released in the end."""
        value.backward()
        self.release(self.whole)
        return [parameter.grad for parameter in self.whole]


def a_batch(size: int = 2) -> dict[str, Tensor]:
    """Two rows for each of some processes, the last of which has no target."""
    batch = collate(examples(2 * size))
    batch["labels"][size - 1 :: size] = -100
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@each_tie
def test_a_step_is_that_of_whole_parameters(tied, dtype):
    """float16 has its gradients computed in the backward pass, which needs the weight again."""
    model, batch = build("Llama", tied).to(dtype), a_batch()
    expected = by_hand(model, batch, labo.LABOLoss())
    slopes = gradients(model, expected)
    released = Released(hf.fuse_head(model, labo.LABOLoss()))
    value = model(**batch).loss
    assert released.gathered.count("lm_head") == 1
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    torch.testing.assert_close(value, expected, check_dtype=False, rtol=1e-3, atol=1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_same(released.backward(value), slopes, rtol=tolerance, atol=tolerance)


@each_tie
def test_without_a_target_every_parameter_has_a_gradient(tied):
    """The processes reduce each of them together."""
    model, batch = hf.fuse_head(build("Llama", tied), labo.LABOLoss()), a_batch()
    batch["labels"][:] = -100
    released = Released(model)
    found = released.backward(model(**batch, num_items_in_batch=7).loss)
    assert not any(gradient.any() for gradient in found)


@torch.no_grad()
def test_evaluation():
    model, batch = build("Llama"), a_batch()
    expected = by_hand(model, batch, nn.CrossEntropyLoss())
    Released(hf.fuse_head(model, labo.LABOLoss()))
    outputs = model(**batch)
    torch.testing.assert_close(outputs.loss, expected)
    with pytest.raises(ValueError, match=r"is sharded again by now.*eval_logits=True"):
        outputs.logits.sum()


def test_no_weight_is_read_outside_of_the_call_of_its_module():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    released = Released(model)
    released.backward(model(**a_batch()).loss)
    assert released.read == []


def test_reading_one_would_be_noticed():
    model, batch = build("Llama"), a_batch()
    released = Released(model)
    hidden, target = model.model(batch["input_ids"])[0], shifted(batch["labels"])
    with pytest.raises(ValueError, match="linear_weight"):
        labo.linear_loss(hidden, model.lm_head.weight, target, labo.LABOLoss())
    assert released.read == ["weight"]


# ------------------------------------------------------------------ DeepSpeed

RATE = 0.1
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,  # 1.0 unless it is given
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        # Every parameter is sharded and released after each use. Small ones are not otherwise.
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    },
}


def two_steps(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of one process, with the loss on the logits. The loss of an evaluation after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        by_hand(model, batch, labo.LABOLoss()).backward()
        optimizer.step()
    with torch.no_grad():
        return by_hand(model, batch, nn.CrossEntropyLoss())


def two_sharded_steps(rank: int, size: int, tied: bool) -> dict[str, Any]:
    """The same of one process of some, with its rows of the batch."""
    import deepspeed

    model = hf.fuse_head(build("Llama", tied), labo.LABOLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    batch = a_batch(size)
    items = (batch["labels"][:, 1:] != -100).sum()
    part = {name: rows[rank::size] for name, rows in batch.items()}
    for _ in range(2):
        # DeepSpeed takes the mean of the gradients of all processes.
        engine.backward(engine(**part, num_items_in_batch=items / size).loss)
        engine.step()
    with torch.no_grad():
        evaluated = engine(**part, num_items_in_batch=items).loss
    torch.distributed.all_reduce(evaluated)
    return {
        "evaluated": evaluated,
        "released": all(parameter.numel() == 0 for parameter in trained(model)),
        "readers": [type(x).__name__ for x in model.modules() if x.ds_external_parameters()],
        "weights": gathered_weights(model),
    }


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def trainer_settings(size: int) -> dict[str, Any]:
    return {"max_steps": 2, "learning_rate": RATE, "per_device_train_batch_size": size}


def sharded_trainer(out: str, size: int) -> dict[str, Tensor]:
    """Weights after two steps of a Trainer. The model is sharded when it is loaded."""
    import deepspeed

    args = arguments(out, deepspeed=CONFIG, **trainer_settings(2))
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/model")
    assert model.lm_head.weight.numel() == 0
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        trainer = make_trainer("fused", model, labo.LABOLoss(), args, examples(4 * size))
    trainer.train()
    return gathered_weights(model)


def as_one_of_some(rank: int, size: int, out: str) -> None:
    import deepspeed

    # It would be compiled, which takes a minute. Without it DeepSpeed uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {tied: two_sharded_steps(rank, size, tied) for tied in (True, False)}
    found["trainer"] = sharded_trainer(out, size)
    if rank == 0:
        torch.save(found, f"{out}/found.pt")


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def sharded(request, tmp_path_factory):
    """The number of processes, and what they find."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed", reason="needs DeepSpeed, see the first lines of the file")
        out = tmp_path_factory.mktemp("sharded")
        build("Llama", tied=False).save_pretrained(out / "model")
        launch(request.param, as_one_of_some, request.param, str(out))
    return request.param, torch.load(out / "found.pt")


def assert_weights(found: dict[str, Tensor], model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert_same(found.values(), expected.values())


@each_tie
def test_sharded_processes_are_one(sharded, tied):
    """Although the last of them has no target."""
    size, found = sharded
    model = build("Llama", tied)
    torch.testing.assert_close(found[tied]["evaluated"], two_steps(model, a_batch(size)))
    assert_weights(found[tied]["weights"], model)
    assert found[tied]["released"]


def test_a_trainer_with_a_model_that_is_sharded_when_it_is_loaded(sharded, tmp_path):
    size, found = sharded
    model, args = build("Llama", tied=False), arguments(tmp_path, **trainer_settings(2 * size))
    make_trainer("regularized", model, labo.LABOLoss(), args, examples(4 * size)).train()
    assert_weights(found["trainer"], model)


@each_tie
def test_the_weight_is_there_for_the_call_of_the_output_layer_only(sharded, tied):
    """DeepSpeed keeps a parameter for the whole call of another module that reads it."""
    assert sharded[1][tied]["readers"] == []
