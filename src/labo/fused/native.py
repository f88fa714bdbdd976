"""The C kernel on the CPU: float32 and bfloat16 rows, split over Python threads.

``native.c`` has no Python in it and is opened with ctypes, which releases the GIL during a call.
The rows are therefore shared out by plain threads: a second OpenMP runtime beside PyTorch's would
fight with it for the cores. Everything is checked here before a pointer is handed over.
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
from typing import Any

import torch
from torch import Tensor

from .._checks import out_of_range
from .spec import RowSpec

# Below this many logits a second thread costs more than it brings.
_PER_THREAD = 1 << 18

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ROWS_ARGUMENTS: list[Any] = [
    *(_POINTER, _INT, _INT, _INT),  # logits, rows, classes, stride
    *(_POINTER, _INT, _POINTER),  # target, ignore_index, weight
    *(ctypes.c_int32, _DOUBLE, _DOUBLE, _DOUBLE),  # mode, alpha, tau, rho
    *(_DOUBLE, _POINTER, _POINTER, _POINTER, _INT),  # scale, row_scale, values, grad, grad_stride
]
_SHARD_ARGUMENTS: list[Any] = [
    *(_POINTER, _INT, _INT, _INT),  # logits, rows, classes, stride
    *(_POINTER, _INT, _POINTER),  # target, ignore_index, weight
    *(ctypes.c_int32, _DOUBLE),  # mode, tau
    *(_POINTER, _POINTER, _POINTER, _INT),  # sums, results, grad, grad_stride
]


class _Library:
    """The opened library: its functions with their types, or why there is none."""

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
        self.shard = {
            torch.float32: library.labo_shard_f32,
            torch.bfloat16: library.labo_shard_bf16,
        }
        for functions, arguments in ((self.rows, _ROWS_ARGUMENTS), (self.shard, _SHARD_ARGUMENTS)):
            for function in functions.values():
                function.argtypes = arguments
                function.restype = None
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


# What :func:`shard_sums` and :func:`shard_gradient` take.
SHARD_DTYPES = (torch.float32, torch.bfloat16)


# At import: it costs a millisecond, and torch.compile can then read the outcome as a constant.
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
    """What the kernel runs on: "avx512", "avx2" or "portable"."""
    return _open().isa().decode()


def select_instruction_set(name: str) -> bool:
    """Force an instruction set, for tests; False if this machine or build has it not."""
    return bool(_open().select(name.encode()))


def _open() -> _Library:
    if _LIBRARY is None:
        raise RuntimeError(_PROBLEM)
    return _LIBRARY


class _Workers:
    """Threads that wait for work; made when first needed, and again in a forked child.

    Plain queues: at a hundred microseconds of work a thread pool's futures would cost what the
    second core brings.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.size = 0
        self.jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]]]
        self.jobs = SimpleQueue()
        self.lock = threading.Lock()

    def share_out(self, jobs: list[Callable[[], None]]) -> None:
        """Run the jobs side by side, the first one here."""
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
            # Before the caller goes on: a job holds its tensors, and a gradient that is held
            # elsewhere too would be copied by autograd.
            del job
            done.put(problem)


_workers = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.forget)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _as_float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to("cpu", torch.float32).contiguous()


def denominator(target: Tensor, classes: int, ignore_index: int, weight: Tensor | None) -> float:
    """Check the targets, and count those that count (or add up their weights).

    Args:
        target: (N,) int64 on the CPU.
        classes: K.
        ignore_index: target of rows that do not count.
        weight: (K,) class weights.
    """
    weight = _as_float(weight)
    total = ctypes.c_double()
    bad = _open().check_targets(
        target.data_ptr(),
        len(target),
        classes,
        ignore_index,
        _pointer(weight),
        ctypes.byref(total),
    )
    if bad >= 0:
        raise out_of_range(target, classes, ignore_index)
    return total.value


def total(values: Tensor, divisor: float) -> Tensor:
    """The sum of ``values``, (N,) float32 as :func:`rows` gives them, over ``divisor``.

    At a hundred rows PyTorch's sum and division cost as much as the rows themselves.
    """
    quotient = _open().sum(values.data_ptr(), len(values)) / divisor
    return torch.full((), quotient, dtype=torch.float32)


