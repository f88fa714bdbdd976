"""``python -m benchmarks``: a table of ratios, also as results.json and .md, and two plots.

Times are medians over rounds in which all contenders run in turn. A ratio compares two contenders
of the same race. ``--smoke`` runs everything once at tiny sizes, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import labo
from labo.lab.run.distributed import device_name

from . import contenders, huggingface, images, parallel, training, translation
from .measure import extra_bytes, in_fresh_process, race

HERE = Path(__file__).parent
ASSETS = HERE.parent / "docs" / "assets"


@dataclass(frozen=True)
class Row:
    """One row of the table: labo, a rival, and the target ratio."""

    work: str
    ours: str
    rival: str
    value: float
    rival_value: float
    unit: str
    goal: float | None

    @property
    def ratio(self) -> float:
        return self.value / self.rival_value if self.rival_value else float("inf")

    @property
    def numbers(self) -> list[str]:
        """Both values, their ratio and the target, as they are shown."""
        shown = [f"{x:.3g} {self.unit}" for x in (self.value, self.rival_value)]
        return [*shown, f"{self.ratio:.2f}", "" if self.goal is None else f"{self.goal:.2f}"]


Pairs = Sequence[tuple[str, str, float | None]]  # labo, a rival, the target


def _compare(work: str, times: dict[str, float], pairs: Pairs) -> list[Row]:
    return [
        Row(work, ours, rival, 1e3 * times[ours], 1e3 * times[rival], "ms", goal)
        for ours, rival, goal in pairs
        if ours in times and rival in times
    ]


def _extra_mib(measure: Callable[..., int], *arguments: object) -> float:
    """What a function measures in a process of its own, in MiB."""
    return in_fresh_process(measure, *arguments) / 2**20


def _of_many_calls(work: dict[str, contenders.Work], calls: int, turns: int) -> dict[str, float]:
    """Seconds of a call, where a turn is many of them."""

    def repeated(one: contenders.Work) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                one()

        return run

    times = race({name: repeated(one) for name, one in work.items()}, turns)
    return {name: seconds / calls for name, seconds in times.items()}


def logits_large(smoke: bool) -> list[Row]:
    rows = []
    for n, v in [(8, 512), (4, 1024)] if smoke else [(2048, 32768), (512, 131072)]:
        times = race(contenders.logits_losses(n, v, compiled=not smoke), 1 if smoke else 9)
        pairs = [
            ("labo native", "torch LS", 0.40),
            ("labo blocked", "torch LS", 0.80),
            ("labo in place", "torch LS", 0.30),
            ("labo native", "allocate + copy", 2.0),
        ]
        rows += _compare(f"loss, N={n} V={v}", times, pairs)
        rivals = ("torch LS compiled", "naive LABO", "naive LABO compiled")
        others = [("labo native", rival, None) for rival in rivals]
        others.append(("labo LS native", "torch LS", None))
        rows += _compare(f"loss, N={n} V={v}", times, others)
    return rows


def logits_small(smoke: bool) -> list[Row]:
    rows = []
    for n, v in [(128, 100), (256, 1000)]:
        work = contenders.logits_losses(n, v, compiled=False)
        times = _of_many_calls(work, 1 if smoke else 200, 1 if smoke else 9)
        goal = 0.60 if v == 100 else 0.45
        pairs = [("labo native", "torch LS", goal), ("labo blocked", "torch LS", None)]
        rows += _compare(f"loss, {n} x {v}", times, pairs)
    return rows


def automatic(smoke: bool) -> list[Row]:
    """``impl="auto"`` beside ``impl="reference"``: at no size is the choice slower."""
    # rows, classes, type, calls in a turn, turns
    cases = [(8, 10, "float32", 200, 7), (8, 10, "float16", 200, 7)]
    cases += [(128, 100, "float32", 100, 7), (128, 100, "float16", 100, 7)]
    cases += [(256, 1000, "float32", 20, 5), (2048, 32768, "float32", 1, 1)]
    rows = []
    for n, v, dtype, calls, turns in [(*case[:3], 1, 1) for case in cases[:4]] if smoke else cases:
        work = contenders.backend_pairs(n, v, getattr(torch, dtype))
        times = _of_many_calls(work, calls, turns)
        ours = [name for name in times if name.endswith(", auto")]
        goals = [(name, name.replace(", auto", ", reference"), 1.0) for name in ours]
        rows += _compare(f"backend, {n} x {v}, {dtype}", times, goals)
    return rows


def rowwise(smoke: bool) -> list[Row]:
    """Every other row-wise loss on logits; those with a teacher also beside plain PyTorch."""
    n, v = (8, 512) if smoke else (2048, 32768)
    times = race(contenders.rowwise_losses(n, v), 1 if smoke else 5)
    pairs = [(name, "torch LS", 0.50) for name in contenders.ROWWISE]
    rows = _compare(f"loss, N={n} V={v}", times, pairs)
    times = race(contenders.teacher_losses(n, v), 1 if smoke else 3)
    names = [name for name in times if f"plain {name}" in times]
    pairs = [(name, f"plain {name}", 0.30) for name in names]
    pairs += [(name, "torch LS", 0.60) for name in names]
    return rows + _compare(f"loss with a teacher, N={n} V={v}", times, pairs)


def linear_rowwise(smoke: bool) -> list[Row]:
    """Row-wise losses with the output layer, one for each set of sums."""
    n, d, v = (32, 16, 256) if smoke else (4096, 512, 32768)
    times = race(contenders.linear_rowwise_losses(n, d, v), 1 if smoke else 2)
    rival = "three matrix products"
    pairs = [(name, rival, 1.15) for name in times if name != rival]
    return _compare(f"linear_loss, N={n} D={d} V={v}", times, pairs)


def linear_time(smoke: bool) -> list[Row]:
    n, d, v = (32, 16, 256) if smoke else (4096, 512, 32768)
    work = contenders.linear_losses(n, d, v)
    if smoke:
        work = {name: f for name, f in work.items() if "compiled" not in name}
    times = race(work, 1 if smoke else 5)
    rows = []
    for ours in ("labo.linear_loss LABO", "labo.linear_loss LS"):
        goals = {
            "three matrix products": 1.15,
            "torch linear + LS compiled": 1.0,
            "torch linear + LS": 0.85,
            "torch linear_cross_entropy (CE)": 0.85,
        }
        pairs = [(ours, rival, goal) for rival, goal in goals.items()]
        rows += _compare(f"output layer + loss, N={n} D={d} V={v}", times, pairs)
    pairs = [
        ("labo.linear_loss LABO, metrics", "three matrix products", 1.10),
        ("labo.linear_loss LABO, metrics", "labo.linear_loss LABO", 1.03),
    ]
    rows += _compare(f"output layer + loss, N={n} D={d} V={v}", times, pairs)
    ignored = race(contenders.ignored_rows(n, d, v), 1 if smoke else 3)
    pairs = [("60 % ignored, dropped", "60 % ignored, kept", 0.50)]
    rows += _compare(f"output layer + LABO, N={n} D={d} V={v}", ignored, pairs)
    names = ("labo.linear_loss LABO", "torch linear + LS")
    half = contenders.linear_losses(n, d, v, names=names, dtype=torch.bfloat16)
    work_name = f"output layer + loss, bfloat16, N={n} D={d} V={v}"
    return rows + _compare(work_name, race(half, 1 if smoke else 3), [(*names, 0.80)])


def distilling(smoke: bool) -> list[Row]:
    """A teacher's output layer beside that of the student, and 64 stored classes."""
    n, d, v = (32, 16, 256) if smoke else (4096, 512, 32768)
    times = race(contenders.distillation(n, d, v), 1 if smoke else 3)
    pairs = [
        ("labo.linear_loss KD", "torch linear + KD", 0.80),
        ("labo.linear_loss top-64", "torch linear + KD", 0.70),
        ("labo.linear_loss reverse KL", "torch linear + reverse KL", 0.80),
        ("labo.linear_loss JSD", "torch linear + JSD", 0.80),
    ]
    rows = _compare(f"distillation, N={n} D={d} V={v}", times, pairs)
    used = {name: _extra_mib(extra_bytes, name, n, d, v) for name in times}
    work = f"distillation, extra memory, N={n} D={d} V={v}"
    return rows + [
        Row(work, ours, rival, used[ours], used[rival], "MiB", 0.15) for ours, rival, _ in pairs
    ]


