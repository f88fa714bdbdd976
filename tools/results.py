"""The raw results of the studies, and the tables and figures that are made of them.

    python tools/results.py --add runs/compare-digits --as digits    # add or update rows
    python tools/results.py --decode RUNS --as multi30k --split valid --penalties 0.5,1,2
    python tools/results.py                                          # make results

``results/NAME.csv`` has one row per run. ``--add`` takes the folder of a comparison, or any folder
of run directories, and adds its runs that are scored on the test split, with their calibration.
With ``--selection`` it adds all finished runs to ``results/NAME-selection.csv``, with their
validation scores. Runs in ``results/NAME-cost.csv`` are those that the times of the table of NAME
are taken from. Runs of translation that were analysed have BLEU and the probabilities of the chosen
tokens by word frequency in ``results/NAME-frequency.csv``. ``--decode`` translates a split with
finished runs again, with other length penalties or beams, and adds the scores to
``results/NAME-decoding.csv``; what is there already is not decoded again.

Each of them, and the command without arguments, rebuilds everything between markers in README.md,
docs/results.md and docs/why.md::

    <!-- results: table NAME -->   ...   <!-- /results -->

``answer`` is a sentence per study, ``summary`` a row per study, ``differences`` a picture of all of
them, ``table`` the methods of one with their differences to LS, ``among`` some of its methods at
their best settings with their differences to the first one, ``verdict`` these in a line each,
``settings`` what was selected for each method, ``selection`` the validation scores of a grid,
``decoding`` the scores by length penalty and beam, ``tuned`` those at what validation selects from
them. ``frequency`` and ``confidence`` are Table 4 and Figure 2 of the paper with the numbers of a
study, and ``histogram`` is the picture. ``curves``, ``rates`` and ``budget`` show what
``tools/label_weight.py`` has measured: a picture of the training, and tables of learning rates and
of budgets. Differences, intervals and p-values are those of :mod:`labo.lab.analysis.groups`. A test
compares the pages with :func:`page`. Rebuilding needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from labo.lab.analysis.groups import Difference, Member, Variant, mean_cell
from labo.lab.analysis.reading import Run, State, find_teacher, read_conditions, read_run
from labo.lab.analysis.run import load_analysis
from labo.lab.analysis.significance import paired_difference
from labo.lab.analysis.task import find_analysis
from labo.lab.config import flat
from labo.lab.errors import LabError
from labo.lab.report import palette
from labo.lab.report.charts import Axis, Line, line_chart, sheet
from labo.lab.report.gather import ReportGroup, make_groups
from labo.lab.report.summary import difference_chart, p_text
from labo.lab.report.task import find_report
from labo.lab.reproduce import paper
from labo.lab.tables import Cell, Column, Row, best_rows, filled, shown_cell
from labo.lab.translation.report import histogram_figure

ROOT = Path(__file__).parents[1]
RESULTS, ASSETS = ROOT / "results", ROOT / "docs" / "assets"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "why.md")
SEEDS, LEVEL = 5, 0.01  # a gain has at least so many seeds and a smaller p-value

# What the studies are called on the pages.
TITLES = {
    "fashion-mnist-5k": "Fashion-MNIST, 5,000 images",
    "fashion-mnist-5k-adamw": "Fashion-MNIST with AdamW",
    "fashion-mnist-5k-large-batch": "Fashion-MNIST with batches of 1,000",
    "cifar100-10k": "CIFAR-100, 100 images per class",
    "cifar-fast": "CIFAR-10 (JPEG copies), ten epochs",
    "tatoeba": "Tatoeba German-English",
    "multi30k": "Multi30k English-German",
}

# The columns of a CSV file; between the two parts are the scores: valid_NAME and test_NAME, and
# analysis_NAME from the records of the test split.
ABOUT = ("recipe", "task", "data", "model", "method", "hyper", "settings", "seed")
COSTS = ("steps", "seen", "seconds", "peak_memory", "device", "conditions")
VERSIONS = ("torch", "commit", "signature")
DECODING = ("split", "length_penalty", "beam")
BY_FREQUENCY = ("split", "part", "sentences")
_DECODED = ("bleu", "chrf", "tokenized_bleu", "length_ratio")

Record = dict[str, str]


# ------------------------------------------------------------------ adding runs


def add(folder: Path, name: str, *, selection: bool = False, recipe: str | None = None) -> str:
    """Add the runs in a folder to a CSV file; a run that is there already is replaced.

    Args:
        folder: it holds run directories.
        name: of the study.
        selection: add the finished runs with the seeds that select to ``NAME-selection.csv``, not
            those with test scores to ``NAME.csv``.
        recipe: the recipe they are compared with for their ``settings``; by default ``name``.

    Returns:
        What was done, in a sentence.
    """
    from labo.lab.recipes import load_recipe  # the only part that needs torch

    plain = load_recipe(recipe or name).as_document()
    file = RESULTS / f"{name}{'-selection' if selection else ''}.csv"
    runs, finished = _runs(folder)
    rows = [_record(run, recipe or name, plain, runs) for run in finished]
    if selection:
        rows = [
            {key: value for key, value in row.items() if not key.startswith("test_")}
            for row in _selecting(rows)
        ]
    else:
        rows = [
            row | _calibration(run)
            for row, run in zip(rows, finished, strict=True)
            if "test" in (run.results or {})
        ]
    _write(file, _known(file) | {_key(row): row for row in rows})
    if not selection:
        parts = [part for row, run in zip(rows, finished, strict=True) for part in _parts(row, run)]
        if parts:
            by_frequency = RESULTS / f"{name}-frequency.csv"
            _write(by_frequency, _known(by_frequency) | {_key(part): part for part in parts})
    return f"{file.relative_to(ROOT)}: {len(rows)} of {len(runs)} runs in {folder} added"


def _runs(folder: Path) -> tuple[list[Run], list[Run]]:
    """The runs in a folder: all, and those that are finished."""
    runs = [read_run(path.parent) for path in sorted(folder.rglob("recipe.yaml"))]
    return runs, [run for run in runs if run.results is not None]


def _known(file: Path) -> dict[Any, Record]:
    """The rows of a CSV file by their keys; none if it is missing."""
    return {_key(record): record for record in read(file)} if file.is_file() else {}


def _selecting(records: Sequence[Record]) -> list[Record]:
    """Without the runs that followed at a selected point: another point has no run of their seed.

    If a method has one point, all its runs stay.
    """
    kept = []
    for points in _points(records).values():
        seeds = [{record["seed"] for record in runs} for _, runs in points]
        for number, (_, runs) in enumerate(points):
            others = set().union(*seeds[:number], *seeds[number + 1 :])
            kept += [r for r in runs if len(points) == 1 or r["seed"] in others]
    return kept


def decode(
    folder: Path, name: str, splits: Sequence[str], penalties: Sequence[float], beams: Sequence[int]
) -> str:
    """Decode splits with the finished runs in a folder, for ``results/NAME-decoding.csv``.

    Args:
        folder: it holds run directories.
        name: of the study, and its recipe.
        splits: "valid", "test".
        penalties: length penalties, each with the beam of the recipe.
        beams: each with the length penalty of the recipe.

    Returns:
        What was done, in a sentence.
    """
    from labo.lab.recipes import load_recipe, recipe_of
    from labo.lab.run.directory import RunDirectory
    from labo.lab.run.distributed import make_accelerator
    from labo.lab.tasks import find_task, load_model

    plain = load_recipe(name).as_document()
    file = RESULTS / f"{name}-decoding.csv"
    records, made = _known(file), 0
    runs, finished = _runs(folder)
    for run, split in itertools.product(finished, splits):
        directory = RunDirectory(run.path)
        recipe: Any = recipe_of(directory)  # of translation
        usual = recipe.decode
        points = [usual.changed({"length_penalty": penalty}) for penalty in penalties]
        points += [usual.with_beam(beam) for beam in beams]
        about = _record(run, name, plain, runs)
        about = {key: value for key, value in about.items() if key in (*ABOUT, *VERSIONS)}
        for point in points:
            record = {**about, "split": split, "beam": str(point.beam)}
            record["length_penalty"] = str(point.length_penalty)
            if _key(record) in records:
                continue
            task = find_task(recipe.task)(recipe.model_copy(update={"decode": point}))
            directory.check_data(task.fingerprint)
            evaluation = task.evaluate(load_model(directory), split, make_accelerator("no"))
            lines = list(evaluation.records)
            words = [
                sum(len(line[side].split()) for line in lines)
                for side in ("hypothesis", "reference")
            ]
            scores = {key: evaluation.metrics[key] for key in _DECODED if key in evaluation.metrics}
            scores["word_ratio"] = words[0] / words[1]
            records[_key(record)] = record | {key: str(value) for key, value in scores.items()}
            _write(file, records)  # each: decoding takes long, and the same command continues it
            made += 1
    return f"{file.relative_to(ROOT)}: {made} rows of {len(finished)} runs in {folder} added"


def _write(file: Path, records: Mapping[Any, Record]) -> None:
    RESULTS.mkdir(exist_ok=True)
    file.write_text(_as_csv(sorted(records.values(), key=_key)), encoding="utf-8")


def read(file: Path) -> list[Record]:
    """The rows of a CSV file; empty cells are left out."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            {key: value for key, value in row.items() if value != ""}
            for row in csv.DictReader(lines)
        ]


