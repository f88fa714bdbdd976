"""What an operation allocates, seen from outside."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and not function.is_view:
                self.largest = max(self.largest, x.numel())
        return result


class Products(TorchDispatchMode):
    """The shapes of the results of matrix products, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        if self.names[-1] in ("mm", "addmm"):
            self.shapes.append(result.shape)
        return result


_FUSED = ("_GradientWithValueBackward", "_SecondPassBackward", "_KernelValuesBackward")


def is_fused(loss: torch.Tensor) -> bool:
    """Whether a fast backend has computed the loss: its node is in the graph."""
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            if type(node).__name__ in _FUSED:
                return True
            nodes += [edge for edge, _ in node.next_functions]
    return False