def linear_memory(smoke: bool) -> list[Row]:
    n, d, v = (64, 16, 512) if smoke else (4096, 512, 32768)
    names = ["labo.linear_loss LABO", "labo.linear_loss LABO, metrics"]
    names += ["labo.linear_loss LS", "torch linear + LS"]
    names += ["torch linear_cross_entropy (CE)"]
    used = {name: _extra_mib(extra_bytes, name, n, d, v) for name in names}
    rows = []
    for ours in names[:3]:
        for rival, goal in (("torch linear + LS", 0.10), ("torch linear_cross_entropy (CE)", 1.0)):
            work = f"extra memory, N={n} D={d} V={v}"
            rows.append(Row(work, ours, rival, used[ours], used[rival], "MiB", goal))
    return rows


def linear_growth(smoke: bool) -> list[Row]:
    """From 4096 to 65536 tokens: memory, and time per token, relative to the first size."""
    d, v = (16, 256) if smoke else (128, 16384)
    sizes = (32, 64) if smoke else (4096, 8192, 16384, 32768, 65536)
    name = "labo.linear_loss LABO"
    memory = {n: _extra_mib(extra_bytes, name, n, d, v) for n in sizes}
    per_token = {}
    for n in sizes:
        work = contenders.linear_losses(n, d, v, names=(name,))
        per_token[n] = race(work, 1 if smoke else 3)[name] / n * 1e6
    first, rows = sizes[0], []
    for n in sizes[1:]:
        work_name = f"linear_loss, D={d} V={v}"
        rows.append(Row(work_name, f"N={n}", f"N={first}", memory[n], memory[first], "MiB", None))
        times = (per_token[n], per_token[first])
        rows.append(Row(work_name, f"N={n}", f"N={first}", *times, "us/token", None))
    return rows