def _key(record: Record) -> tuple[Any, ...]:
    names = ("recipe", "method", "hyper", "settings")
    decoded = [float(record.get(name, 0)) for name in ("length_penalty", "beam")]
    run = (*(record.get(name, "") for name in names), int(record["seed"]))
    return (*run, record.get("split", ""), record.get("part", ""), *decoded)


def _as_csv(records: Sequence[Record]) -> str:
    names = {key for record in records for key in record}
    further = next((keys for keys in (DECODING, BY_FREQUENCY) if names >= {*keys}), ())
    known = {*ABOUT, *further, *COSTS, *VERSIONS}
    scores = sorted(names - known, key=lambda key: (key.split("_")[0] == "test", key))
    costs = () if further else COSTS
    text = io.StringIO()
    columns = [*ABOUT, *further, *scores, *costs, *VERSIONS]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(run: Run, recipe: str, plain: Mapping[str, Any], runs: Sequence[Run]) -> Record:
    results: Mapping[str, Any] = run.results or {}
    signature = dict(part.split(":", 1) for part in results["signature"].split("|") if ":" in part)
    method = run.method
    if method.get("teacher"):  # a path; what counts is the method
        teacher = find_teacher(run, runs)
        method["teacher"] = "unknown" if teacher is None else teacher.method["name"]
    train, model = run.recipe.get("train", {}), run.recipe.get("model", {})
    batch = train.get("batch_size") or train.get("batch_tokens") or train.get("batch_documents")
    values: dict[str, Any] = {
        "recipe": Path(recipe).stem,
        "task": run.task,
        "data": signature.get("data"),
        "model": model.get("name") or model.get("preset"),
        "method": method.pop("name"),
        "hyper": _pairs(method),
        "settings": _pairs(_changed(run, plain)),
        "seed": run.seed,
        **{
            f"{split}_{name}": value
            for split in ("valid", "test")
            for name, value in results.get(split, {}).items()
        },
        "steps": results["steps"],
        "seen": batch * results["steps"] if batch else None,
        "seconds": results["seconds"],
        "peak_memory": results.get("peak_memory"),
        "device": "; ".join(results.get("devices", [])),
        "conditions": "; ".join(_pairs(entry) for entry in read_conditions(run.path)),
        "torch": signature.get("torch"),
        "commit": signature.get("git"),
        "signature": results["signature"],
    }
    return {key: str(value) for key, value in values.items() if value not in (None, "")}


