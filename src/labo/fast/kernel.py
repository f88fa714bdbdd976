"""The losses that have kernels of their own, in C and Triton: one call instead of two passes."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor

Factor = TypeVar("Factor", float, Tensor, float | Tensor)

CROSS_ENTROPY, LABEL_SMOOTHING, LABO, LABO_ADAPTIVE = range(4)


class Kernel(NamedTuple):
    """A loss as its kernel knows it.

    The modes have the same numbers in ``native.c`` and in the Triton kernels. Value and gradient
    are those of the loss times ``multiplier``, which is left to the caller.
    """

    mode: int
    alpha: float = 0.0
    tau: float = 1.0
    rho: float = 0.0
    multiplier: float = 1.0

    def scaled(self, x: Factor) -> Factor:
        """x times the multiplier."""
        return x if self.multiplier == 1 else x * self.multiplier
