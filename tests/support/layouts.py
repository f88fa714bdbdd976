"""Tensors in every layout of memory. What lies around a view would be noticed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LAYOUTS = ["contiguous", "sliced", "offset", "transposed", "expanded", "all expanded", "negated"]


def poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def arranged(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in a layout; the expanded ones repeat some of them."""
    if layout == "sliced":
        around = torch.full([2 * n + 1 for n in x.shape], poison(x.dtype), dtype=x.dtype)
        view = around[tuple(slice(1, None, 2) for _ in x.shape)]
    elif layout == "offset":
        around = torch.full((x.numel() + 5,), poison(x.dtype), dtype=x.dtype)
        view = around[3 : 3 + x.numel()].view(x.shape)
    elif layout == "transposed":
        view = torch.full(x.shape[::-1], poison(x.dtype), dtype=x.dtype).permute(
            *range(x.dim())[::-1]
        )
    elif layout == "expanded" and x.numel():
        return x[:1].clone().expand(x.shape)
    elif layout == "all expanded" and x.numel():
        return x.reshape(-1)[:1].reshape([1] * x.dim()).clone().expand(x.shape)
    elif layout == "negated" and x.dtype in (torch.float32, torch.float64):
        view = torch.complex(torch.full_like(x, math.nan), -x).conj().imag
        assert view.is_neg()
        return view
    else:
        return x.clone(memory_format=torch.contiguous_format)
    return view.copy_(x)
