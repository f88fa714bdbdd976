"""What a run directory holds, read without torch.

A run may be finished, still going, or damaged, and a report must be able to say which: reading one
does not fail where something can still be said. Records, which ``labo evaluate`` writes whole or
not at all, are checked line by line, and the first that is wrong is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import read_document
from ..errors import RequestError
from ..run.files import sha256

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

SPLITS = ("valid", "test")


@dataclass(frozen=True)
class State:
    """How far a run came.

    Example:
        >>> print(State("unfinished", step=120))
        unfinished at step 120
    """

    kind: str  # finished, unfinished or broken
    step: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.kind == "broken":
            return f"broken: {self.reason}"
        return self.kind if self.kind == "finished" else f"{self.kind} at step {self.step or 0}"


@dataclass(frozen=True)
class Run:
    """A run directory as it stands; what could not be read is empty, and ``state`` says why."""

    path: Path
    state: State
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    results: Mapping[str, Any] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # best/config.json

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
        """The number of classes, or of target tokens, if there is a model yet."""
        found = self.model.get("labo", self.model).get("num_classes")
        return None if found is None else int(found)

    def records_file(self, split: str) -> Path:
        return self.path / "records" / f"{split}.jsonl"

    def splits(self) -> list[str]:
        """The splits with records."""
        return [split for split in SPLITS if self.records_file(split).is_file()]


# ------------------------------------------------------------------ the run


def read_run(path: str | Path) -> Run:
    """Read a run directory.

    Args:
        path: the directory; it must hold a ``recipe.yaml``.

    Returns:
        The run; ``state.kind`` is "broken" if one of its files is.
    """
    path = Path(path)
    if not (path / "recipe.yaml").is_file():
        raise RequestError(f"{path} is no run with recipe.yaml")
    try:
        recipe = read_document(path / "recipe.yaml")
        if not isinstance(recipe.get("task"), str):
            raise RequestError(f"{path / 'recipe.yaml'}: no task")
        if not isinstance(recipe.get("method"), dict) or "name" not in recipe["method"]:
            raise RequestError(f"{path / 'recipe.yaml'}: no method with a name")
    except RequestError as error:
        return Run(path, State("broken", reason=str(error)))
    try:
        metrics = _read_metrics(path / "metrics.jsonl")
        results = _read_object(path / "results.json")
        model = _read_object(path / "best" / "config.json") or {}
    except RequestError as error:
        return Run(path, State("broken", reason=str(error)), recipe)
    step = max((line["step"] for line in metrics), default=0)
    state = State("unfinished", step) if results is None else State("finished", step)
    return Run(path, state, recipe, metrics, results, model)


def sound_run(path: str | Path) -> Run:
    """:func:`read_run`, which here must not be broken."""
    run = read_run(path)
    if run.state.kind == "broken":
        raise RequestError(f"{run.path} is {run.state}")
    return run


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise RequestError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{path} is no JSON object")
    return content


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged lines. The last may be broken: it was being written when the run was killed."""
    if not path.is_file():
        return []
    lines = _read_text(path).splitlines()
    metrics = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise RequestError(f"{path}, line {number}: no logged step") from error
        metrics.append(line)
    return metrics


def digests(run: Run) -> dict[str, str]:
    """The SHA-256 of every file an analysis rests on, by its name within the run."""
    names = ["recipe.yaml", "metrics.jsonl", "results.json", "best/config.json"]
    names += [f"records/{split}.jsonl" for split in SPLITS] + ["records/examples.json"]
    found = {}
    for name in names:
        if (run.path / name).is_file():
            found[name] = sha256(run.path / name)
    return found


# ------------------------------------------------------------------ records


def floored_log(probabilities: Floats) -> Floats:
    """log p, finite. Records hold single precision: a 0 there is at most its smallest number.

    Example:
        >>> floored_log(np.array([1.0, 0.0])).round(1)
        array([   0. , -103.3])
    """
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    logs: Floats = np.log(np.maximum(probabilities, smallest))
    return logs


