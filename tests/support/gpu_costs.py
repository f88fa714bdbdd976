"""What every loss costs on a GPU, counted on a device that computes nothing; prints JSON.

``python tests/support/gpu_costs.py`` counts forward and backward pass: launches, bytes of large
tensors read and written, the most of them that is alive, and the times the host waits. ``--write``
also puts the tables into docs/performance.md, where a test compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["LABO_CHECK_KERNELS"] = "0"  # there are no results to compare

import torch
from torch import Tensor
from torch.nn import functional as F

import labo
from defaults import with_defaults
from fake_device import Counted, fake_device
from gpu_tables import PAGE, page
from labo.fast import dispatch
from labo.loss import Loss

ROWS, CLASSES, WIDTH = 8192, 128256, 4096
FEW = 1000  # for losses with a table of all pairs of classes
# What has so many bytes is more than numbers of rows: a block of logits.
LARGE = 256 * ROWS
Record = dict[str, Any]


def build(kind: type[Loss], classes: int, device: str = "cuda", **hyper: Any) -> Loss:
    """A loss with its defaults, on the device."""
    return with_defaults(kind, classes, features=WIDTH, **hyper).to(device)


def counted(
    work: Callable[..., Tensor],
    given: tuple[Tensor, ...],
    count: Counted,
    logits: int,
    kept: tuple[Tensor, ...] = (),
) -> Record:
    """One forward and backward pass, after a forward pass that is not counted."""
    work(*given)
    count.given(*given, *kept)
    value = work(*given)
    between = count.held
    value.backward()
    return {
        "launches": len(count.launches),
        "bytes": round(count.moved / logits, 1),
        "between": round(between / logits, 1),
        "peak": round(count.peak / logits, 1),
        "peak MiB": round(count.peak / 2**20),
        "products": sum(
            n for name, n in count.names().items() if name in ("mm", "addmm", "addmm_")
        ),
        "triton": sum(n for name, n in count.names().items() if name.startswith("triton")),
        "waits": count.waits,
    }


def _problem(
    rows: int, classes: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    logits = torch.empty(rows, classes, device=device, dtype=dtype, requires_grad=True)
    return logits, torch.empty(rows, device=device, dtype=torch.int64)


def _taught(loss: Loss, logits: Tensor) -> tuple[Tensor, ...]:
    """What the loss takes after logits and target."""
    rows, device = len(logits), logits.device
    if loss.teacher_is_stored:
        stored = torch.empty(rows, 64, device=device, dtype=torch.int64)
        return stored, torch.empty(rows, 64, device=device)
    if loss.name == "connet":  # the features that its confidence is computed from
        return (torch.empty(rows, WIDTH, device=device, dtype=logits.dtype),)
    return (torch.empty_like(logits.detach()),) if loss.teacher_argument else ()


def on_logits(
    kind: type[Loss], dtype: torch.dtype = torch.bfloat16, rows: int = ROWS, **hyper: Any
) -> Record:
    classes = FEW if kind.name in ("ols", "kr-ls") else CLASSES
    with fake_device(256 * rows) as count:
        loss = build(kind, classes, **hyper)
        given = _problem(rows, classes, dtype)
        extra = _taught(loss, given[0])
        return counted(loss, (*given, *extra), count, rows * classes)


def as_compiled(kind: type[Loss]) -> Record:
    """What the operators of torch.compile run."""
    with fake_device(LARGE) as count:
        rows = dispatch.FastRows(build(kind, CLASSES), "native")
        logits, target = _problem(ROWS, CLASSES)
        logits = logits.detach()
        factor = torch.empty(ROWS, device="cuda")

        def both() -> None:
            _, sums = rows.values_and_sums(logits, target)
            rows.gradient(logits, target, sums, factor)

        both()
        count.given(logits, target, factor)
        both()
        return {"bytes": round(count.moved / logits.numel(), 1), "waits": count.waits}


def in_linear_loss(kind: type[Loss], **options: Any) -> Record:
    with fake_device(LARGE) as count:
        loss = build(kind, CLASSES)
        hidden = torch.empty(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(
            CLASSES, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        logits, target = _problem(ROWS, CLASSES)
        teacher = _taught(loss, logits)
        if teacher:
            options["teacher_logits"] = teacher[0]
        del logits

        def work(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            result: Any = labo.linear_loss(hidden, weight, target, loss, **options)
            return result[0] if isinstance(result, tuple) else result

        given = (hidden, weight, target)
        return counted(work, given, count, ROWS * CLASSES, teacher)


def of_torch(label_smoothing: float) -> Record:
    with fake_device(LARGE) as count:

        def work(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits, target, label_smoothing=label_smoothing)

        given = _problem(ROWS, CLASSES)
        return counted(work, given, count, ROWS * CLASSES)


def without_triton() -> Iterator[tuple[str, dict[str, Record]]]:
    """Both backends that are left, for losses of every kind."""
    dispatch._HAS_TRITON = False
    try:
        for name in ("base", "ls", "labo", "fl", "cp", "mbls", "ger", "kd", "dkd", "logitnorm"):
            kind = labo.LOSSES[name]
            yield name, {i: on_logits(kind, rows=512, impl=i) for i in ("auto", "reference")}
    finally:
        dispatch._HAS_TRITON = True


def without_float64() -> dict[str, str]:
    """The dtype of the value on a device that has no float64, or the error."""
    found = {}
    for name in labo.LOSSES:
        with fake_device(LARGE, "mps", torch.float64):
            loss = build(labo.LOSSES[name], FEW, "mps")
            logits, target = _problem(8, FEW, torch.float32, "mps")
            try:
                value = loss(logits, target, *_taught(loss, logits))
                value.backward()
                found[name] = str(value.dtype)
            except TypeError as problem:
                found[name] = str(problem)
    return found


LINEAR = ("base", "ls", "labo", "fl", "cp", "logitnorm", "kd", "ps-kd", "dkd")


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {"logits": {}, "linear": {}}
    found["torch"] = {"cross entropy": of_torch(0.0), "label smoothing": of_torch(0.1)}
    for name, kind in labo.LOSSES.items():
        found["logits"][name] = on_logits(kind)
    found["logits"]["kd, standardized"] = on_logits(labo.DistillationLoss, standardize=True)
    schedule = {"final_lam": 0.2, "epochs": 4}  # with a number that is on the device
    found["logits"]["maxsup, final_lam"] = on_logits(labo.MaxSuppressionLoss, **schedule)
    found["logits"]["labo, float16"] = on_logits(labo.LABOLoss, torch.float16)
    found["logits"]["labo, float32"] = on_logits(labo.LABOLoss, torch.float32)
    found["compiled"] = {
        name: as_compiled(labo.LOSSES[name]) for name in ("base", "labo", "fl", "ger")
    }
    for name in LINEAR:
        found["linear"][name] = in_linear_loss(labo.LOSSES[name])
    found["linear"]["labo, metrics"] = in_linear_loss(labo.LABOLoss, return_metrics=True)
    found["without triton"] = dict(without_triton())
    found["without float64"] = without_float64()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    options = parser.parse_args()
    found = everything()
    if options.write:
        PAGE.write_text(page(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
