"""A quantized tensor, made like those of torchao."""

from __future__ import annotations

import torch


class Eighths(torch.Tensor):
    """Numbers in units of 1/8 as int8, with what a tensor of torchao has: slices, dequantize()."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return Eighths(args[0].codes[args[1]])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} on the quantized tensor")

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() / 8