@dataclass(frozen=True, eq=False)
class Images:
    """The records of a split of images, as arrays.

    Attributes:
        labels: (N,) class indices.
        probabilities: (N, K), each row sums to 1.
    """

    labels: Integers
    probabilities: Floats

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def log_p(self) -> Floats:
        """(N, K)."""
        return floored_log(self.probabilities)

    @property
    def right(self) -> Booleans:
        """(N,) whether the likeliest class is the label."""
        right: Booleans = self.probabilities.argmax(-1) == self.labels
        return right

    def fingerprint(self) -> str:
        """The same for two runs that predicted the same examples."""
        return hashlib.sha256(self.labels.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Tempered:
    """What one temperature, fitted on the validation split, makes of the same; (tokens,)."""

    temperature: float
    probabilities: Floats
    confidence: Floats


@dataclass(frozen=True, eq=False)
class Forced:
    """What a model says of each token of a reference, given the tokens before it; all (tokens,)."""

    tokens: list[str]
    probabilities: Floats  # of the reference token
    confidence: Floats  # of the likeliest token
    right: Booleans  # whether they are the same
    entropy: Floats
    tempered: Tempered | None


@dataclass(frozen=True, eq=False)
class Sentence:
    """One record of a translation."""

    pair: str
    source: str
    reference: str
    hypothesis: str
    tokens: list[str]
    probabilities: Floats  # one per token
    frequency: float
    forced: Forced
    lengths: Mapping[str, int] | None
    reference_length: int | None


@dataclass(frozen=True, eq=False)
class Translations:
    """The records of a split of sentences."""

    sentences: list[Sentence]

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def hypotheses(self) -> list[str]:
        return [sentence.hypothesis for sentence in self.sentences]

    @property
    def references(self) -> list[str]:
        return [sentence.reference for sentence in self.sentences]

    @property
    def probabilities(self) -> list[Floats]:
        """Of the tokens of each hypothesis."""
        return [sentence.probabilities for sentence in self.sentences]

    @property
    def frequency(self) -> Floats:
        """(sentences,) F(x)."""
        return np.array([sentence.frequency for sentence in self.sentences])

    def fingerprint(self) -> str:
        """The same for two runs that translated the same sentences."""
        text = [(s.pair, s.source, s.reference) for s in self.sentences]
        return hashlib.sha256(json.dumps(text).encode()).hexdigest()


class _Line:
    """One record with the place it stands at; every reader checks what it reads."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.wrong("no record")
        self.content = content

    def wrong(self, what: str) -> RequestError:
        return RequestError(f"{self.where}: {what}")

    def take(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{key!r} is {'missing' if key not in self.content else f'no {what}'}")
        return value

    def text(self, key: str) -> str:
        value: str = self.take(key, str, "text")
        return value

    def integer(self, key: str) -> int:
        value: int = self.take(key, int, "whole number")
        return value

    def number(self, key: str) -> float:
        value = float(self.take(key, (int, float), "number"))
        if not np.isfinite(value):
            raise self.wrong(f"{key!r} is {value}")
        return value

    def texts(self, key: str) -> list[str]:
        values: list[str] = self.take(key, list, "list")
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(f"{key!r} is no list of texts")
        return values

    def numbers(self, key: str, length: int | None = None, *, top: float = np.inf) -> Floats:
        """Numbers in [0, top], a rounding error aside."""
        try:
            values = np.array(self.take(key, list, "list"), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self.wrong(f"{key!r} is no list of numbers") from error
        if values.ndim != 1 or (length is not None and len(values) != length):
            raise self.wrong(f"{key!r} has {values.size} values, not {length}")
        if not ((values >= -1e-6) & (values <= top + 1e-6)).all():
            raise self.wrong(f"{key!r} has a value outside [0, {top:g}]")
        return values

    def section(self, key: str) -> _Line:
        return _Line(self.take(key, dict, "section"), f"{self.where}, {key}")


def _lines(run: Run, split: str) -> Iterator[_Line]:
    path = run.records_file(split)
    if not path.is_file():
        raise RequestError(
            f"{run.path} has no records of the {split} split: labo evaluate {run.path} writes them"
        )
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                where = f"{path}, line {number}"
                try:
                    content = json.loads(text)
                except ValueError as error:
                    raise RequestError(f"{where}: no JSON") from error
                yield _Line(content, where)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error


def read_images(run: Run, split: str) -> Images:
    """The records of a split of an image classifier."""
    labels: list[int] = []
    rows: list[Floats] = []
    for line in _lines(run, split):
        row = line.numbers("probabilities", len(rows[0]) if rows else None, top=1)
        if len(row) == 0 or abs(row.sum() - 1) > 1e-3:
            raise line.wrong("'probabilities' do not sum to 1")
        label = line.integer("label")
        if not 0 <= label < len(row):
            raise line.wrong(f"'label' {label} is none of the {len(row)} classes")
        labels.append(label)
        rows.append(row)
    if not rows:
        raise RequestError(f"{run.records_file(split)} is empty")
    return Images(np.array(labels), np.stack(rows))


def read_translations(run: Run, split: str) -> Translations:
    """The records of a split of a translation model."""
    sentences = [_sentence(line) for line in _lines(run, split)]
    if not sentences:
        raise RequestError(f"{run.records_file(split)} is empty")
    return Translations(sentences)


def _sentence(line: _Line) -> Sentence:
    tokens, forced = line.texts("tokens"), line.section("forced")
    lengths = None
    if line.content.get("lengths") is not None:
        section = line.section("lengths")
        lengths = {beam: section.integer(beam) for beam in section.content}
    return Sentence(
        pair=line.text("pair"),
        source=line.text("source"),
        reference=line.text("reference"),
        hypothesis=line.text("hypothesis"),
        tokens=tokens,
        probabilities=line.numbers("probabilities", len(tokens), top=1),
        frequency=line.number("frequency"),
        forced=_forced(forced),
        lengths=lengths,
        reference_length=None if lengths is None else line.integer("reference_length"),
    )


def _forced(line: _Line) -> Forced:
    tokens = line.texts("tokens")
    right = line.take("right", list, "list")
    if len(right) != len(tokens) or not all(isinstance(value, bool) for value in right):
        raise line.wrong(f"'right' is no list of {len(tokens)} truth values")
    tempered = None
    if line.content.get("tempered") is not None:
        section = line.section("tempered")
        tempered = Tempered(
            section.number("temperature"),
            section.numbers("probabilities", len(tokens), top=1),
            section.numbers("confidence", len(tokens), top=1),
        )
    return Forced(
        tokens=tokens,
        probabilities=line.numbers("probabilities", len(tokens), top=1),
        confidence=line.numbers("confidence", len(tokens), top=1),
        right=np.array(right, dtype=bool),
        entropy=line.numbers("entropy", len(tokens)),
        tempered=tempered,
    )


def read_examples(run: Run) -> dict[str, Any] | None:
    """``records/examples.json``, or None if there is none."""
    path = run.path / "records" / "examples.json"
    content = _read_object(path)
    if content is None:
        return None
    line = _Line(content, str(path))
    classes = line.texts("classes")
    for number, example in enumerate(line.take("examples", list, "list")):
        entry = _Line(example, f"{path}, example {number}")
        entry.text("title")
        if not 0 <= entry.integer("target") < len(classes):
            raise entry.wrong(f"'target' is none of the {len(classes)} classes")
        logits = entry.take("logits", list, "list")
        if len(logits) != len(classes):
            raise entry.wrong(f"'logits' has {len(logits)} values, not {len(classes)}")
    return content
