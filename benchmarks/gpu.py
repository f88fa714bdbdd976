"""``python -m benchmarks.gpu``: the kernels on a GPU, checked, timed and weighed, as one table.

First the results on the device are compared with float64 on the CPU; then contenders take turns, as
in ``python -m benchmarks``, those of other libraries among them where they are installed.
``--device cpu --smoke`` shows that the script works, nothing else.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import labo

from . import contenders, machine
from .race import race

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# As in training with float16, in which the gradients of DFT would underflow.
_LOSS_SCALE = 2.0**12


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


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Case:
    """A loss, what it learns from, and options of ``linear_loss``."""

    build: Callable[[int], nn.Module]
    teacher: Literal["logits", "stored"] | None = None
    weighted: bool = False  # a weight for each row
    metrics: bool = False

    @property
    def on_logits(self) -> bool:
        return not (self.weighted or self.metrics)


CASES: dict[str, Case] = {
    "CE": Case(lambda classes: labo.CrossEntropyLoss()),
    "LS": Case(lambda classes: labo.LabelSmoothingLoss()),
    "LABO": Case(lambda classes: labo.LABOLoss()),
    "LABO, alpha=0.1": Case(lambda classes: labo.LABOLoss(alpha=0.1)),
    **{name: Case(build) for name, build in contenders.ROWWISE.items()},
    "KD": Case(lambda classes: labo.DistillationLoss(), teacher="logits"),
    "KD, standardized": Case(
        lambda classes: labo.DistillationLoss(standardize=True), teacher="logits"
    ),
    "DKD": Case(lambda classes: labo.DecoupledDistillationLoss(warmup_epochs=0), teacher="logits"),
    "PS-KD": Case(lambda classes: labo.PSKDLoss(epochs=2), teacher="logits"),
    "stored classes": Case(lambda classes: labo.TopKDistillationLoss(), teacher="stored"),
    "LABO, token weights": Case(lambda classes: labo.LABOLoss(), weighted=True),
    "LABO, metrics": Case(lambda classes: labo.LABOLoss(), metrics=True),
}


def largest_error(case: Case, dtype: torch.dtype, device: str, head: bool, classes: int) -> float:
    """Against float64 on the CPU, of value, gradients and metrics, in units of the largest."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=rng).to(dtype)
    weight = 0.1 * torch.randn(classes, 64, generator=rng)
    weight[:37] += 0.1 * hidden.float()  # the largest logit of a row is clear in any dtype
    weight = weight.to(dtype)
    target = torch.randint(classes, (37,), generator=rng)
    target[::5] = torch.arange(0, 37, 5)  # some predictions are right
    target[3] = -100
    token_weight = torch.rand(37, generator=rng)
    taught = torch.randn(37, classes, generator=rng).to(dtype)
    top = taught.double().log_softmax(-1).topk(16)
    all_logits = (hidden.double() @ weight.double().T).to(dtype)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        loss = case.build(classes).to(device)
        teacher = {
            None: (),
            "logits": (taught.to(device, dtype),),
            "stored": (top.indices.to(device), top.values.to(device)),
        }[case.teacher]
        x, w, logits = (t.to(device, dtype).requires_grad_() for t in (hidden, weight, all_logits))
        leaves: tuple[Tensor, ...] = (x, w) if head else (logits,)
        numbers: tuple[Tensor, ...] = ()
        if not head:
            value = loss(logits, target.to(device), *teacher)
        else:
            options: dict[str, Any] = {"return_metrics": case.metrics}
            if teacher:
                options["teacher_logits"] = teacher if case.teacher == "stored" else teacher[0]
            if case.weighted:
                options["token_weight"] = token_weight.to(device)
            result: Any = labo.linear_loss(x, w, target.to(device), loss, **options)
            value, numbers = result if case.metrics else (result, ())
        scale = torch.full_like(value, _LOSS_SCALE)
        results = (value, *torch.autograd.grad(value, leaves, scale), *numbers)
        return [tensor.detach().double().cpu() for tensor in results]

    found, wanted = run(device, dtype), run("cpu", torch.float64)
    return max(
        float((f - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True)
    )


def check(device: str, classes: int = 5003) -> str:
    """How many cases were compared, and the largest errors; raises if one is too large."""
    worst: dict[torch.dtype, tuple[float, str]] = dict.fromkeys(_TOLERANCE, (0.0, ""))
    for (name, case), dtype in itertools.product(CASES.items(), _TOLERANCE):
        heads = (False, True) if case.on_logits else (True,)
        errors = {head: largest_error(case, dtype, device, head, classes) for head in heads}
        if max(errors.values()) > _TOLERANCE[dtype]:
            raise SystemExit(f"{name} in {_NAMES[dtype]} is off by {max(errors.values()):.1e}")
        worst[dtype] = max(worst[dtype], (max(errors.values()), name))
    found = (f"{_NAMES[dtype]} {error:.1e} ({name})" for dtype, (error, name) in worst.items())
    return f"{len(CASES)} losses agree with float64; largest errors: {', '.join(found)}\n"


# ------------------------------------------------------------------ time and memory


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
    print(f"\n{check(options.device, 211 if options.smoke else 5003)}")
    print(_table(HEADER, list(benchmark(options.device, options.smoke, not options.smoke))))


if __name__ == "__main__":
    main()
