"""``python -m benchmarks.gpu``: the kernels on a GPU, checked, timed and weighed, as Markdown.

First the results on the device are compared with float64 on the CPU; then contenders take turns, as
in ``python -m benchmarks``. ``--device cpu --smoke`` shows that the script works, nothing else.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
    """A table of errors; raises if one is too large."""
    rows = []
    for (name, case), dtype in itertools.product(CASES.items(), _TOLERANCE):
        heads = (False, True) if case.on_logits else (True,)
        errors = {head: largest_error(case, dtype, device, head, classes) for head in heads}
        if max(errors.values()) > _TOLERANCE[dtype]:
            raise SystemExit(f"{name} in {_NAMES[dtype]} is off by {max(errors.values()):.1e}")
        cells = [f"{errors[head]:.1e}" if head in errors else "" for head in (False, True)]
        rows.append([name, _NAMES[dtype], *cells])
    return _table(["loss", "dtype", "error on logits", "error of linear_loss"], rows)


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


def measure(
    work: dict[str, Callable[[], object]], device: str, rounds: int, logits_bytes: float, base: str
) -> list[list[str]]:
    """Rows of the table; bandwidth counts what must move: read twice, written once."""

    def timed(contender: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            contender()
            _wait(device)

        return run

    times = race({name: timed(contender) for name, contender in work.items()}, rounds)
    rows = []
    for name, contender in work.items():
        bandwidth = 3 * logits_bytes / times[name] / 1e9
        cells = [f"{1e3 * times[name]:.3g}", f"{times[name] / times[base]:.2f}"]
        rows.append([name, *cells, f"{bandwidth:.0f}", f"{_peak(contender, device):.0f}"])
    return rows


def benchmark(device: str, smoke: bool) -> Iterator[str]:
    """One table for each shape and dtype."""
    header = ["forward + backward", "ms", "beside torch LS", "GB/s of 3 passes", "extra MiB"]
    rounds = 1 if smoke else 20
    dtypes = [torch.bfloat16] if smoke else [torch.float32, torch.bfloat16]
    shapes = [(8, 512)] if smoke else [(8192, 32768), (4096, 131072)]
    for (n, v), dtype in itertools.product(shapes, dtypes):
        for title, make in (
            ("Loss on logits", partial(contenders.logits_losses, compiled=not smoke)),
            ("Row-wise losses", contenders.rowwise_losses),
            ("Losses with a teacher", contenders.teacher_losses),
        ):
            with _defaults(device, dtype):
                size = float(n * v * dtype.itemsize)
                rows = measure(make(n, v), device, rounds, size, "torch LS")
            yield f"{title}, N={n} V={v}, {_NAMES[dtype]}\n\n{_table(header, rows)}"
    n, d, v = (16, 8, 256) if smoke else (8192, 4096, 128256)
    for dtype in dtypes:
        for title, make_linear, base in (
            ("Output layer and loss", contenders.linear_losses, "torch linear + LS"),
            (
                "Output layer and formulas",
                contenders.linear_rowwise_losses,
                "three matrix products",
            ),
            ("Output layer and distillation", contenders.distillation, "torch linear + KD"),
        ):
            with _defaults(device, dtype):
                work = make_linear(n, d, v)
                if smoke:
                    work = {name: run for name, run in work.items() if "compiled" not in name}
                size = float(n * v * dtype.itemsize)
                rows = measure(work, device, max(1, rounds // 4), size, base)
            columns = [beside.replace("torch LS", base) for beside in header]
            yield f"{title}, N={n} D={d} V={v}, {_NAMES[dtype]}\n\n{_table(columns, rows)}"
            del work


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
    print(check(options.device, 211 if options.smoke else 5003))
    for table in benchmark(options.device, options.smoke):
        print(table)


if __name__ == "__main__":
    main()
