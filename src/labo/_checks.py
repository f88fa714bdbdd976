"""Argument checks: one clear message for each kind of invalid call.

Plain Python values and shapes are always checked. Checks that read the values of a tensor run at
once for ordinary CPU tensors. On an accelerator and under ``torch.compile`` they become
asynchronous asserts, which need neither a synchronisation nor a graph break.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ._torch import assert_later, inside_transform
from .fields import UNIT


class TargetError(IndexError, ValueError):
    """A class index outside [0, K): an IndexError, as in ``F.cross_entropy``, and a ValueError."""


class TeacherError(TypeError, ValueError):
    """A loss called without the teacher logits it needs, or with teacher logits it cannot use."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor, other: Tensor | None = None) -> bool:
    """Whether these are ordinary tensors in eager mode: no tracing, no transform, no subclass."""
    return (
        type(tensor) in _PLAIN_TYPES
        and (other is None or type(other) in _PLAIN_TYPES)
        and not torch.compiler.is_compiling()
        and not inside_transform()
    )


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor; where that module was never imported nothing can be one."""
    if type(x) in _PLAIN_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(name: str, x: Tensor) -> Tensor:
    """A replicated DTensor as the plain tensor that each process holds; others are refused."""
    if not is_dtensor(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):  # type: ignore[attr-defined]
        others = " (losses with fused backends take split logits)"
        raise ValueError(
            f"{name} must be a plain tensor or a replicated DTensor, got placements "
            f"{tuple(x.placements)}: use {name}.full_tensor()"  # type: ignore[attr-defined]
            f"{others if name == 'logits' else ''}"
        )
    plain: Tensor = x.to_local()  # type: ignore[attr-defined]
    return plain


def check_tensor(name: str, x: object, instead: str) -> None:
    """Refuse what is not a tensor; ``instead`` says what to pass."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}: {instead}")


def check_tensors(
    logits: object,
    target: object,
    name: str = "logits",
    instead: str = "pass the logits of the model's output, as a tensor",
) -> None:
    """Refuse a call with other things than tensors, such as the whole output of a model."""
    if isinstance(logits, Tensor) and isinstance(target, Tensor):
        return
    check_tensor(name, logits, instead)
    check_tensor("target", target, "pass class indices or probabilities, as a tensor")


def can_read(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read without waiting: a plain tensor on the CPU."""
    return is_plain(tensor) and tensor.is_cpu


def ensure(condition: Tensor, failure: Callable[[], Exception], message: str) -> None:
    """Raise ``failure()`` unless all of ``condition`` holds, without a synchronisation."""
    if not torch.compiler.is_compiling():
        if inside_transform():
            return  # values cannot be read inside vmap or grad
        if can_read(condition):
            if not bool(condition.all()):
                raise failure()
            return
    assert_later(condition, message)


def check_logits(logits: Tensor, dim: int) -> None:
    """Refuse a tensor that cannot have logits of classes in ``dim``."""
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.dim() == 0:
        raise ValueError("logits must have a class dimension, got a tensor without dimensions")
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim={dim} is not a dimension of logits of shape {tuple(logits.shape)}")
    if logits.shape[dim] == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no classes (dim={dim})")


def check_target(logits_shape: torch.Size, target: Tensor, dim: int) -> bool:
    """Refuse a target that does not fit the logits; return whether it has class probabilities."""
    rows = list(logits_shape)
    del rows[dim]
    if target.dtype == torch.int64 and list(target.shape) == rows:
        return False
    logits, shape, want = tuple(logits_shape), tuple(target.shape), tuple(rows)
    if target.is_floating_point():
        if shape == logits:
            return True
        problem = f"probability targets must have the shape of the logits {logits}"
        if shape == want:
            problem += " (class indices must be integers)"
        raise ValueError(f"{problem}, got {target.dtype} of shape {shape}")
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(f"target must be class indices or probabilities, got {target.dtype}")
    if shape == want:
        return False
    hint = ""
    if len(logits) > 2 and shape == (logits[0], *logits[2:]):
        hint = "; the classes seem to be in dimension 1: pass dim=1"
    elif len(logits) > 1 and shape == logits[:-1]:
        hint = "; the classes seem to be in the last dimension: pass dim=-1"
    raise ValueError(
        f"class-index target must have shape {want} for logits of shape {logits} "
        f"with classes in dim={dim}, got {shape}{hint}"
    )


def check_weight(weight: Tensor | None, num_classes: int) -> None:
    if weight is not None and weight.shape != (num_classes,):
        raise ValueError(
            f"weight must have shape ({num_classes},), one per class, got {tuple(weight.shape)}"
        )


def check_devices(logits: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that are not on the device of the logits."""
    for name, other in others.items():
        if other is not None and other.device != logits.device:
            raise ValueError(f"{name} is on {other.device}, the logits are on {logits.device}")


def _in_range(target: Tensor, num_classes: int, ignore_index: int | None) -> Tensor:
    """Which entries are classes or ignored."""
    good = (target >= 0) & (target < num_classes)
    return good if ignore_index is None else good | (target == ignore_index)


def _range_sentence(num_classes: int, ignore_index: int | None) -> str:
    unless = "" if ignore_index is None else f" and is not ignore_index ({ignore_index})"
    return f"is outside [0, {num_classes}){unless}"


def out_of_range(target: Tensor, num_classes: int, ignore_index: int | None) -> TargetError:
    """The error for the first entry of ``target`` that is neither a class nor ignored."""
    good = _in_range(target, num_classes, ignore_index)
    where = tuple((~good).nonzero()[0].tolist())
    index = f" at position {where[0] if len(where) == 1 else where}" if where else ""
    sentence = _range_sentence(num_classes, ignore_index)
    return TargetError(f"target {target[where].item()}{index} {sentence}")


def check_range(
    target: Tensor, num_classes: int, ignore_index: int | None = None, good: Tensor | None = None
) -> None:
    """Refuse class indices, int64, outside [0, K) that are not ``ignore_index``.

    ``good`` tells whether there are none, if that is known.
    """
    if good is None:
        good = _in_range(target, num_classes, ignore_index)
    error = partial(out_of_range, target, num_classes, ignore_index)
    ensure(good, error, f"a target {_range_sentence(num_classes, ignore_index)}")


def tolerance(dtype: torch.dtype) -> float:
    """How far a sum of probabilities that are given in ``dtype`` may be from 1.

    Enough for rounding, not for a missing class.
    """
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 1e-2)


def check_distribution(name: str, probabilities: Tensor) -> None:
    """Refuse rows that are not distributions. NaN passes, so that it shows in the loss.

    ``probabilities`` in the dtype in which they were given: it says how precise a sum can be.
    """
    off = (probabilities.sum(-1) - 1).abs()
    message = f"{name} must be probabilities: 0 or more, and sum to 1 over the classes"

    def failure() -> ValueError:
        worst = off.nan_to_num(0).max().item()
        lowest = probabilities.min().item()
        return ValueError(f"{message} (a sum is off by {worst:.3g}, the lowest is {lowest:.3g})")

    ensure(~(off > tolerance(probabilities.dtype)) & ~(probabilities < 0).any(-1), failure, message)


def check_alpha(alpha: float | Tensor) -> None:
    """Refuse a strength, or strengths of rows, outside [0, 1]."""
    if not isinstance(alpha, Tensor):
        UNIT.check("alpha", alpha)
        return
    message = "alpha must lie in [0, 1]"

    def failure() -> ValueError:
        return ValueError(f"{message}, got values from {alpha.min():.3g} to {alpha.max():.3g}")

    ensure(~((alpha < 0) | (alpha > 1)), failure, message)
