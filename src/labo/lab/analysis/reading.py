"""Read run directories without torch.

A run may be finished, unfinished or damaged. :func:`read_run` reads what it can and says in
:attr:`Run.state` and :attr:`Run.problems` what it could not read, so one damaged run does not stop
a report about the others. Every file is checked against a model of its content, and a message names
the file, the line and the key.

Records are written by ``labo evaluate``, whole or not at all. They are checked line by line, and
the first wrong line is a :class:`labo.lab.errors.RequestError` that names it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config import read_document
from ..errors import RequestError
from ..run import files as atomic
from ..run.directory import RunDirectory

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

SPLITS = ("valid", "test")
_NAMED_LINES = 5  # line numbers that a message about a file lists


@contextmanager
def noted(notes: list[str], prefix: str = "") -> Iterator[None]:
    """Make a note of a RequestError, and go on."""
    try:
        yield
    except RequestError as error:
        notes.append(f"{prefix}{error}")


@dataclass(frozen=True)
class State:
    """How far a run is.

    Example:
        >>> print(State("unfinished", step=120))
        unfinished at step 120: the command that started it continues it
    """

    kind: str  # finished, unfinished or broken
    step: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.kind == "broken":
            return f"broken: {self.reason}"
        if self.kind == "finished":
            return self.kind
        return f"{self.kind} at step {self.step or 0}: the command that started it continues it"


@dataclass(frozen=True)
class Run:
    """The content of a run directory. What could not be read is empty."""

    path: Path
    state: State  # how far the run is, or why it cannot be used
    recipe: Mapping[str, Any] = field(default_factory=dict)  # the content of ``recipe.yaml``
    metrics: Sequence[Mapping[str, Any]] = ()  # the lines of ``metrics.jsonl``
    # the content of ``results.json``; None if the run is not finished
    results: Mapping[str, Any] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # the content of ``best/config.json``
    problems: Sequence[str] = ()  # sentences about parts of files that were left out

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def task(self) -> str:
        return str(self.recipe["task"])

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def method(self) -> dict[str, Any]:
        """The name of the method and its hyper-parameters."""
        return dict(self.recipe["method"])

    @property
    def num_classes(self) -> int | None:
        """The number of classes, or of target tokens; None before there is a model."""
        number = self.model.get("labo", self.model).get("num_classes")
        return None if number is None else int(number)

    def records_file(self, split: str) -> Path:
        return self.path / "records" / f"{split}.jsonl"

    def splits(self) -> list[str]:
        """The splits that have records."""
        return [split for split in SPLITS if self.records_file(split).is_file()]


# ------------------------------------------------------------------ models of the files


class _Content(BaseModel):
    """The keys that labo reads, with their types. Other keys may hold anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Method(_Content):
    name: str


class _Recipe(_Content):
    task: str
    seed: int = 0
    method: _Method


class _MetricsLine(_Content):
    step: int = Field(ge=0)
    epoch: int | None = None
    loss: float | None = None
    lr: float | None = None
    valid: dict[str, float | None] = {}


class _Results(_Content):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    valid: dict[str, float] = {}
    test: dict[str, float] = {}
    signature: str = ""
    steps: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, ge=0)
    devices: list[str] = []
    peak_memory: float | None = Field(None, ge=0)
    notes: list[str] = []


class _Facts(_Content):
    num_classes: int | None = Field(None, ge=1)


class _Model(_Facts):
    labo: _Facts = _Facts()


class _Conditions(_Content):
    jobs: int | None = None  # not known if no engine started the run
    threads: int


class _Launches(_Content):
    launches: list[_Conditions]


# ------------------------------------------------------------------ the run


