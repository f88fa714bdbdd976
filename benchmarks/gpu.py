"""``python -m benchmarks.gpu``: the kernels on a GPU, timed and weighed, as one table.

Contenders take turns, as in ``python -m benchmarks``, those of other libraries among them where
they are installed. ``--device cpu --smoke`` shows that the script works, nothing else. Whether the
results are right is for the tests (``make gpu`` runs them first).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from . import contenders, machine
from .measure import race

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@contextmanager
def _defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Tensors that name neither device nor dtype get these."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _peak(work: Callable[[], object], device: str) -> float:
    """Extra MiB at the peak of one call."""
    if device == "cpu":
        return float("nan")
    _wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    _wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@dataclass(frozen=True)
class Section:
    """Contenders of one kind, on some shapes: rows and classes, with the width of a layer between.

    ``base`` is what their times are compared with.
    """

    make: Callable[..., dict[str, Callable[[], object]]]
    base: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)


VOCABULARIES = (32768, 131072, 151936, 256000)
SMALL = ((128, 100), (256, 1000), (1024, 32000))
_LARGE = tuple((8192, v) for v in VOCABULARIES)
_HEADS = tuple((8192, 4096, v) for v in VOCABULARIES)
_BOTH = (torch.bfloat16, torch.float32)
SECTIONS = (
    Section(contenders.gpu_losses, "torch LS", (*SMALL, *_LARGE)),
    Section(contenders.gpu_losses, "torch LS", ((8192, 32768),), (torch.float32, torch.float16)),
    Section(contenders.rowwise_losses, "torch LS", ((256, 1000), (8192, 32768))),
    Section(contenders.teacher_losses, "torch LS", ((8192, 32768),), _BOTH),
    Section(contenders.gpu_linear_losses, "torch linear + LS", _HEADS),
    Section(contenders.linear_rowwise_losses, "three matrix products", ((8192, 4096, 131072),)),
    Section(contenders.distillation, "torch linear + KD", ((8192, 4096, 131072),)),
)
HEADER = ["shape", "dtype", "forward + backward", "ms", "beside", "GB/s of 3 passes", "extra MiB"]


def benchmark(device: str, smoke: bool, compiled: bool = True) -> Iterator[list[str]]:
    """The rows of the table. What does not fit into memory, or does not run, is one of them."""
    rounds = 1 if smoke else 20
    for section in SECTIONS:
        shapes = [(16, 8, 256)[:: 2 if len(section.shapes[0]) == 2 else 1]] if smoke else None
        for shape, dtype in itertools.product(shapes or section.shapes, section.dtypes):
            if device == "cpu" and dtype == torch.float16:
                continue  # the C kernel takes none
            size = float(shape[0] * shape[-1] * dtype.itemsize)
            with _defaults(device, dtype):
                work = _made(section, shape)
                if not compiled:
                    work = {name: run for name, run in work.items() if "compiled" not in name}
                turns = max(1, rounds // 4) if len(shape) == 3 else rounds
                for row in measure(work, device, turns, size, section.base):
                    yield [" x ".join(map(str, shape)), _NAMES[dtype], *row]
            del work
            if device != "cpu":
                torch.cuda.empty_cache()


def _made(section: Section, shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """The contenders, or one that says that their inputs do not fit into memory."""
    try:
        return section.make(*shape)
    except torch.OutOfMemoryError as problem:
        raised = problem

    def out_of_memory() -> None:
        raise raised

    return {"all": out_of_memory}


def measure(
    work: dict[str, Callable[[], object]], device: str, rounds: int, logits_bytes: float, base: str
) -> Iterator[list[str]]:
    """Rows of the table; bandwidth counts what must move: read twice, written once."""

    def timed(contender: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            contender()
            _wait(device)

        return run

    failures = {name: _failure(contender, device) for name, contender in work.items()}
    able = {name: work[name] for name, failure in failures.items() if failure is None}
    times = race({name: timed(contender) for name, contender in able.items()}, rounds)
    for name, failure in failures.items():
        if failure is not None:
            yield [name, failure, "", "", ""]
            continue
        bandwidth = 3 * logits_bytes / times[name] / 1e9
        beside = f"{times[name] / times[base]:.2f}" if base in times else ""
        cells = [f"{1e3 * times[name]:.3g}", beside]
        yield [name, *cells, f"{bandwidth:.0f}", f"{_peak(work[name], device):.0f}"]


def _failure(contender: Callable[[], object], device: str) -> str | None:
    """Why a contender does not run here, in a word or a line; None if it does."""
    try:
        contender()
        _wait(device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as problem:
        return f"fails: {type(problem).__name__} {str(problem).partition(chr(10))[0][:80]}"
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once")
    parser.add_argument("--versions", action="store_true", help="say what the machine has, and end")
    options = parser.parse_args(arguments)
    print(machine.describe(), flush=True)
    if options.device == "cuda" and (problem := machine.problem()):
        raise SystemExit(f"no benchmark on a GPU: {problem}")
    if options.versions:
        return
    rows = benchmark(options.device, options.smoke, not options.smoke)
    for line in itertools.chain([HEADER, ["---"] * len(HEADER)], rows):
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
