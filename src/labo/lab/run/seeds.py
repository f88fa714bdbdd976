"""Random numbers as pure functions of their keys.

Every random choice of a run depends on (seed, purpose, epoch, sample), never on what was drawn
before. So no generator state is saved with a checkpoint, and a resumed run continues exactly.

:func:`uniforms` and :func:`permutation` hash their keys with the finalizer of SplitMix64 (Steele,
Lea and Flood, 2014). It is 64-bit integer arithmetic only, so the bits are the same on every
device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def mix(*keys: int | str) -> int:
    """A seed of 63 bits from any keys; other keys, another seed.

    Example:
        >>> mix(0, "model") != mix(1, "model") != mix(1, "order", 7)
        True
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of int64 taken as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: int64 to int64, one to one, each input bit moving all output bits.

    The constants are the published ones, written as signed numbers; products wrap around.
    """
    x = (x ^ _logical_shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _logical_shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _logical_shift(x, 31)


def uniforms(
    seed: int, epoch: int, index: Tensor, count: int, *, stream: str = "augment"
) -> Tensor:
    """Random numbers for samples of a data set: a pure function of the arguments.

    Args:
        seed: of the run.
        epoch: or any other count of visits.
        index: (N,) int64, the samples' indices in the data set.
        count: how many numbers each sample needs; more of them leave the first ones as they are.
        stream: what they are for; another stream has unrelated numbers.

    Returns:
        (N, count) float32 in [0, 1), multiples of 2^-24.

    Example:
        >>> uniforms(0, 3, torch.tensor([7, 8]), 2)
        tensor([[0.5204, 0.6470],
                [0.0820, 0.6097]])
    """
    sample = _scramble(index.unsqueeze(-1) + mix(seed, stream, epoch))
    bits = _scramble(sample + torch.arange(count, device=index.device))
    return _logical_shift(bits, 40).float() / (1 << 24)


def permutation(seed: int, step: int, size: int, *, stream: str = "order") -> Tensor:
    """A random order of ``size`` things, (size,) int64: a pure function of the arguments."""
    keys = _scramble(torch.arange(size) + mix(seed, stream, step))
    return keys.argsort(stable=True)
