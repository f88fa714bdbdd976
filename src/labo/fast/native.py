"""The native backend on the CPU: a C kernel for float32 and bfloat16, split over Python threads.

``native.c`` does not use Python and is loaded with ctypes, which releases the GIL during a call.
The rows are split over Python threads, because a second OpenMP runtime would compete with that of
PyTorch for the cores. C cannot check what a pointer points to: every pointer to a tensor that is
not allocated here comes from :func:`_pointer`, which checks it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import out_of_range
from ..sums import FROM_ROW, FROM_TABLE, Passes
from .columns import COEFFICIENTS, SUMS
from .kernel import Kernel

# With fewer logits per thread another thread costs more time than it saves.
_PER_THREAD = 1 << 18

_LARGEST = torch.finfo(torch.float32).max

STATISTICS = 5  # numbers per row, see :func:`labo.metrics.row_statistics`

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ROWS_ARGUMENTS: list[Any] = [
    *(_POINTER, _INT, _INT, _INT),  # logits, rows, classes, stride
    *(_POINTER, _INT, _POINTER),  # target, ignore_index, weight
    *(ctypes.c_int32, _DOUBLE, _DOUBLE, _DOUBLE),  # mode, alpha, tau, rho
    *(_DOUBLE, _POINTER, _POINTER, _POINTER, _INT),  # scale, row_scale, values, grad, grad_stride
    _POINTER,  # statistics
]
_FORMULA_ARGUMENTS: list[Any] = [
    *(_POINTER, _INT, _INT, _INT),  # logits, rows, classes, stride
    *(_POINTER, _INT, _POINTER),  # target, ignore_index, weight
    *(ctypes.c_int32, ctypes.c_int32, _DOUBLE, _DOUBLE),  # asked, masses, tau, margin
    *(_POINTER, _POINTER),  # row_tau, row_mixture
    *(_POINTER, _INT, ctypes.c_int32),  # source, source_stride, source_bf16
    *(_POINTER, _POINTER, _POINTER, _INT),  # sums, coefficients, grad, grad_stride
]

_MOMENTS_ARGUMENTS: list[Any] = [
    *(_POINTER, _INT, _INT, _INT),  # logits, rows, classes, stride
    *(ctypes.c_int32, _POINTER),  # centered, moments
]


class _Library:
    """The loaded library: its functions with their types."""

    def __init__(self) -> None:
        built = sorted(Path(__file__).parent.glob("_native*.so"))
        built += sorted(Path(__file__).parent.glob("_native*.pyd"))
        if not built:
            raise OSError("the C kernel was not built (no C compiler at install time)")
        library = ctypes.CDLL(str(built[0]))
        self.rows = {
            torch.float32: library.labo_rows_f32,
            torch.bfloat16: library.labo_rows_bf16,
        }
        self.formula = {
            torch.float32: library.labo_formula_f32,
            torch.bfloat16: library.labo_formula_bf16,
        }
        self.moments = {
            torch.float32: library.labo_moments_f32,
            torch.bfloat16: library.labo_moments_bf16,
        }
        for function in self.moments.values():
            function.argtypes, function.restype = _MOMENTS_ARGUMENTS, None
        for function in self.rows.values():
            function.argtypes, function.restype = _ROWS_ARGUMENTS, None
        for function in self.formula.values():
            function.argtypes, function.restype = _FORMULA_ARGUMENTS, None
        self.check_targets = library.labo_check_targets
        self.check_targets.argtypes = [_POINTER, _INT, _INT, _INT, _POINTER, _POINTER]
        self.check_targets.restype = _INT
        self.sum = library.labo_sum
        self.sum.argtypes = [_POINTER, _INT]
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


# What the functions for formulas and shards take.
SHARD_DTYPES = (torch.float32, torch.bfloat16)


# At import: it takes a millisecond, and torch.compile can read the result as a constant.
_LIBRARY, _PROBLEM = _load()


def unavailable() -> str | None:
    """Why the kernel cannot be used here, or None if it can."""
    return _PROBLEM


def refuses(logits: Tensor) -> str | None:
    """Why the kernel cannot take these logits, or None if it can."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
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
    """The sum of ``values``, (N,) float32, over ``divisor``.

    For a hundred rows, the sum and division of PyTorch would take as long as the rows themselves.
    """
    count = values.shape[0]
    address = _pointer("values", values, torch.float32, count)
    quotient = _open().sum(address, count) / divisor
    if abs(quotient) > _LARGEST:  # infinite in float32, where torch.full raises
        return torch.tensor(quotient, dtype=torch.float32)
    return torch.full((), quotient, dtype=torch.float32)