def training_steps(smoke: bool) -> list[Row]:
    rows = []
    steps = {
        "step, ResNet18 32x32": contenders.resnet_steps(2 if smoke else 128),
        "step, Transformer 512/1024": contenders.transformer_steps(
            *((32, 100, 1) if smoke else (4096, 10_000, 6))
        ),
    }
    for name, work in steps.items():
        times = race(work, 1 if smoke else 5)
        pairs = [("labo LABO", "torch CE", 1.02), ("torch LS", "torch CE", None)]
        rows += _compare(name, times, pairs)
    return rows


def language_model(smoke: bool) -> list[Row]:
    """A training step of a causal model of transformers, with and without a fused head."""
    size = huggingface.SMOKE if smoke else huggingface.FULL
    names = list(huggingface.CONTENDERS)
    memory = {name: _extra_mib(huggingface.extra_bytes, name, size) for name in names}
    times = race(huggingface.steps(names, size), 1 if smoke else 5)
    work = f"Llama, {size.batch * size.length} tokens, V={size.vocabulary}"
    rows = []
    for ours, rival in (
        ("fuse_head LABO", "transformers CE"),
        ("fuse_head LABO", "LABO on logits"),
        ("fuse_head CE", "transformers CE"),
    ):
        peaks = (memory[ours], memory[rival])
        rows.append(Row(f"{work}, extra memory", ours, rival, *peaks, "MiB", None))
        rows += _compare(f"{work}, step", times, [(ours, rival, None)])
    return rows + _evaluation(huggingface.SMOKE if smoke else huggingface.EVALUATION)