def _calibration(run: Run) -> Record:
    """Calibration errors of the test split, if the run has records of it."""
    split = load_analysis(run.path)["splits"].get("test")
    if split is None:
        return {}
    before, after = (split["views"].get(way) for way in find_report(run.task).views)
    values = {
        "ece": before and before["ece"],
        "ece_after": after and after["ece"],
        "aurc": before and (before.get("selective") or {}).get("aurc"),
        "aurc_normalised": (split.get("logit_norm") or {}).get("aurc"),
        "temperature": split["temperature"],
    }
    return {f"analysis_{name}": str(value) for name, value in values.items() if value is not None}


def _parts(row: Record, run: Run) -> Iterator[Record]:
    """BLEU and the probabilities of the chosen tokens by word frequency, of runs that have them."""
    about = {key: value for key, value in row.items() if key in (*ABOUT, *VERSIONS)}
    for split, analysed in load_analysis(run.path)["splits"].items():
        confidence = analysed.get("confidence", {})
        for part, found in analysed.get("frequency", {}).items():
            values = {
                "split": split,
                "part": part,
                "sentences": found["examples"],
                "bleu": found["bleu"],
                "mean": confidence["mean"][part],
                "peak": confidence["peak"][part],
                "shares": json.dumps(confidence["shares"][part]),
            }
            yield about | {key: str(value) for key, value in values.items()}


