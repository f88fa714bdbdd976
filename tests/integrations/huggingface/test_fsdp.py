"""The Trainer with ``fsdp=``: accelerate shards the model, and two processes are one.

accelerate uses FSDP on accelerators only. Here two processes of a CPU are passed off as some, which
changes which of its branches are taken and nothing in them.
"""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import fully_shard

import labo
from gloo import launch
from labo.integrations import huggingface as hf
from tiny_models import (
    arguments,
    assert_same,
    build,
    collate,
    examples,
    gradients,
    make_trainer,
)
from tiny_sft import conversations, make

# How the loss is attached, and whether embedding and output layer share their weight.
CASES = [("fused", True), ("fused", False), ("regularized", False), ("sft", False)]
SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
    },
}


def three_steps(way: str, tied: bool, out: str, batch_size: int, **sharding: Any) -> Any:
    """The trainer after three accumulated steps, and the loss of an evaluation."""
    model = build("Llama", tied=tied)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.02,
        "prediction_loss_only": True,
        **sharding,
    }
    if way == "sft":
        data = conversations(24)
        trainer = make(out, model, data, **settings)
        hf.regularize(trainer, loss)
    else:
        data = examples(24)
        trainer = make_trainer(way, model, loss, arguments(out, **settings), data)
    trainer.train()
    return trainer, trainer.evaluate(data)["eval_loss"]


def as_accelerators(self: PartialState, *args: Any, **kwargs: Any) -> None:
    as_usual(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_XPU


as_usual = PartialState.__init__


def as_one_of_two(rank: int, out: str) -> None:
    datasets.disable_progress_bars()
    PartialState.__init__ = as_accelerators
    for index, case in enumerate(CASES):
        trainer, value = three_steps(*case, out, batch_size=2, **SHARDED)
        assert trainer.accelerator.distributed_type == DistributedType.FSDP
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            torch.save((value, state), f"{out}/{index}.pt")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What each case gives in two processes."""
    out = tmp_path_factory.mktemp("sharded")
    launch(2, as_one_of_two, str(out))
    return [torch.load(out / f"{index}.pt") for index in range(len(CASES))]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_two_sharded_processes_are_one(index, sharded, tmp_path):
    trainer, expected = three_steps(*CASES[index], str(tmp_path), batch_size=4)
    value, state = sharded[index]
    if CASES[index][0] != "sft":  # which takes the mean over the batches of all processes
        assert value == pytest.approx(expected, rel=1e-4)
    one = trainer.model.state_dict()
    assert state.keys() == one.keys()
    assert_same(state.values(), one.values(), rtol=1e-4, atol=1e-5)


def distilled(out: str, shard: Any = None) -> Any:
    """Value and gradients of a fused student, with a teacher that ``shard`` splits."""
    teacher = build("Llama", tied=False, seed=7)
    loss = labo.DistillationLoss()
    student = hf.fuse_head(build("Llama", tied=False), loss, teacher=teacher)
    if shard is not None:
        shard(teacher)
    for _ in range(2):  # the weights are gathered again in each step
        value = student(**collate(examples(4))).loss
    return [value.detach(), *gradients(student, value)]


def with_a_sharded_teacher(rank: int, out: str) -> None:
    torch.distributed.init_process_group("gloo")

    def whole(teacher: Any) -> None:
        fully_shard(teacher, reshard_after_forward=True)

    def layers(teacher: Any) -> None:
        fully_shard(teacher.lm_head, reshard_after_forward=True)
        fully_shard(teacher)

    for index, shard in enumerate((whole, layers, fully_shard)):
        torch.save(distilled(out, shard), f"{out}/teacher-{index}-{rank}.pt")


def test_a_teacher_that_is_sharded(tmp_path):
    launch(2, with_a_sharded_teacher, str(tmp_path))
    expected = distilled(str(tmp_path))
    for index in range(3):
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"teacher-{index}-{rank}.pt"), expected)
