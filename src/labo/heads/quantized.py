"""A frozen, quantized output layer for :func:`labo.linear_loss`, dequantized by blocks."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import is_dtensor
from ..rows import wide

# Bytes of the dequantized classes that are in memory at a time.
_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (V, D) of which some rows are dequantized at a time, as ``linear_weight``.

    It is frozen: hidden states and bias get gradients. Products are in the dtype of the hidden
    states (see :func:`product_dtype`). Tensors that can be sliced and have a method
    ``dequantize()``, as those of torchao, are taken by ``linear_loss`` as they are. For other
    libraries give the function. Each chunk of hidden states dequantizes the weight once for the
    logits and once for the gradient, so few large chunks are faster.

    Args:
        rows: ``rows(first, last)`` returns the dequantized rows, (last - first, D).
        shape: (V, D).

    Example:
        >>> from labo import LABOLoss, linear_loss
        >>> eighths = torch.eye(4, 2).mul(8).to(torch.int8)
        >>> weight = QuantizedWeight(lambda first, last: eighths[first:last] / 8, (4, 2))
        >>> linear_loss(torch.ones(3, 2), weight, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """

    rows: Callable[[int, int], Tensor]
    shape: tuple[int, int]

    requires_grad = False

    def __len__(self) -> int:
        return self.shape[0]

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Some classes at a time, and their rows in ``dtype``."""
        classes, width = self.shape
        size = max(1, _BLOCK_BYTES // (max(1, width) * dtype.itemsize))
        for first in range(0, classes, size):
            last = min(first + size, classes)
            yield slice(first, last), self._checked(first, last).detach().to(dtype)

    def _checked(self, first: int, last: int) -> Tensor:
        """The rows that the function gives; a product of another shape would resize its output."""
        block: Any = self.rows(first, last)
        wanted = (last - first, self.shape[1])
        found = type(block).__name__
        if isinstance(block, Tensor):
            if block.shape == wanted and block.is_floating_point():
                return block
            found = f"{block.dtype} of shape {tuple(block.shape)}"
        raise ValueError(
            f"rows({first}, {last}) of a QuantizedWeight of shape {tuple(self.shape)} must return "
            f"a floating-point tensor of shape {wanted}, got {found}"
        )

    def logits(self, hidden: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """hidden W^T + bias, (N, V), written to ``out``."""
        for part, block in self.blocks(hidden.dtype):
            if bias is None:
                torch.mm(hidden, block.T, out=out[:, part])
            else:  # in one, so that half types are rounded once, as in a dense layer
                torch.addmm(bias[part], hidden, block.T, out=out[:, part])
        return out

    def times(self, grad: Tensor, out: Tensor) -> Tensor:
        """grad W, (N, D), written to ``out``; half types are summed in float32."""
        total = torch.zeros_like(out, dtype=wide(out.dtype))
        for part, block in self.blocks(grad.dtype):
            if total.dtype == grad.dtype:
                total.addmm_(grad[:, part], block)
            else:
                total += grad[:, part] @ block
        return out.copy_(total)


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this processor multiplies it faster than float32.

    On x86 these are Intel's with AMX and AMD's with AVX512-BF16, which has twice the products of
    float32 on AMD and no more of them on Intel. Without both the products are emulated. Processors
    of other kinds are not looked at.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    # What oneDNN, which computes the products, may use.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    if torch.cpu._is_amx_tile_supported() and ("AMX" in limit or limit in ("ALL", "DEFAULT")):
        return True
    return torch.cpu._is_avx512_bf16_supported() and not _is_intel()


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return "GenuineIntel" in platform.processor()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which ``linear_loss`` multiplies: that of ``x``, except bfloat16 on some CPUs.

    Some x86 processors are slower with it than with float32, which holds the same values and
    rounds less.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _multiplies_bfloat16():
        return torch.float32
    return x.dtype


def by_blocks(weight: Tensor | QuantizedWeight) -> QuantizedWeight:
    """A weight that is brought to another dtype block by block."""
    if isinstance(weight, QuantizedWeight):
        return weight
    return QuantizedWeight(lambda first, last: weight[first:last], (len(weight), weight.shape[1]))


def as_weight(name: str, weight: Any, *, constant: bool = False) -> Any:
    """A quantized tensor as a :class:`QuantizedWeight`; anything else as it is.

    It must be frozen, unless it is a constant as that of a teacher.
    """
    if not isinstance(weight, Tensor) or is_dtensor(weight):
        return weight
    if type(weight).dequantize is Tensor.dequantize:  # a plain tensor
        return weight
    if weight.requires_grad and not constant:
        raise ValueError(
            f"{name} is quantized ({type(weight).__name__}), and linear_loss computes no "
            "gradient for it: freeze it with requires_grad_(False)"
        )

    def rows(first: int, last: int) -> Tensor:
        return weight[first:last].dequantize()

    return QuantizedWeight(rows, (weight.shape[0], weight.shape[1]))