def _changed(run: Run, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in which a run differs from its recipe, besides method, seed and location."""
    ignored = {"task", "seed", "method", *find_analysis(run.task).locations}
    recipe = {key: value for key, value in run.recipe.items() if key not in ignored}
    usual = flat(plain)
    return {
        key: value
        for key, value in flat(recipe).items()
        if key not in ignored and usual.get(key) != value
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """``{"a": 1, "b": [2]}`` as ``a=1 b=[2]``."""
    return " ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in values.items())


# ------------------------------------------------------------------ reading them back


def study(name: str) -> ReportGroup:
    """The rows of ``results/NAME.csv`` as a group of runs."""
    members = [_member(record) for record in read(RESULTS / f"{name}.csv")]
    groups = make_groups(members)
    if len(groups) != 1:
        titles = ", ".join(group.title for group in groups)
        raise SystemExit(f"results/{name}.csv has runs of different data or models: {titles}")
    return groups[0]


def _member(record: Record) -> Member:
    """A run as it is known from its row. An option that is off may be newer than other rows."""
    recipe: dict[str, Any] = {
        "task": record["task"],
        "seed": int(record["seed"]),
        "method": {"name": record["method"], **_set(_values(record.get("hyper", "")))},
        "data": {"name": record["data"].split("@")[0]},
        "model": {"name": record.get("model")},
    }
    for key, value in _values(record.get("settings", "")).items():
        *sections, last = key.split(".")
        place = recipe
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    if (teacher := recipe["method"].pop("teacher", None)) is not None:
        recipe["teacher"] = teacher  # its method; a path in method.teacher would be looked up
    results: dict[str, Any] = {"signature": record["signature"], "steps": int(record["steps"])}
    results["seconds"] = float(record["seconds"])
    results["devices"] = record["device"].split("; ") if "device" in record else []
    for key, value in record.items():
        split, _, metric = key.partition("_")
        if split in ("valid", "test"):
            results.setdefault(split, {})[metric] = float(value)
    label = " ".join(record.get(key, "") for key in ("method", "hyper", "settings")).strip()
    name = f"{label[:100]} s{record['seed']}"  # its records are looked for: no longer than a file's
    run = Run(Path(name), State("finished"), recipe, results=results)
    return Member(run, _analysis(record))


def _analysis(record: Record) -> dict[str, Any]:
    """The part of the analysis that the row has."""
    if "analysis_ece" not in record:
        return {}
    first, second = find_report(record["task"]).views
    views = {first: {"ece": float(record["analysis_ece"])}}
    for name in ("aurc", "aurc_normalised"):
        if f"analysis_{name}" in record:
            views[first][name] = float(record[f"analysis_{name}"])
    if "analysis_ece_after" in record:
        views[second] = {"ece": float(record["analysis_ece_after"])}
    return {"splits": {"test": {"fingerprint": record["data"], "views": views}}}


def _values(text: str) -> dict[str, Any]:
    pairs = (part.partition("=") for part in re.split(r" (?=[\w.]+=)", text) if part)
    return {key: yaml.safe_load(value) for key, _, value in pairs}


# ------------------------------------------------------------------ the parts of the page


def answer(*names: str) -> str:
    """A sentence for each study: LABO, and the best method, compared with LS."""
    sentences = []
    for name in names:
        group, ours, reference = _question(name)
        text = f"- **{_title(name)}**: {_compared(group, ours, reference)}"
        best = _best(group, ours)
        if best not in (ours, reference):
            text += f"; best: {_compared(group, best, reference)}"
        text = textwrap.fill(f"{text}.", 100, subsequent_indent="  ", break_on_hyphens=False)
        sentences.append(f"{text}\n")
    return "".join(sentences)


def summary(*names: str) -> str:
    """A row for each study: cross entropy, LS, LABO and the best method."""
    head = ["data", "score", "seeds", "cross entropy", "label smoothing", "LABO", "Δ LS", "p"]
    rows = []
    for name in names:
        group, ours, reference = _question(name)
        difference, headline = _difference(ours, reference), group.kind.headline
        base, best = group.first("base"), _best(group, ours)
        p = None if difference is None else difference.p
        row = [_title(name), headline.heading, str(len(ours.scores("test")))]
        row += [_score(v, headline) if v else "-" for v in (base, reference, ours)]
        row.append("-" if difference is None else _signed(headline, difference.mean))
        row.append("-" if p is None else f"{p:.3f}")
        rows.append([*row, f"`{best.name}` {_score(best, headline)}"])
    return _markdown([*head, "best method"], rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _question(name: str) -> tuple[ReportGroup, Variant, Variant]:
    """One variant of each method of a study, and of these LABO and LS."""
    (group,) = make_groups(_members(selected(study(name))))
    ours, reference = group.first("labo"), group.first("ls")
    if ours is None or reference is None:
        raise SystemExit(f"results/{name}.csv has no runs of labo and ls")
    return group, ours, reference


def _best(group: ReportGroup, ours: Variant) -> Variant:
    """The best of the methods that have enough seeds, or as many as ours."""
    enough = min(SEEDS, len(ours.members))
    return next(v for v in _ranked(group) if len(v.runs) >= enough)


def _score(variant: Variant, headline: Column) -> str:
    return shown_cell(headline, variant.cell(_test(headline.key)))


def _title(name: str) -> str:
    return TITLES.get(name, name)


def selected(group: ReportGroup) -> list[Variant]:
    """One variant of each method: the best one on the validation split."""
    best: dict[str, Variant] = {}
    for variant in group.variants:
        known = best.setdefault(variant.name, variant)
        if _sign(group) * (_mean(variant, "valid") - _mean(known, "valid")) > 0:
            best[variant.name] = variant
    return list(best.values())


def _members(variants: Iterable[Variant]) -> list[Member]:
    return [member for variant in variants for member in variant.members.values()]


def _compared(group: ReportGroup, variant: Variant, reference: Variant) -> str:
    difference = _difference(variant, reference)
    if difference is None:
        raise SystemExit(f"{variant.label} and {reference.label} have no seed in common")
    headline = group.kind.headline
    unit = "points" if headline.heading.endswith("%") else headline.heading
    about = (
        "" if difference.p is None else f" ({p_text(difference.p)}, {len(difference.seeds)} seeds)"
    )
    number = _signed(headline, difference.mean)
    return f"`{variant.name}` {number} {unit}{about}, {_judged(group, difference)}"


def _signed(headline: Column, difference: float) -> str:
    return replace(headline, signed=True).shown(difference).replace("-", "−")


def _mean(variant: Variant, split: str) -> float:
    return mean_cell(variant.scores(split).values()).value or 0.0


def _judged(group: ReportGroup, difference: Difference) -> str:
    seeds = len(difference.seeds)
    if difference.p is not None and seeds >= SEEDS and difference.p < LEVEL:
        return "a gain" if _sign(group) * difference.mean > 0 else "a loss"
    if difference.smallest_p is None or difference.smallest_p >= LEVEL:
        return "too few seeds for a statement"
    return "no difference shown"


def _sign(group: ReportGroup) -> int:
    return group.kind.headline.better


def table(name: str) -> str:
    """The methods of a study, best first."""
    return _methods(name, study(name))


def among(name: str, reference: str, *methods: str) -> str:
    """Some methods of a study at their best settings, compared with one of them and with LS."""
    group = _chosen(name, reference, *methods)
    return _methods(name, group, group.first(reference))


def verdict(name: str, reference: str, *methods: str) -> str:
    """A line for each method: how it compares with the reference."""
    group = _chosen(name, reference, *methods)
    ours = group.first(reference)
    if ours is None:
        raise SystemExit(f"results/{name}.csv has no runs of {reference}")
    variants = {method: group.first(method) for method in methods}
    return "".join(
        f"- {_compared(group, variant, ours)}.\n" if variant else f"- `{method}`: no runs yet.\n"
        for method, variant in variants.items()
    )


def _chosen(name: str, *methods: str) -> ReportGroup:
    (group,) = make_groups(_members(v for v in selected(study(name)) if v.name in methods))
    return group


def _methods(name: str, group: ReportGroup, reference: Variant | None = None) -> str:
    """A row for each variant of a group; with its differences to one more than LS if asked for."""
    headline = group.kind.headline
    analysed = [
        Column("ece_after", "ECE after T %", scale=100, better=-1),
        Column("aurc", "AURC %", scale=100, better=-1),
    ]
    newer = Column("aurc_normalised", "AURC, normalised logits %", scale=100, better=-1)
    before, after = find_report(group.task).views
    times = _times(name)
    rows = []
    for variant in _ranked(group):
        cells = {
            column.key: variant.cell(_test(column.key)) for column in (headline, *group.kind.scores)
        }
        cells["seeds"] = Cell(len(variant.scores("test")))
        cells |= group.difference_cells(variant)
        if reference is not None:
            difference = _difference(variant, reference)
            cells |= {"delta": difference.cell, "p": Cell(difference.p)} if difference else {}
        cells["ece_after"] = variant.cell(_analysed(after, "ece"))
        for key in ("aurc", "aurc_normalised"):
            cells[key] = variant.cell(_analysed(before, key))
        cells["time"] = Cell(times.get(variant.name))
        rows.append(Row(variant.label, cells))
    columns = [Column("seeds", "seeds", digits=0), headline]
    every = group.difference_columns()
    if reference is not None:
        signed = replace(headline, heading=f"Δ {reference.name}", signed=True, better=0)
        columns += [replace(signed, key="delta"), Column("p", "p", digits=3)]
    columns += [column for column in every if column.key.endswith("_ls")] or every
    if all(row.cells[newer.key].value is not None for row in rows):  # older runs lack it
        analysed.append(newer)
    columns += [*group.kind.scores, *analysed, Column("time", "time", suffix="×")]
    shown = filled(columns, rows)
    return _markdown(["method", *(c.heading for c in shown)], _texts(shown, rows))


def _texts(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[list[str]]:
    """The cells of each row, the best numbers bold."""
    best = {column.key: best_rows(column, rows) for column in columns}
    for index, row in enumerate(rows):
        texts = [f"`{row.label}`"]
        for column in columns:
            text = shown_cell(column, row.cell(column.key))
            texts.append(f"**{text}**" if index in best[column.key] else text)
        yield texts


def _difference(variant: Variant, reference: Variant) -> Difference | None:
    ours, theirs = variant.scores("test"), reference.scores("test")
    seeds = [seed for seed in ours if seed in theirs]
    if variant is reference or not seeds:
        return None
    numbers = paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return Difference(variant.label, reference.label, reference.name, seeds, **numbers)


def _times(name: str) -> dict[str, float]:
    """Method -> seconds per step relative to base, of runs that were made to measure them."""
    if not (RESULTS / f"{name}-cost.csv").is_file():
        return {}
    group = study(f"{name}-cost")
    means = {v.name: mean_cell(group.step_times(v)).value for v in group.variants}
    return {method: value for method, value in means.items() if value is not None}


def _test(metric: str) -> Any:
    return lambda member: member.metric("test", metric)


def _analysed(view: str, name: str) -> Any:
    """A number of the analysis of the test split, before or after the temperature."""

    def value(member: Member) -> float | None:
        number: float | None = member.view("test", view).get(name)
        return number

    return value


def _ranked(group: ReportGroup) -> list[Variant]:
    scored = [variant for variant in group.variants if variant.scores("test")]
    return sorted(scored, key=lambda variant: -_sign(group) * _mean(variant, "test"))


def settings(name: str) -> str:
    """What was set for each method: its hyper-parameters, and changes of the recipe."""
    rows = []
    for method, points in _points(read(RESULTS / f"{name}.csv")).items():
        shown = "; ".join(f"`{_pairs(_set(point))}`" if point else "none" for point, _ in points)
        rows.append([f"`{method}`", shown])
    return _markdown(["method", "hyper-parameters and changes of the recipe"], rows)


def _set(point: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is off."""
    return {key: value for key, value in point.items() if value not in (None, False)}


def _points(records: Sequence[Record]) -> dict[str, list[tuple[dict[str, Any], list[Record]]]]:
    """Method -> its settings, each with its runs."""
    methods: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        text = " ".join(record[key] for key in ("hyper", "settings") if key in record)
        methods.setdefault(record["method"], {}).setdefault(text, []).append(record)
    return {
        method: [(_values(text), runs) for text, runs in points.items()]
        for method, points in methods.items()
    }


def drawn_differences(*names: str) -> str:
    """An SVG file: the differences to LS, a chart for each study.

    One variant of each method that has enough seeds, in the same colour in all charts.
    """
    shown = [v for name in names for v in selected(study(name)) if len(v.runs) >= SEEDS]
    groups = make_groups(_members(shown))
    panels = [
        difference_chart(replace(group, title=_title(name)), name, titled=True)
        for name, group in zip(names, groups, strict=True)
    ]
    return _svg(sheet([panel for panel in panels if panel is not None], columns=2))


def selection(name: str) -> str:
    """The validation score of every point of a grid, the best of each method in bold."""
    records = read(RESULTS / f"{name}-selection.csv")
    kind = find_analysis(records[0]["task"])
    column, sign = kind.headline, kind.headline.better
    rows = []
    for method, points in _points(records).items():
        values: dict[str, set[str]] = {}  # of each key; older rows may lack a newer option
        for key, value in (pair for point, _ in points for pair in point.items()):
            values.setdefault(key, set()).add(str(value))
        means = [
            sum(float(record[f"valid_{column.key}"]) for record in runs) / len(runs)
            for _, runs in points
        ]
        best = max(means, key=lambda mean: sign * mean)
        for (point, runs), mean in zip(points, means, strict=True):
            text = _pairs({k: point[k] for k in values if k in point and len(values[k]) > 1})
            shown = f"**{column.shown(mean)}**" if mean == best else column.shown(mean)
            rows.append([f"`{method}`", f"`{text}`" if text else "", str(len(runs)), shown])
    return _markdown(["method", "setting", "runs", f"validation {column.heading}"], rows)


def _decoded(name: str) -> dict[tuple[str, str], dict[tuple[str, str], list[Record]]]:
    """(split, method) -> (length penalty, beam) -> the rows of ``results/NAME-decoding.csv``."""
    points: dict[tuple[str, str], dict[tuple[str, str], list[Record]]] = {}
    for record in read(RESULTS / f"{name}-decoding.csv"):
        block = points.setdefault((record["split"], record["method"]), {})
        block.setdefault((record["length_penalty"], record["beam"]), []).append(record)
    return points


def decoding(name: str) -> str:
    """Means over seeds by split, length penalty and beam; the best BLEU of each method is bold."""
    head = ["split", "method", "length penalty", "beam", "seeds", "BLEU", "chrF", "length ratio"]
    rows = []
    for (split, method), block in _decoded(name).items():
        best = max(_mean_of(records, "bleu")[0] for records in block.values())
        for (penalty, beam), records in block.items():
            bleu, chrf, length, words = (
                _mean_of(records, key)[0] for key in ("bleu", "chrf", "length_ratio", "word_ratio")
            )
            row = [split, f"`{method}`", f"{float(penalty):g}", beam, str(len(records))]
            row.append(f"**{bleu:.2f}**" if bleu == best else f"{bleu:.2f}")
            rows.append([*row, f"{chrf:.2f}", f"{length:.3f}", f"{words:.3f}"])
    return _markdown([*head, "in words"], rows)


def tuned(name: str) -> str:
    """Each method on the test split, decoded as the validation split selects for it."""
    points, rows = _decoded(name), []
    scores: dict[str, dict[int, float]] = {}
    for method in sorted({method for _, method in points}, key="ls".__ne__):  # ls first
        valid, test = points["valid", method], points["test", method]
        penalty, beam = max(valid, key=lambda point: _mean_of(valid[point], "bleu")[0])
        records = test[penalty, beam]
        scores[method] = {int(record["seed"]): float(record["bleu"]) for record in records}
        theirs = scores.get("ls", {})
        paired = [ours - theirs[seed] for seed, ours in scores[method].items() if seed in theirs]
        difference = _spread(paired, "+") if paired and method != "ls" else "-"
        row = [f"`{method}`", f"{float(penalty):g}", beam, str(len(records))]
        rows.append([*row, _spread(scores[method].values()), difference])
    return _markdown(["method", "length penalty", "beam", "seeds", "test BLEU", "Δ ls"], rows)


# ------------------------------------------------------------------ by word frequency


def frequency(name: str) -> str:
    """BLEU by word frequency, as in Table 4 of the paper, whose numbers are in brackets."""
    found, rows = _by_frequency(name, "bleu"), []
    for split, printed in paper.FREQUENCY.items():
        ours = {method: found[split, method] for method in printed}
        for method, theirs in printed.items():
            cells = zip(paper.FREQUENCY_COLUMNS, theirs, strict=True)
            shown = [f"{_spread(ours[method][part].values())} ({number})" for part, number in cells]
            rows.append([split, f"`{method}`", *shown])
        shown = []
        for i, part in enumerate(paper.FREQUENCY_COLUMNS):
            labo, ls = ours["labo"][part], ours["ls"][part]
            paired = [labo[seed] - ls[seed] for seed in labo if seed in ls]
            expected = printed["labo"][i] - printed["ls"][i]
            shown.append(f"{_spread(paired, '+')} ({expected:+.1f})")
        rows.append([split, "Δ", *shown])
    return _markdown(["split", "method", *paper.FREQUENCY_COLUMNS], rows)


def confidence(name: str) -> str:
    """Peak and mean of the probabilities that beam search chose, by word frequency."""
    peaks, means = (_by_frequency(name, key) for key in ("peak", "mean"))
    parts, rows = paper.FREQUENCY_COLUMNS, []
    for method, theirs in paper.PEAKS.items():
        shown = [_spread(peaks["test", method][part].values(), digits=3) for part in parts]
        shown += [_spread(means["test", method][part].values(), digits=3) for part in parts]
        rows.append([f"`{method}`", f"{theirs}", *shown])
    heads = [f"{what}, {part}" for what in ("peak", "mean") for part in parts]
    return _markdown(["method", "the paper's peak", *heads], rows)


def _by_frequency(name: str, key: str) -> Mapping[tuple[str, str], dict[str, dict[int, float]]]:
    """(split, method) -> part -> seed -> a number of ``results/NAME-frequency.csv``."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for record in read(RESULTS / f"{name}-frequency.csv"):
        parts = found.setdefault((record["split"], record["method"]), {})
        parts.setdefault(record["part"], {})[int(record["seed"])] = float(record[key])
    return found


def _spread(values: Iterable[float], sign: str = "", digits: int = 2) -> str:
    """Mean and standard deviation."""
    cell = mean_cell(values)
    spread = "" if cell.spread is None else f" ± {cell.spread:.{digits}f}"
    return f"{cell.value:{sign}.{digits}f}{spread}"


def drawn_histogram(name: str) -> str:
    """An SVG file: the probabilities that beam search chose on the test split."""
    known: dict[tuple[str, int], dict[str, list[float]]] = {}
    for record in read(RESULTS / f"{name}-frequency.csv"):
        if record["split"] == "test":
            run = known.setdefault((record["method"], int(record["seed"])), {})
            run[record["part"]] = json.loads(record["shares"])
    members = []
    for member in study(name).members:
        method, seed = member.run.method["name"], member.run.seed
        if method in paper.PEAKS and (method, seed) in known:
            split = {**member.split("test"), "confidence": {"shares": known[method, seed]}}
            members.append(Member(member.run, {"splits": {"test": split}}))
    (group,) = make_groups(members)
    (figure,) = histogram_figure(group, name)
    return _svg(sheet(figure.panels, figure.legend))


# ------------------------------------------------------------------ why: the label weight


def drawn_curves(name: str) -> str:
    """An SVG file: label weight, gradient norm and accuracy during training."""
    seeds: dict[str, dict[int, list[Record]]] = {}
    for record in read(RESULTS / f"{name}.csv"):
        label = f"{record['method']}, lr {record['lr']}"
        seeds.setdefault(label, {}).setdefault(int(record["epoch"]), []).append(record)
    methods = [label.split()[0].rstrip(",") for label in seeds]
    keys = [(method, methods[:i].count(method)) for i, method in enumerate(methods)]
    by_key = palette.styles(keys)
    styles = {label: by_key[key] for label, key in zip(seeds, keys, strict=True)}

    def panel(part: str, title: str, x: str, y: str, scale: float = 1.0) -> Any:
        lines = []
        for label, epochs in seeds.items():
            points = [(_mean_of(r, x)[0], scale * _mean_of(r, y)[0]) for r in epochs.values()]
            above = [point for point in points if point[1] >= axes[y].low]
            lines.append(Line(above, styles[label], label))
        return line_chart(f"{name}-{part}", title, "", axes[x], axes[y], lines)

    axes: dict[str, Any] = {
        "epoch": Axis("epoch"),
        "integral": Axis("sum over the steps of learning rate x label weight"),
        "label_weight": Axis("mean of 1 - alpha", low=0),
        "gradient_norm": Axis("mean norm of the gradient", low=0),
        "valid_accuracy": Axis("validation accuracy, %", low=80),
    }
    panels = [
        panel("weight", "Label weight", "epoch", "label_weight"),
        panel("norm", "Gradient norm", "epoch", "gradient_norm"),
        panel("epoch", "Accuracy by epoch", "epoch", "valid_accuracy", 100),
        panel("sum", "Accuracy by label weight", "integral", "valid_accuracy", 100),
    ]
    return _svg(sheet(panels, [(style, label) for label, style in styles.items()], columns=2))


def _svg(files: Mapping[str, bytes]) -> str:
    return files[".svg"].decode()


def _mean_of(records: Sequence[Record], key: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    values = [float(record[key]) for record in records]
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


_Setting = tuple[str, str, str]  # method, epochs, learning rate
_FAILED = 0.5  # a run whose accuracy is below this has diverged


def _without_warmup(name: str) -> dict[_Setting, list[Record]]:
    """The runs without a warm-up, one per seed."""
    runs: dict[_Setting, list[Record]] = {}
    for record in read(RESULTS / f"{name}.csv"):
        if record["warmup"] == "0":
            key = (record["method"], record["epochs"], record["lr"])
            runs.setdefault(key, []).append(record)
    return runs


def rates(name: str) -> str:
    """Test accuracy of every learning rate, for the largest budget."""
    runs = _without_warmup(name)
    most = max((epochs for _, epochs, _ in runs), key=int)
    cells = {(method, lr): seeds for (method, epochs, lr), seeds in runs.items() if epochs == most}
    return _grid(f"{most} epochs", _methods_of(name), cells)


def budget(name: str) -> str:
    """Test accuracy of every budget, at the learning rate that validation accuracy selects."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for (method, epochs, _), seeds in _without_warmup(name).items():
        known = cells.setdefault((method, epochs), seeds)
        if _mean_of(seeds, "valid_accuracy")[0] > _mean_of(known, "valid_accuracy")[0]:
            cells[method, epochs] = seeds
    return _grid("epochs", _methods_of(name), cells, with_rate=True)


def _methods_of(name: str) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in read(RESULTS / f"{name}.csv")))


