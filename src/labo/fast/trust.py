"""The first use of the Triton kernels on a device: compared with the plain formula, once.

They were compiled for many GPUs and run on few. A new device, driver or compiler must not give
wrong numbers in silence: where the results differ, another backend serves the loss.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor

from .formula import plan_of

# What the largest error of values and gradients may be, in units of the largest.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_ROWS = 4

# What was wrong, or "", by device, loss, dtype, whether there are class weights, and the kernel or
# the sums of the loss.
_known: dict[tuple[Any, ...], str] = {}


def refuses(loss: Any, logits: Tensor) -> str | None:
    """Why the kernels cannot be trusted with this loss on the device of the logits, or None."""
    key = (str(logits.device), type(loss).__name__, str(logits.dtype)[6:])
    if not torch.compiler.is_compiling():
        _first_use(key, loss, logits)
    problem = next((p for known, p in _known.items() if p and known[:3] == key), None)
    return f"the kernels of {key[1]} in {key[2]}: {problem}" if problem else None


def _first_use(key: tuple[str, ...], loss: Any, logits: Tensor) -> None:
    """Compare what was not compared before. A warning says what is wrong."""
    weighted, kernel = loss.weight is not None, loss.kernel()
    kind = (kernel.mode,) if kernel is not None else plan_of(loss, weighted)[:2]
    compared = (*key, weighted, *kind)
    if compared in _known or not _may_check(logits):
        return
    _known[compared] = ""  # the comparison itself comes here
    problem = _compare(loss, logits)
    if problem is None:
        del _known[compared]
    elif problem:
        _known[compared] = problem
        warnings.warn(
            f"labo: the Triton kernels of {key[1]} in {key[2]} are not used on {key[0]}, because "
            f"{problem}; another backend is slower and right. Please report this with the name of "
            "the GPU, the output of `python -m torch.utils.collect_env` and labo.backends(). "
            "LABO_CHECK_KERNELS=0 uses the kernels without this check",
            stacklevel=2,
        )


def checked() -> str:
    """What was compared so far, for `labo.backends`."""
    bad = {f"{known[1]} {known[2]}" for known, problem in _known.items() if problem}
    good = {f"{known[1]} {known[2]}" for known in _known} - bad
    parts = [f"compared with the plain formula: {', '.join(sorted(good))}"] if good else []
    return "; ".join(parts + ([f"not used: {', '.join(sorted(bad))}"] if bad else []))


def _may_check(logits: Tensor) -> bool:
    """Whether values may be read here: not while a CUDA graph is captured."""
    if os.environ.get("LABO_CHECK_KERNELS") == "0":
        return False
    return not (logits.is_cuda and torch.cuda.is_current_stream_capturing())


def _compare(loss: Any, logits: Tensor) -> str | None:
    """What is wrong with the kernels on a few random rows: "" if nothing is, None if unknown."""
    dim = loss.dim if -logits.dim() <= loss.dim < logits.dim() else -1
    classes = logits.shape[dim] if logits.dim() else 0
    if classes == 0:
        return None
    random = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        rows = 3 * torch.randn(_ROWS, classes, generator=random)
        return rows.to(logits.device, logits.dtype)

    z, target = draw(), torch.randint(classes, (_ROWS,), generator=random)
    target[-1] = loss.ignore_index
    inputs: tuple[Tensor, ...] = ()
    if loss.teacher_is_stored:
        stored = draw().float().log_softmax(-1).topk(min(8, classes))
        inputs = (stored.indices, stored.values)
    elif loss.teacher_argument is not None:
        inputs = (draw(),)

    def run(impl: str) -> list[Tensor]:
        changed = loss.having(impl=impl, reduction="sum", dim=-1, inplace=False)
        leaf = z.clone().requires_grad_()
        with torch.enable_grad():
            value = changed.compute(leaf, target.to(z.device), *inputs)
            (slope,) = torch.autograd.grad(value, leaf)
        return [value.detach().double().cpu(), slope.double().cpu()]

    try:
        wanted = run("reference")
    except (TypeError, ValueError):
        return None  # hyper-parameters that do not fit: the call itself says so
    try:
        given = run("native")
    except Exception as error:
        return f"they raise {type(error).__name__}: {str(error)[:200]}"
    for name, ours, theirs in zip(("value", "gradient"), given, wanted, strict=True):
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
        if not off <= _TOLERANCE[logits.dtype]:
            return f"the {name} is off by {off:.1e} of the largest"
    return ""