def rows(
    logits: Tensor,
    target: Tensor,
    kernel: Kernel,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows; the contract is in :mod:`labo.fast.dispatch`.

    ``statistics``, (N, 5) float64, is filled as by :func:`labo.metrics.row_statistics`.
    """
    if problem := refuses(logits):
        raise ValueError(problem)
    count, classes = logits.shape
    dtype, size = logits.dtype, logits.element_size()
    logits, target = _contiguous(logits), _contiguous(target)
    z = _pointer("logits", logits, dtype, count, classes)
    y = _pointer("target", target, torch.int64, count)
    z_stride = logits.stride(0)
    w = None
    if weight is not None:
        weight = _contiguous(weight.detach().float())
        w = _pointer("weight", weight, torch.float32, classes)
    # What is allocated here needs no check.
    values = torch.empty(count, dtype=torch.float32)
    v = values.data_ptr()
    grad, g, g_stride, f, scale = None, None, 0, None, 1.0
    if factor is not None:
        if out is None:
            grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
            g = grad.data_ptr()
        else:
            grad = out
            g = _pointer("out", out, dtype, count, classes)
            _check_overlap(out, logits)
        g_stride = grad.stride(0)
        if isinstance(factor, Tensor):
            factor = _contiguous(factor.detach().float())
            f = _pointer("factor", factor, torch.float32, count)
        else:
            scale = factor
    s = None
    if statistics is not None:
        s = _Column(
            _pointer("statistics", statistics, torch.float64, count, STATISTICS), statistics
        )
    function = _open().rows[dtype]

    def run(start: int, stop: int) -> None:
        function(
            z + start * z_stride * size,
            stop - start,
            classes,
            z_stride,
            y + start * 8,
            ignore_index,
            w,
            *kernel[:4],
            scale,
            None if f is None else f + start * 4,
            v + start * 4,
            None if g is None else g + start * g_stride * size,
            g_stride,
            None if s is None else s.at(start),
        )

    _in_threads(run, count, classes)
    return values, grad


def _in_threads(run: Callable[[int, int], None], count: int, classes: int) -> None:
    """``run(start, stop)`` for all rows, shared out over threads if there is enough to do."""
    threads = count * classes // _PER_THREAD
    if threads > 1:
        threads = min(threads, count, torch.get_num_threads())
    if threads <= 1:
        run(0, count)
    else:
        edges = [count * i // threads for i in range(threads + 1)]
        _workers.run([partial(run, *part) for part in pairwise(edges)])


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


def sums(
    logits: Tensor,
    target: Tensor,
    plan: Passes,
    weight: Tensor | None,
    ignore_index: int,
    source: Tensor | None = None,
) -> Tensor:
    """The sums of every row; see :mod:`labo.fast.formula`."""
    found = torch.empty(len(logits), len(SUMS), dtype=torch.float64)
    _run_formula(logits, target, plan, weight, ignore_index, source, found, None, None)
    return found


def gradient(
    logits: Tensor,
    target: Tensor,
    plan: Passes,
    weight: Tensor | None,
    ignore_index: int,
    source: Tensor | None,
    coefficients: Tensor,
    out: Tensor,
) -> Tensor:
    """The gradient of every row, written to ``out``; see :mod:`labo.fast.formula`."""
    _check_overlap(out, logits)
    fixed = (logits, target, plan, weight, ignore_index, source)
    _run_formula(*fixed, None, _contiguous(coefficients), out)
    return out


def moments(logits: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """See :data:`labo.fast.spread.Moments`."""
    count, classes = logits.shape
    logits = _contiguous(_readable(logits.detach()))
    found = torch.empty(count, 2, dtype=torch.float64)
    z = _Column(_pointer("logits", logits, logits.dtype, count, classes), logits)
    m = _Column(_pointer("moments", found, torch.float64, count, 2), found)
    function = _open().moments[logits.dtype]

    def run(start: int, stop: int) -> None:
        function(z.at(start), stop - start, classes, logits.stride(0), centered, m.at(start))

    _in_threads(run, count, classes)
    return found[:, 0].clone(), found[:, 1].clone()


def _run_formula(
    logits: Tensor,
    target: Tensor,
    plan: Passes,
    weight: Tensor | None,
    ignore_index: int,
    source: Tensor | None,
    found: Tensor | None,
    coefficients: Tensor | None,
    grad: Tensor | None,
) -> None:
    count, classes = logits.shape
    dtype = logits.dtype
    logits, target = _contiguous(logits), _contiguous(target)
    z = _Column(_pointer("logits", logits, dtype, count, classes), logits)
    y = _Column(_pointer("target", target, torch.int64, count), target)
    w = None
    if weight is not None:
        weight = _contiguous(weight.detach().float())
        w = _pointer("weight", weight, torch.float32, classes)
    t = s = c = g = r = m = None
    source_stride, source_bf16 = 0, False
    if source is not None:
        t, source_bf16 = _source(source, count, classes, plan.masses)
        source_stride = t.tensor.stride(0)
    by_row = plan.masses != FROM_TABLE
    if found is not None:
        s = _Column(_pointer("sums", found, torch.float64, count, len(SUMS)), found)
    if plan.row_tau is not None:
        taus = torch.stack(plan.row_tau[:2], 1)
        r = _Column(_pointer("row_tau", taus, torch.float64, count, 2), taus)
    if plan.mixture is not None:
        mixture = torch.stack(plan.mixture, 1)
        m = _Column(_pointer("row_mixture", mixture, torch.float64, count, 2), mixture)
    if coefficients is not None:
        shape = (count, len(COEFFICIENTS))
        c = _Column(_pointer("coefficients", coefficients, torch.float64, *shape), coefficients)
    if grad is not None:
        g = _Column(_pointer("out", grad, dtype, count, classes), grad)
    function = _open().formula[dtype]

    def run(start: int, stop: int) -> None:
        function(
            z.at(start),
            stop - start,
            classes,
            logits.stride(0),
            y.at(start),
            ignore_index,
            w,
            *plan[:4],
            None if r is None else r.at(start),
            None if m is None else m.at(start),
            None if t is None else t.at(start if by_row else 0),
            source_stride,
            source_bf16,
            None if s is None else s.at(start),
            None if c is None else c.at(start),
            None if g is None else g.at(start),
            0 if grad is None else grad.stride(0),
        )

    _in_threads(run, count, classes)


def _readable(matrix: Tensor) -> Tensor:
    return matrix if matrix.dtype in SHARD_DTYPES else matrix.float()


def _source(source: Tensor, count: int, classes: int, masses: int) -> tuple[_Column, bool]:
    """What the masses of a formula come from, as rows of float32 or bfloat16."""
    source = _contiguous(_readable(source.detach()))
    if masses == FROM_ROW:
        source = source.expand(count, classes)  # a stride of 0
    shape = (classes if masses == FROM_TABLE else count, classes)
    address = _pointer("source", source, source.dtype, *shape)
    return _Column(address, source), source.dtype == torch.bfloat16


class _Column(NamedTuple):
    """The address of a checked tensor, and the tensor, which stays alive with it."""

    address: int
    tensor: Tensor

    def at(self, row: int) -> int:
        return self.address + row * self.tensor.stride(0) * self.tensor.element_size()