def _grid(
    corner: str,
    methods: Sequence[str],
    cells: Mapping[tuple[str, str], list[Record]],
    *,
    with_rate: bool = False,
) -> str:
    """A row per method, a column per number; the best cell of each column is bold."""
    columns = sorted({column for _, column in cells}, key=float)
    means = {key: _mean_of(records, "test_accuracy") for key, records in cells.items()}

    def text(method: str, column: str) -> str:
        if (method, column) not in cells:
            return ""
        runs, (value, spread) = cells[method, column], means[method, column]
        shown = f"{100 * value:.2f} ± {100 * spread:.2f}"
        if any(float(run["test_accuracy"]) < _FAILED for run in runs):
            shown = "diverges"
        elif value == max(means[key][0] for key in means if key[1] == column):
            shown = f"**{shown}**"
        return shown + (f" (lr {runs[0]['lr']})" if with_rate else "")

    rows = [[f"`{method}`", *(text(method, column) for column in columns)] for method in methods]
    return _markdown([corner, *columns], rows)


# Text, and pictures with their descriptions: the file of PART is docs/assets/results-PART.svg.
PARTS: dict[str, Callable[..., str]] = {
    "answer": answer,
    "summary": summary,
    "table": table,
    "settings": settings,
    "selection": selection,
    "among": among,
    "verdict": verdict,
    "decoding": decoding,
    "tuned": tuned,
    "frequency": frequency,
    "confidence": confidence,
    "rates": rates,
    "budget": budget,
}
PICTURES: dict[str, tuple[Callable[..., str], str]] = {
    "differences": (drawn_differences, "Difference of each method to label smoothing"),
    "curves": (drawn_curves, "Label weight, gradient norm, accuracy"),
    "histogram": (drawn_histogram, "Probabilities of the chosen tokens by word frequency"),
}
_BLOCK = re.compile(r"(<!-- results: (\w+) (.+?) -->\n).*?(<!-- /results -->)", re.DOTALL)


