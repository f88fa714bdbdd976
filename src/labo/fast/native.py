"""The native backend on the CPU: a C kernel for float32 and bfloat16, split over Python threads.

``native.c`` does not use Python and is loaded with ctypes, which releases the GIL during a call.
The rows are split over Python threads, because a second OpenMP runtime would compete with that of
PyTorch for the cores. C cannot check what a pointer points to: every pointer to a tensor that is
not allocated here comes from :func:`_pointer`, which checks it.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .. import sums as row_sums
from .._checks import out_of_range
from .columns import COEFFICIENTS, SUMS, RowInputs
from .kernel import Kernel

# With fewer logits per thread another thread costs more time than it saves.
_PER_THREAD = 1 << 18

_LARGEST = torch.finfo(torch.float32).max

STATISTICS = 5  # numbers per row, see :func:`labo.metrics.row_statistics`

_POINTER, _LONG, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class _Batch(ctypes.Structure):
    """The ``batch`` of ``native.c``. What is not given is 0 or NULL."""

    _fields_ = (
        *(("logits", _POINTER), ("classes", _LONG), ("stride", _LONG), ("ignore_index", _LONG)),
        *(("target", _POINTER), ("weight", _POINTER), ("grad", _POINTER), ("grad_stride", _LONG)),
        *(("bf16", _INT), ("mode", _INT), ("alpha", _DOUBLE), ("tau", _DOUBLE), ("rho", _DOUBLE)),
        *(("scale", _DOUBLE), ("log_classes", _DOUBLE), ("row_scale", _POINTER)),
        *(("values", _POINTER), ("statistics", _POINTER), ("asked", _INT), ("masses", _INT)),
        *(("margin", _DOUBLE), ("row_tau", _POINTER), ("row_mixture", _POINTER)),
        *(("source", _POINTER), ("source_stride", _LONG), ("sums", _POINTER)),
        *(("coefficients", _POINTER), ("source_bf16", _INT), ("centered", _INT)),
        ("moments", _POINTER),
    )
    alive: list[Tensor]  # what the pointers point to

    def give(self, name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
        """Set a pointer to a tensor that is what C takes it for."""
        setattr(self, name, _pointer(name, x, dtype, *shape))
        self.alive.append(x)


class _Library:
    """The loaded library: its functions with their types."""

    def __init__(self) -> None:
        built = sorted(Path(__file__).parent.glob("_native*.so"))
        built += sorted(Path(__file__).parent.glob("_native*.pyd"))
        if not built:
            raise OSError("the C kernel was not built (no C compiler at install time)")
        library = ctypes.CDLL(str(built[0]))
        self.rows, self.formula = library.labo_rows, library.labo_formula
        self.moments = library.labo_moments
        for function in (self.rows, self.formula, self.moments):
            function.argtypes, function.restype = [ctypes.POINTER(_Batch), _LONG, _LONG], None
        self.check_targets = library.labo_check_targets
        self.check_targets.argtypes = [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER]
        self.check_targets.restype = _LONG
        self.sum = library.labo_sum
        self.sum.argtypes = [_POINTER, _LONG]
        self.sum.restype = _DOUBLE
        self.isa = library.labo_native_isa
        self.isa.restype = ctypes.c_char_p
        self.select = library.labo_native_select
        self.select.argtypes = [ctypes.c_char_p]


def _load() -> tuple[_Library | None, str | None]:
    try:
        return _Library(), None
    except (OSError, AttributeError) as problem:
        return None, str(problem)


DTYPES = (torch.float32, torch.bfloat16)


# At import: it takes a millisecond, and torch.compile can read the result as a constant.
_LIBRARY, _PROBLEM = _load()


def unavailable() -> str | None:
    """Why the kernel cannot be used here, or None if it can."""
    return _PROBLEM


def refuses(logits: Tensor) -> str | None:
    """Why the kernel cannot take these logits, or None if it can."""
    if logits.dtype not in DTYPES:
        return f"the C kernel takes float32 and bfloat16, not {logits.dtype}"
    return unavailable()


def instruction_set() -> str:
    """The instruction set of the kernel: "avx512", "avx2" or "portable"."""
    return _open().isa().decode()


def select_instruction_set(name: str) -> bool:
    """Select an instruction set, for tests; False if this machine or build does not have it."""
    return bool(_open().select(name.encode()))


def _open() -> _Library:
    if _LIBRARY is None:
        raise RuntimeError(_PROBLEM)
    return _LIBRARY


class _Workers:
    """Threads that wait for jobs. They are started when needed, and again in a forked child.

    They use plain queues: for a hundred microseconds of work the futures of a thread pool would
    take as long as the second core saves.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.size = 0
        self.jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]]]
        self.jobs = SimpleQueue()
        self.lock = threading.Lock()

    def run(self, jobs: list[Callable[[], None]]) -> None:
        """Run the jobs in parallel, the first one in this thread."""
        with self.lock:
            while self.size < len(jobs) - 1:
                threading.Thread(target=self._work, name="labo", daemon=True).start()
                self.size += 1
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for job in jobs[1:]:
            self.jobs.put((job, done))
        jobs[0]()
        for problem in [done.get() for _ in jobs[1:]]:
            if problem is not None:
                raise problem

    def _work(self) -> None:
        jobs = self.jobs
        while True:
            job, done = jobs.get()
            problem = None
            try:
                job()
            except BaseException as raised:
                problem = raised
            # Before the caller goes on: a job refers to its tensors, and autograd copies a
            # gradient that something else refers to.
            del job
            done.put(problem)