def read_run(path: str | Path) -> Run:
    """Read a run directory, which has a ``recipe.yaml``.

    ``state.kind`` is "broken" if ``recipe.yaml``, ``results.json``, ``records`` or
    ``best/config.json`` cannot be used, or do not have their checksums. Wrong lines of
    ``metrics.jsonl`` are left out and named in ``problems``.
    """
    path = Path(path)
    if not (path / "recipe.yaml").is_file():
        raise RequestError(f"{path} is not a run: it has no recipe.yaml")
    recipe: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        document = read_document(path / "recipe.yaml")
        atomic.checked(document, _Recipe, path / "recipe.yaml")
        recipe = document
        metrics = read_metrics(path / "metrics.jsonl", problems)
        results = read_results(path)
        RunDirectory(path).verify_records()
        model = _read_object(path / "best" / "config.json", _Model) or {}
    except RequestError as error:
        state = State("broken", reason=str(error))
        return Run(path, state, recipe, metrics, problems=problems)
    step = max((line["step"] for line in metrics), default=0)
    state = State("unfinished" if results is None else "finished", step)
    return Run(path, state, recipe, metrics, results, model, problems)


def read_results(path: Path) -> dict[str, Any] | None:
    """``results.json`` of a run directory, checked; None if the run is not finished."""
    results = _read_object(path / "results.json", _Results)
    if results is not None:
        RunDirectory(path).verify_results(results)
    return results


def sound_run(path: str | Path) -> Run:
    """:func:`read_run`, with an error if the run is broken."""
    run = read_run(path)
    if run.state.kind == "broken":
        raise RequestError(f"{run.path} is {run.state}")
    return run


