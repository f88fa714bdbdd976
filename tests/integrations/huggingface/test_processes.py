"""The Trainer in two processes, with and without ``fsdp=``: they are one.

accelerate uses FSDP on accelerators only. Here two processes of a CPU are passed off as some, which
changes which of its branches are taken and nothing in them.
"""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
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
    is_seq2seq,
    kind_of_arguments,
    make_trainer,
)
from tiny_sft import conversations, make

# How the loss is attached, to which model, and whether accelerate shards it.
CASES = [
    ("regularized", "GPT2", True, False),
    ("regularized", "Marian", True, False),
    ("fused", "T5", True, False),
    ("fused", "Llama", True, False),
    ("sft", "Llama", True, False),
    ("fused", "Llama", True, True),
    ("fused", "Llama", False, True),
    ("regularized", "Llama", False, True),
    ("sft", "Llama", False, True),
]
SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
    },
}


def three_steps(way: str, family: str, tied: bool, out: str, batch_size: int, **sharding: Any):
    """The trainer after three accumulated steps, and the loss of an evaluation."""
    model = build(family, tied=tied)
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
        data = examples(24, is_seq2seq(model))
        args = arguments(out, kind_of_arguments(model), **settings)
        trainer = make_trainer(way, model, loss, args, data)
    trainer.train()
    return trainer, trainer.evaluate(data)["eval_loss"]


def as_accelerators(self: PartialState, *args: Any, **kwargs: Any) -> None:
    as_usual(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_XPU


as_usual = PartialState.__init__


def as_one_of_two(rank: int, out: str) -> None:
    datasets.disable_progress_bars()
    for index, (*case, sharded) in enumerate(CASES):
        if sharded and PartialState.__init__ is as_usual:
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState.__init__ = as_accelerators
        trainer, value = three_steps(*case, out, batch_size=2, **(SHARDED if sharded else {}))
        state = trainer.model.state_dict()
        if sharded:
            assert trainer.accelerator.distributed_type == DistributedType.FSDP
            state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0 or not sharded:
            torch.save((value, state), f"{out}/{index}-{rank}.pt")
    for index, shard in enumerate(SHARDS):
        torch.save(distilled(shard), f"{out}/teacher-{index}-{rank}.pt")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What each case gives in two processes, by file name."""
    out = tmp_path_factory.mktemp("two")
    launch(2, as_one_of_two, str(out))
    return {path.stem: torch.load(path) for path in out.glob("*.pt")}


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_two_processes_are_one(index, of_two, tmp_path):
    """Three accumulated steps on uneven numbers of targets."""
    *case, sharded = CASES[index]
    trainer, expected = three_steps(*case, str(tmp_path), batch_size=4)
    one = trainer.model.state_dict()
    for rank in (0,) if sharded else (0, 1):
        value, state = of_two[f"{index}-{rank}"]
        if case[0] != "sft":  # which takes the mean over the batches of all processes
            assert value == pytest.approx(expected, rel=1e-4)
        assert state.keys() == one.keys()
        assert_same(state.values(), one.values(), rtol=1e-4, atol=1e-5)


def shard_whole(teacher: Any) -> None:
    fully_shard(teacher, reshard_after_forward=True)


def shard_layers(teacher: Any) -> None:
    fully_shard(teacher.lm_head, reshard_after_forward=True)
    fully_shard(teacher)


SHARDS = (shard_whole, shard_layers, fully_shard)


def distilled(shard: Any = None) -> Any:
    """Value and gradients of a fused student, with a teacher that ``shard`` splits."""
    teacher = build("Llama", tied=False, seed=7)
    loss = labo.DistillationLoss()
    student = hf.fuse_head(build("Llama", tied=False), loss, teacher=teacher)
    if shard is not None:
        shard(teacher)
    for _ in range(2):  # the weights are gathered again in each step
        value = student(**collate(examples(4))).loss
    return [value.detach(), *gradients(student, value)]


def test_a_teacher_that_is_sharded(of_two):
    expected = distilled()
    for index in range(len(SHARDS)):
        for rank in range(2):
            assert_same(of_two[f"teacher-{index}-{rank}"], expected)
