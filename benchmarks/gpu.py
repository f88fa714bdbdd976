"""``python -m benchmarks.gpu``: the kernels on a GPU, checked, timed and weighed, as Markdown.

First the results on the device are compared with float64 on the CPU; then contenders take turns, as
in ``python -m benchmarks``. ``--device cpu --smoke`` shows that the script works, nothing else.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import labo

from . import contenders
from .race import race

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
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


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ------------------------------------------------------------------ correctness


def largest_error(loss: torch.nn.Module, dtype: torch.dtype, device: str, head: bool) -> float:
    """Of value and gradients against float64 on the CPU; gradients in units of the largest."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=rng).to(dtype)
    weight = (0.1 * torch.randn(5003, 64, generator=rng)).to(dtype)
    target = torch.randint(5003, (37,), generator=rng)
    target[3] = -100
    all_logits = (hidden.double() @ weight.double().T).to(dtype)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        x, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
        if head:
            value = labo.linear_loss(x, w, target.to(device), loss)
            grads = torch.autograd.grad(value, (x, w))
        else:
            logits = all_logits.to(device, dtype).requires_grad_()
            value = loss(logits, target.to(device))
            grads = torch.autograd.grad(value, (logits,))
        return [x.detach().double().cpu() for x in (value, *grads)]

    found, wanted = run(device, dtype), run("cpu", torch.float64)
    errors = [
        float((f - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True)
    ]
    return max(errors)


def check(device: str) -> str:
    """A table of errors; raises if one is too large."""
    losses: dict[str, Callable[[], torch.nn.Module]] = {
        "CE": labo.CrossEntropyLoss,
        "LS": labo.LabelSmoothingLoss,
        "LABO": labo.LABOLoss,
        "LABO, alpha=0.1": lambda: labo.LABOLoss(alpha=0.1),
    }
    rows = []
    for (name, make), dtype in itertools.product(losses.items(), _TOLERANCE):
        errors = [largest_error(make(), dtype, device, head) for head in (False, True)]
        if max(errors) > _TOLERANCE[dtype]:
            raise SystemExit(f"{name} in {_NAMES[dtype]} is off by {max(errors):.1e}")
        rows.append([name, _NAMES[dtype], *(f"{error:.1e}" for error in errors)])
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
    dtypes = [torch.float32, torch.bfloat16]
    shapes = [(8, 512)] if smoke else [(8192, 32768), (4096, 131072)]
    for (n, v), dtype in itertools.product(shapes, dtypes):
        with _defaults(device, dtype):
            work = contenders.logits_losses(n, v, compiled=not smoke)
            size = float(n * v * dtype.itemsize)
            rows = measure(work, device, rounds, size, "torch LS")
        yield f"Loss on logits, N={n} V={v}, {_NAMES[dtype]}\n\n{_table(header, rows)}"
        del work
    n, d, v = (16, 8, 256) if smoke else (8192, 4096, 128256)
    for dtype in dtypes:
        with _defaults(device, dtype):
            work = contenders.linear_losses(n, d, v)
            if smoke:
                work = {name: run for name, run in work.items() if "compiled" not in name}
            size = float(n * v * dtype.itemsize)
            rows = measure(work, device, max(1, rounds // 4), size, "torch linear + LS")
        title = f"Output layer and loss, N={n} D={d} V={v}, {_NAMES[dtype]}"
        yield f"{title}\n\n{_table(header, rows)}"
        del work


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA or ROCm device here: run this on a machine that has one")
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {labo.backends()['native (CUDA)']}\n")
    print(check(options.device))
    for table in benchmark(options.device, options.smoke):
        print(table)


if __name__ == "__main__":
    main()