def _evaluation(size: huggingface.Size) -> list[Row]:
    """Extra memory of ``Trainer.evaluate``, beside a training step and the model's own."""
    work = f"evaluate, {size.batch * size.length} tokens, V={size.vocabulary}, extra memory"
    fused = _extra_mib(huggingface.extra_bytes, "fuse_head LABO", size, True)
    rivals = {
        "training step": (_extra_mib(huggingface.extra_bytes, "fuse_head LABO", size), 1.2),
        "transformers CE": (
            _extra_mib(huggingface.extra_bytes, "transformers CE", size, True),
            None,
        ),
    }
    return [
        Row(work, "fuse_head LABO", rival, fused, used, "MiB", goal)
        for rival, (used, goal) in rivals.items()
    ]


def lab_training(smoke: bool) -> list[Row]:
    """Steps of ``labo train`` beside those of the Hugging Face Trainer and of a plain loop."""
    size = training.SMOKE if smoke else training.FULL
    rows = []

    def seconds_per_step(turn: training.Turn) -> float:
        return turn(size.steps) / size.steps

    with training.language_model(size) as turns:
        times = race(turns, size.turns, seconds_per_step)
        work = f"lab, Llama, {size.tokens} tokens, V={size.vocabulary}"
        goal = 1 / 1.2
        pairs = [(ours, "Trainer CE", goal) for ours in ("labo train CE", "labo train LABO")]
        rows += _compare(work, times, [*pairs])
    with training.vision_transformer(size) as turns:
        times = race(turns, size.turns, seconds_per_step)
        work = f"lab, ViT-Lite, {size.images} images"
        rows += _compare(work, times, [("labo train LS", "plain loop LS", 1.02)])
    return rows


def reading_images(smoke: bool) -> list[Row]:
    """Processor time per image file; of tiny images nearly all of it is the interpreter's."""
    with images.contenders(smoke) as turns:
        times = race(turns, 1 if smoke else 5, images.seconds_per_image)
    times["2,500 images/s"] = images.SECONDS_OF_INTERPRETER
    pairs = [("labo", "DataLoader", 1.0), ("labo, 16 x 16 pixels", "2,500 images/s", 1.0)]
    return _compare("image files, processor time per image", times, pairs)


def translating(smoke: bool) -> list[Row]:
    """Training and decoding compared with other toolkits, each in its own process."""
    found = translation.take_turns(smoke)
    rows = []
    training, decoding = found["training"], found["decoding"]

    for rival, goal in (("Seq2SeqTrainer", 1 / 1.2), ("JoeyNMT", 1.0)):
        if rival in training:
            both = (training["labo"], training[rival])
            us, other_us = (1e6 / found["tokens_per_second"] for found in both)
            mib, other_mib = (found["peak"] / 2**20 for found in both)
            work = "translation, training"
            rows.append(Row(work, "labo", rival, us, other_us, "us/token", goal))
            work = "translation, peak memory"
            rows.append(Row(work, "labo", rival, mib, other_mib, "MiB", None))
    times = {name: 1e3 / found["sentences_per_second"] for name, found in decoding.items()}
    for rival in [name for name in times if name != "labo"]:
        given = (times["labo"], times[rival], "ms/sentence", None)
        rows.append(Row("translation, beam 5", "labo", rival, *given))
    return rows


def vocabulary_parallel(smoke: bool) -> list[Row]:
    """Two processes: columns split over them, beside rows split over them, per process."""
    size = parallel.SMOKE if smoke else parallel.FULL
    rows = []
    for work, times in parallel.measure(size).items():
        name = f"two processes, {work}, N={size.rows} V={size.classes}"
        rows += _compare(name, times, [(parallel.COLUMNS, parallel.ROWS, 1.15)])
    return rows