_workers = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.forget)


def _pointer(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a tensor, once it is known to be what C takes it for.

    C reads ``shape`` elements of ``dtype``. The last dimension must be contiguous; C is told the
    stride of the rows of a matrix.
    """
    if x.dtype != dtype or x.shape != shape or not x.is_cpu:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape} on the CPU, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    if x.is_neg() or not (x.is_contiguous() or x.stride(-1) == 1 or shape[-1] == 1):
        raise ValueError(f"{name} must be contiguous in its last dimension")
    address = x.data_ptr()
    if address == 0 and x.numel() > 0:
        raise ValueError(f"{name} has no memory")
    return address


def _contiguous(x: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    if x.is_neg():
        return x.resolve_neg().contiguous()
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def denominator(target: Tensor, classes: int, ignore_index: int, weight: Tensor | None) -> float:
    """Check the targets and count those that are not ignored, or add up their weights.

    Args:
        target: (N,) int64 on the CPU.
        classes: K.
        ignore_index: target of rows that do not count.
        weight: (K,) class weights.
    """
    target = _contiguous(target)
    weight_address = None
    if weight is not None:
        weight = _contiguous(weight.to(torch.float64))
        weight_address = _pointer("weight", weight, torch.float64, classes)
    total, count = ctypes.c_double(), target.shape[0]
    bad = _open().check_targets(
        _pointer("target", target, torch.int64, count),
        count,
        classes,
        ignore_index,
        weight_address,
        ctypes.byref(total),
    )
    if bad >= 0:
        raise out_of_range(target, classes, ignore_index)
    return total.value


def total(values: Tensor, divisor: float) -> Tensor:
    """The sum of ``values``, as :func:`rows` returns them, over ``divisor``.

    For a hundred rows, the sum and division of PyTorch would take as long as the rows themselves.
    """
    quotient = _open().sum(values.data_ptr(), values.shape[0]) / divisor
    if abs(quotient) > _LARGEST:  # infinite in float32, where torch.full raises
        return torch.tensor(quotient, dtype=torch.float32)
    return torch.full((), quotient, dtype=torch.float32)


def rows(
    logits: Tensor,
    target: Tensor,
    kernel: Kernel,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows; the contract is in :mod:`labo.fast.dispatch`.

    ``statistics``, (N, 5) float64, is filled as by :func:`labo.metrics.row_statistics`.
    """
    if logits.dtype not in DTYPES:
        raise ValueError(refuses(logits))
    count, classes = logits.shape
    logits = _contiguous(logits)
    batch = _batch(logits, target, ignore_index)
    batch.mode, batch.alpha, batch.tau, batch.rho = kernel[:4]
    batch.log_classes = math.log(classes) if classes else 0.0
    if weight is not None:
        batch.give("weight", _contiguous(weight.detach().float()), torch.float32, classes)
    # What is allocated here needs no check.
    values = torch.empty(count, dtype=torch.float32)
    batch.values = values.data_ptr()
    if factor is not None:
        if out is None:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
            batch.grad = out.data_ptr()
        else:
            batch.give("grad", out, logits.dtype, count, classes)
            _check_overlap(out, logits)
        batch.grad_stride = out.stride(0)
        batch.scale = 1.0
        if isinstance(factor, Tensor):
            batch.give("row_scale", _contiguous(factor.detach().float()), torch.float32, count)
        else:
            batch.scale = factor
    if statistics is not None:
        batch.give("statistics", statistics, torch.float64, count, STATISTICS)
    _run(_open().rows, batch, count)
    return values, None if factor is None else out


def _batch(logits: Tensor, target: Tensor, ignore_index: int) -> _Batch:
    """The arguments that all functions have, for logits that are contiguous by rows."""
    batch, (count, classes), target = _Batch(), logits.shape, _contiguous(target)
    batch.logits = _pointer("logits", logits, logits.dtype, count, classes)
    batch.classes, batch.stride, batch.ignore_index = classes, logits.stride(0), ignore_index
    batch.target = _pointer("target", target, torch.int64, count)
    batch.bf16 = logits.dtype == torch.bfloat16
    batch.alive = [logits, target]
    return batch


def _run(function: Callable[[Any, int, int], None], batch: _Batch, count: int) -> None:
    """Run a function for all rows, shared out over threads if there is enough to do."""
    arguments = ctypes.byref(batch)
    threads = count * batch.classes // _PER_THREAD
    if threads > 1:
        threads = min(threads, count, torch.get_num_threads())
    if threads <= 1:
        function(arguments, 0, count)
    else:
        edges = [count * i // threads for i in range(threads + 1)]
        _workers.run([partial(function, arguments, *part) for part in pairwise(edges)])


def _check_overlap(out: Tensor, logits: Tensor) -> None:
    """Refuse rows that overlap each other, or the logits other than row by row."""
    if len(out) > 1 and out.stride(0) < out.shape[-1]:
        raise ValueError("out must not have rows that overlap")
    if out is logits or out.numel() == 0:
        return
    same_memory = out.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    same_rows = out.data_ptr() == logits.data_ptr() and out.stride() == logits.stride()
    if same_memory and not same_rows:
        raise ValueError("out must be the logits themselves or not overlap with them")


# ------------------------------------------------------------------ formulas


def sums(logits: Tensor, given: RowInputs) -> Tensor:
    """The sums of every row; see :mod:`labo.fast.formula`."""
    batch, count = _formula_batch(logits, given), len(logits)
    all_sums = torch.empty(count, len(SUMS), dtype=torch.float64)
    batch.give("sums", all_sums, torch.float64, count, len(SUMS))
    _run(_open().formula, batch, count)
    return all_sums


def gradient(logits: Tensor, given: RowInputs, coefficients: Tensor, out: Tensor) -> Tensor:
    """The gradient of every row, written to ``out``; see :mod:`labo.fast.formula`."""
    _check_overlap(out, logits)
    batch, count = _formula_batch(logits, given), len(logits)
    coefficients = _contiguous(coefficients)
    batch.give("coefficients", coefficients, torch.float64, count, len(COEFFICIENTS))
    batch.give("grad", out, logits.dtype, *logits.shape)
    batch.grad_stride = out.stride(0)
    _run(_open().formula, batch, count)
    return out


def moments(logits: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """See :mod:`labo.fast.formula`."""
    logits = _contiguous(_readable(logits.detach()))
    both = torch.empty(len(logits), 2, dtype=torch.float64)
    batch = _batch(logits, torch.empty(len(logits), dtype=torch.int64), 0)
    batch.centered, batch.moments = centered, both.data_ptr()
    _run(_open().moments, batch, len(logits))
    return both[:, 0].clone(), both[:, 1].clone()


def _formula_batch(logits: Tensor, given: RowInputs) -> _Batch:
    """What both functions of a formula have."""
    target, plan, weight, ignore_index, source = given
    count, classes = logits.shape
    batch = _batch(_contiguous(logits), target, ignore_index)
    batch.asked, batch.masses, batch.tau, batch.margin = plan[:4]
    if weight is not None:
        batch.give("weight", _contiguous(weight.detach().float()), torch.float32, classes)
    if source is not None:
        rows = _contiguous(_readable(source.detach()))
        if plan.masses == row_sums.FROM_ROW:
            rows = rows.expand(count, classes)  # a stride of 0
        of_table = plan.masses == row_sums.FROM_TABLE
        batch.give("source", rows, rows.dtype, classes if of_table else count, classes)
        batch.source_stride, batch.source_bf16 = rows.stride(0), rows.dtype == torch.bfloat16
    if plan.row_tau is not None:
        batch.give("row_tau", torch.stack(plan.row_tau[:2], 1), torch.float64, count, 2)
    if plan.mixture is not None:
        batch.give("row_mixture", torch.stack(plan.mixture, 1), torch.float64, count, 3)
    return batch


def _readable(matrix: Tensor) -> Tensor:
    return matrix if matrix.dtype in DTYPES else matrix.float()