def page(text: str) -> str:
    """A page with everything between its markers made again from the CSV files."""

    def rebuilt(match: re.Match[str]) -> str:
        start, part, names, end = match.groups()
        if part in PICTURES:
            return f"{start}![{PICTURES[part][1]}](assets/{_picture(part).name})\n{end}"
        if part in PARTS:
            try:
                return f"{start}{PARTS[part](*names.split())}{end}"
            except FileNotFoundError as error:
                return f"{start}*No runs yet: `results/{Path(error.filename).name}`.*\n{end}"
        known = ", ".join([*PARTS, *PICTURES])
        raise SystemExit(f"no part of a page is called {part} ({known})")

    return _BLOCK.sub(rebuilt, text)


def pictures(text: str) -> dict[Path, str]:
    """The files of the pictures of a page, with their content."""
    return {
        _picture(part): PICTURES[part][0](*names.split())
        for _, part, names, _ in _BLOCK.findall(text)
        if part in PICTURES
    }


def _picture(part: str) -> Path:
    return ASSETS / f"results-{part}.svg"


def rebuild() -> None:
    """Write the pages and their figures."""
    for file in PAGES:
        text = file.read_text(encoding="utf-8")
        file.write_text(page(text), encoding="utf-8")
        for picture, content in pictures(text).items():
            picture.write_text(content, encoding="utf-8")


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rebuild docs/results.md from results/*.csv.")
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="add the runs in a folder")
    parser.add_argument("--as", dest="name", help="the study, and the recipe if it has its name")
    parser.add_argument("--recipe", help="the recipe of the runs, if it has another name")
    parser.add_argument("--selection", action="store_true", help="add to NAME-selection.csv")
    parser.add_argument("--decode", type=Path, metavar="FOLDER", help="decode with the runs in it")
    parser.add_argument("--split", nargs="+", default=["valid"], choices=("valid", "test"))
    parser.add_argument("--penalties", type=_numbers(float), default=[], help="such as 0.5,1,2")
    parser.add_argument("--beams", type=_numbers(int), default=[], help="such as 1,5,20")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    if (chosen.add or chosen.decode) and chosen.name is None:
        parser.error("--add and --decode need --as NAME")
    points = chosen.penalties, chosen.beams
    if chosen.decode and not any(points):
        parser.error("--decode needs --penalties or --beams")
    try:
        if chosen.add:
            print(add(chosen.add, chosen.name, selection=chosen.selection, recipe=chosen.recipe))
        if chosen.decode:
            print(decode(chosen.decode, chosen.name, chosen.split, *points))
    except LabError as error:
        parser.error(str(error))
    rebuild()


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