def against_vocabulary(smoke: bool) -> dict[str, bytes]:
    """Plots of time and of memory against V."""
    sizes = (64, 128) if smoke else (1024, 4096, 16384, 65536, 131072)
    names = ("torch LS", "naive LABO", "labo blocked", "labo native", "labo in place")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for v in sizes:
        work = contenders.logits_losses(8 if smoke else 512, v, compiled=False)
        for name, seconds in race({n: work[n] for n in names}, 1 if smoke else 5).items():
            times[name].append((v, 1e3 * seconds))
    weights = ("torch linear + LS", "torch linear_cross_entropy (CE)", "labo.linear_loss LABO")
    memory = {
        name: [
            (v, max(1.0, _extra_mib(extra_bytes, name, 16 if smoke else 2048, 64, v)))
            for v in sizes
        ]
        for name in weights
    }
    rows = 8 if smoke else 512
    return {
        "speed-time.svg": _plot(f"loss, {rows} rows: time", "ms", times),
        "speed-memory.svg": _plot("output layer + loss: extra memory", "MiB", memory),
    }


def _plot(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """An SVG file with a line per name, over the number of classes, both axes logarithmic."""
    from labo.lab.report.charts import Axis, Line, line_chart, sheet
    from labo.lab.report.palette import styles

    found = styles((name, 0) for name in lines)
    drawn = [Line(points, found[name, 0], name) for name, points in lines.items()]
    axes = Axis("classes V", log=True), Axis(unit, log=True)
    chart = line_chart("speed", title, "", *axes, drawn)
    return sheet([chart], [(line.style, line.series) for line in drawn])[".svg"]


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {
    "large": logits_large,
    "small": logits_small,
    "auto": automatic,
    "rowwise": rowwise,
    "rowwise-linear": linear_rowwise,
    "linear": linear_time,
    "distillation": distilling,
    "memory": linear_memory,
    "growth": linear_growth,
    "steps": training_steps,
    "parallel": vocabulary_parallel,
    "huggingface": language_model,
    "training": lab_training,
    "images": reading_images,
    "translation": translating,
}


def _table(rows: list[Row]) -> Table:
    table = Table(title="labo compared with alternatives (forward + backward, float32)")
    for column in ("work", "labo", "rival", "labo", "rival", "ratio", "target"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for row in rows:
        style = "" if row.goal is None else "green" if row.ratio <= row.goal else "red"
        table.add_row(row.work, row.ours, row.rival, *row.numbers, style=style)
    return table


def _markdown(rows: list[Row]) -> str:
    """The table for docs/performance.md."""
    lines = ["| work | labo | compared with | ratio | target |", "|---|---|---|---|---|"]
    for row in rows:
        ours, rival, *rest = row.numbers
        cells = (row.work, f"{row.ours}: {ours}", f"{row.rival}: {rival}", *rest)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _machine() -> dict[str, Any]:
    return {
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "labo": labo.__version__,
        "backends": labo.backends(),
    }


def _write(path: Path, rows: list[Row], seconds: dict[str, float]) -> None:
    """Called after every section, so that an interrupted run keeps what it has measured."""
    found = [asdict(row) | {"ratio": row.ratio} for row in rows]
    results = {"machine": _machine(), "seconds": seconds, "rows": found}
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(_markdown(rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="run everything once at tiny sizes")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="folder for results and plots")
    options = parser.parse_args(arguments)
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    console = Console()
    out, assets = options.out or HERE, options.out or ASSETS
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for number, name in enumerate(options.only, start=1):
        started = time.perf_counter()
        with console.status(f"running {name} ({number} of {len(options.only)}) ..."):
            rows += SECTIONS[name](options.smoke)
        seconds[name] = round(time.perf_counter() - started, 1)
        console.print(f"{name}: {seconds[name]:.0f} s")
        _write(out / "results.json", rows, seconds)
    console.print(_table(rows))
    if set(options.only) == set(SECTIONS):
        with console.status("running the plots ..."):
            for name, svg in against_vocabulary(options.smoke).items():
                (assets / name).write_bytes(svg)
    console.print(f"wrote {out / 'results.json'}")


if __name__ == "__main__":
    main()
