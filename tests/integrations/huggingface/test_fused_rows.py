"""A fused model multiplies the rows of its output layer that have a label, on the CPU."""

from __future__ import annotations

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import labo
from labo.integrations import huggingface as hf
from tiny_models import V, assert_same, build, by_hand, collate, examples, gradients


class LogitRows(TorchDispatchMode):
    """The number of rows of logits that are written to a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.out and result.shape[-1] == V:
            self.rows += len(result)
        return result


def test_rows_without_a_label_are_not_multiplied():
    plain, batch = build("Llama").train(), collate(examples(3))
    batch["labels"][:, :3] = -100  # the prompts
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    with LogitRows() as seen:
        loss = fused(**batch).loss
    labels = batch["labels"][:, 1:]
    assert seen.rows == (labels != -100).sum() < labels.numel()
    expected = by_hand(plain, batch, labo.LABOLoss())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients(fused, loss), gradients(plain, expected), rtol=1e-3, atol=1e-5)