def _gradient_buffer(logits: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out.shape != logits.shape or out.dtype != logits.dtype or out.device != logits.device:
        raise ValueError("out must have the shape, dtype and device of the logits")
    if out.stride(1) != 1 and out.shape[1] > 1:
        raise ValueError("out must be contiguous along the classes")
    return out


def rows(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    factor: float | Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of rows; see :mod:`labo.fused.spec` for the contract."""
    if problem := refuses(logits):
        raise ValueError(problem)
    if not (logits.is_cpu and target.is_cpu):
        raise ValueError(f"the C kernel runs on the CPU, got {logits.device} and {target.device}")
    count, classes = logits.shape
    if target.shape != (count,) or target.dtype != torch.int64:
        raise ValueError(f"target must be int64 of shape ({count},)")
    if logits.stride(1) != 1 and classes > 1:
        logits = logits.contiguous()
    target = target.contiguous()
    weight = _as_float(weight)
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"weight must have shape ({classes},), got {tuple(weight.shape)}")
    values = torch.empty(count, dtype=torch.float32)
    grad, row_factor, scale = None, None, 1.0
    if factor is not None:
        grad = _gradient_buffer(logits, out)
        if isinstance(factor, Tensor):
            row_factor = _as_float(factor)
            if row_factor is None or row_factor.shape != (count,):
                raise ValueError(f"factor must be a number or have shape ({count},)")
        else:
            scale = factor
    function = _open().rows[logits.dtype]

    def run(start: int, stop: int) -> None:
        item = logits.element_size()
        function(
            logits.data_ptr() + start * logits.stride(0) * item,
            stop - start,
            classes,
            logits.stride(0),
            target.data_ptr() + start * 8,
            ignore_index,
            _pointer(weight),
            spec.mode,
            spec.alpha,
            spec.tau,
            spec.rho,
            scale,
            None if row_factor is None else row_factor.data_ptr() + start * 4,
            values.data_ptr() + start * 4,
            None if grad is None else grad.data_ptr() + start * grad.stride(0) * item,
            0 if grad is None else grad.stride(0),
        )

    _in_threads(run, count, classes)
    return values, grad


def _in_threads(run: Callable[[int, int], None], count: int, classes: int) -> None:
    """``run(start, stop)`` for all rows, shared out over threads if there is enough to do."""
    threads = min(torch.get_num_threads(), count, count * classes // _PER_THREAD)
    if threads <= 1:
        run(0, count)
    else:
        edges = [count * i // threads for i in range(threads + 1)]
        _workers.share_out([partial(run, *part) for part in pairwise(edges)])


# ------------------------------------------------------------------ columns split over processes


def shard_sums(
    logits: Tensor, target: Tensor, spec: RowSpec, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """The sums of every row over a shard of its columns; see :mod:`labo.fused.shards`."""
    sums = torch.empty(len(logits), 7, dtype=torch.float64)
    _run_shard(logits, target, spec, weight, ignore_index, sums, None, None)
    return sums


def shard_gradient(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    results: Tensor,
    out: Tensor | None,
) -> Tensor:
    """The gradient of a shard from sums over all of them; see :mod:`labo.fused.shards`."""
    grad = _gradient_buffer(logits, out)
    _run_shard(logits, target, spec, weight, ignore_index, None, results.contiguous(), grad)
    return grad


def _run_shard(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    weight: Tensor | None,
    ignore_index: int,
    sums: Tensor | None,
    results: Tensor | None,
    grad: Tensor | None,
) -> None:
    count, classes = logits.shape
    if logits.stride(1) != 1 and classes > 1:
        logits = logits.contiguous()
    target = target.contiguous()
    weight = _as_float(weight)
    function = _open().shard[logits.dtype]

    def at(x: Tensor | None, row: int) -> int | None:
        return None if x is None else x.data_ptr() + row * x.stride(0) * x.element_size()

    def run(start: int, stop: int) -> None:
        function(
            at(logits, start),
            stop - start,
            classes,
            logits.stride(0),
            at(target, start),
            ignore_index,
            _pointer(weight),
            spec.mode,
            spec.tau,
            at(sums, start),
            at(results, start),
            at(grad, start),
            0 if grad is None else grad.stride(0),
        )

    _in_threads(run, count, classes)