def find_teacher(student: Run, runs: Iterable[Run]) -> Run | None:
    """The run that ``method.teacher`` of a student names.

    Runs may have been moved since: the teacher is looked for at the path in the recipe, then beside
    the student, then by its folder name among ``runs``.
    """
    runs, named = list(runs), Path(str(student.method["teacher"]))
    for path in (named, student.path.parent / named.name):
        for run in runs:
            if run.path.resolve() == path.resolve():
                return run
        if (path / "recipe.yaml").is_file():
            return read_run(path)
    return next((run for run in runs if run.name == named.name), None)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(atomic.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON ({error})") from error


def _read_object(path: Path, model: type[BaseModel]) -> dict[str, Any] | None:
    """A JSON object as it is, or None if there is no such file; refused if it does not fit."""
    if not path.is_file():
        return None
    content = _read_json(path)
    atomic.checked(content, model, path)
    return content


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; none if there is no such file.

    ``problems`` gets a sentence if lines are wrong. They are left out; all others are read. A last
    line without an end is left out silently: the run was stopped while it was written.
    """
    if not path.is_file():
        return []
    *lines, last = atomic.read_bytes(path).split(b"\n")
    metrics: list[dict[str, Any]] = []
    wrong: dict[int, str] = {}
    for number, text in enumerate([*lines, last], 1):
        if text.strip():
            line = _metrics_line(text)
            if not isinstance(line, str):
                metrics.append(line)
            elif number <= len(lines):
                wrong[number] = line
    if wrong:
        named = ", ".join(map(str, list(wrong)[:_NAMED_LINES]))
        more = ", ..." if len(wrong) > _NAMED_LINES else ""
        first = next(iter(wrong.values()))
        problems.append(f"{path}: line {named}{more} left out ({first})")
    return metrics


def newest_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines in the last bytes of a ``metrics.jsonl``; what cannot be read is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(path.stat().st_size - (1 << 14), 0)
        file.seek(start)
        lines = file.read().split(b"\n")
    metrics = []
    for line in lines[1 if start else 0 : -1]:
        with suppress(ValueError):
            metrics.append(json.loads(line))
    return [line for line in metrics if isinstance(line, dict)]


def _metrics_line(text: bytes) -> dict[str, Any] | str:
    """A line of metrics, or what is wrong with it."""
    try:
        line = json.loads(text)  # decodes UTF-8
        _MetricsLine.model_validate(line)
    except ValidationError as error:
        return atomic.explain_json(error, _MetricsLine)
    except (ValueError, RecursionError):
        return "not JSON"
    return dict(line)


def read_conditions(path: Path) -> list[dict[str, Any]]:
    """The conditions of each kind of launch of a run, from its ``conditions.json``."""
    content = _read_object(path / "conditions.json", _Launches) or {"launches": []}
    launches: list[dict[str, Any]] = content["launches"]
    return launches


def digests(run: Run) -> dict[str, str]:
    """The SHA-256 of every file an analysis depends on, by its name within the run."""
    names = ["recipe.yaml", "metrics.jsonl", "results.json", "best/config.json"]
    names += [f"records/{split}.jsonl" for split in SPLITS] + ["records/examples.json"]
    return {name: atomic.sha256(run.path / name) for name in names if (run.path / name).is_file()}


# ------------------------------------------------------------------ records


def floored_log(probabilities: Floats) -> Floats:
    """log p, finite: a 0 in a record of single precision is at most the smallest such number.

    Example:
        >>> floored_log(np.array([1.0, 0.0])).round(1)
        array([   0. , -103.3])
    """
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    return np.log(np.maximum(probabilities, smallest))


class RecordLine:
    """One record and where it is in its file. Every method checks the value it returns."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.wrong("not a record")
        self.content = content

    def wrong(self, what: str) -> RequestError:
        """The error for this record."""
        return RequestError(f"{self.where}: {what}")

    def take(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        """The value of a key, which must be of a kind; ``what`` names the kind."""
        value = self.content.get(key)
        if key not in self.content:
            raise self.wrong(f"{key!r} is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{key!r} is not a {what}")
        return value

    def text(self, key: str) -> str:
        return self.take(key, str, "text")

    def integer(self, key: str) -> int:
        return self.take(key, int, "whole number")

    def number(self, key: str) -> float:
        value = float(self.take(key, (int, float), "number"))
        if not np.isfinite(value):
            raise self.wrong(f"{key!r} is {value}")
        return value

    def texts(self, key: str) -> list[str]:
        values: list[str] = self.take(key, list, "list")
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(f"{key!r} is not a list of texts")
        return values

    def booleans(self, key: str, length: int) -> Booleans:
        values = self.take(key, list, "list")
        if len(values) != length or not all(isinstance(value, bool) for value in values):
            raise self.wrong(f"{key!r} is not a list of {length} truth values")
        return np.array(values, dtype=bool)

    def numbers(
        self, key: str, length: int | None = None, *, low: float = 0.0, high: float = np.inf
    ) -> Floats:
        """Numbers in [low, high], up to rounding: a list, or float32 in base64."""
        try:
            if isinstance(packed := self.content.get(key), str):
                content = base64.b64decode(packed, validate=True)
                values = np.frombuffer(content, dtype="<f4").astype(np.float64)
            else:
                values = np.array(self.take(key, list, "list"), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self.wrong(f"{key!r} is not a list of numbers") from error
        if values.ndim != 1 or (length is not None and len(values) != length):
            raise self.wrong(f"{key!r} has {values.size} values, expected {length}")
        if not ((values >= low - 1e-6) & (values <= high + 1e-6)).all():
            raise self.wrong(f"{key!r} has a value outside [{low:g}, {high:g}]")
        return values

    def section(self, key: str) -> RecordLine:
        """The value of a key, an object of its own."""
        return RecordLine(self.take(key, dict, "section"), f"{self.where}, {key}")


def record_lines(run: Run, split: str) -> Iterator[RecordLine]:
    """The records of a split, at least one."""
    path = run.records_file(split)
    if not path.is_file():
        raise RequestError(
            f"{run.path} has no records of the {split} split: labo evaluate {run.path} writes them"
        )
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                where = f"{path}, line {number}"
                try:
                    content = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise RequestError(f"{where}: not JSON") from error
                yield RecordLine(content, where)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    if number == 0:
        raise RequestError(f"{path} is empty")


def read_examples(run: Run) -> dict[str, Any] | None:
    """``records/examples.json``: classes, and examples with all their logits; None without it."""
    path = run.path / "records" / "examples.json"
    if not path.is_file():
        return None
    line = RecordLine(_read_json(path), str(path))
    classes = line.texts("classes")
    for number, example in enumerate(line.take("examples", list, "list")):
        entry = RecordLine(example, f"{path}, example {number}")
        entry.text("title")
        if not 0 <= entry.integer("target") < len(classes):
            raise entry.wrong(f"'target' is not one of the {len(classes)} classes")
        entry.numbers("logits", len(classes), low=-np.inf)
    return line.content
