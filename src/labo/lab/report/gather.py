"""The runs of a report: read, named, and sorted into groups that may be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..analysis.reading import Run, State, read_run
from ..analysis.run import FILE, analyze_run, load_analysis
from ..config import differing_keys
from ..errors import RequestError

IMAGES, TRANSLATION = "image_classification", "translation"

# The three methods every report is about keep their colours; the others take turns.
_OWN_COLOURS = {"base": "m0", "ls": "m1", "labo": "m2"}
_OTHER_COLOURS = ("m3", "m4", "m5", "m6", "m7")

# What may differ between runs of one method: the teacher of seed 1 is another run than that of 0.
_PER_RUN = ("teacher",)


@dataclass(frozen=True, eq=False)
class Entry:
    """A run that can be reported: its files, and the document of ``analyze_run``."""

    run: Run
    analysis: Mapping[str, Any]

    @property
    def results(self) -> Mapping[str, Any]:
        return self.run.results or {}

    @cached_property
    def signature(self) -> dict[str, str]:
        """The parts of the signature in ``results.json``; nothing if the run is unfinished."""
        parts = str(self.results.get("signature", "")).split("|")
        return dict(part.split(":", 1) for part in parts if ":" in part)

    @property
    def data(self) -> str:
        """The recipe's data section, as one text."""
        return json.dumps(self.run.recipe.get("data"), sort_keys=True)

    @property
    def model(self) -> str:
        return json.dumps(self.run.recipe.get("model"), sort_keys=True)

    def split(self, name: str) -> Mapping[str, Any] | None:
        """The analysis of a split, if it has records."""
        found: Mapping[str, Any] | None = self.analysis["splits"].get(name)
        return found


@dataclass(frozen=True, eq=False)
class Listing:
    """One of the directories a report was asked for, whatever is in it."""

    path: Path
    name: str
    state: State
    run: Run | None = None
    entry: Entry | None = None

    @property
    def readable(self) -> bool:
        """Whether it is known what was to be run."""
        return self.run is not None and bool(self.run.recipe)


@dataclass(frozen=True, eq=False)
class Variant:
    """The runs of a group that differ in nothing but the seed."""

    label: str
    name: str
    colour: str
    dashed: bool
    entries: Sequence[Entry]

    @property
    def key(self) -> str:
        """The classes of its key in tables and legends."""
        return f"{self.colour} ring" if self.dashed else self.colour


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one task on the same data with the same model."""

    title: str
    task: str
    variants: Sequence[Variant]

    @property
    def entries(self) -> list[Entry]:
        return [entry for variant in self.variants for entry in variant.entries]

    @cached_property
    def split(self) -> str:
        """The split that is reported: test, or valid if no run was tested."""
        tested = any("test" in entry.results or entry.split("test") for entry in self.entries)
        return "test" if tested else "valid"

    @property
    def metric(self) -> str:
        return "bleu" if self.task == TRANSLATION else "accuracy"


# ------------------------------------------------------------------ reading


def read_runs(paths: Iterable[str | Path]) -> list[Listing]:
    """The runs in the given order; one that cannot be read says so in its state."""
    folders = [Path(path) for path in paths]
    return [_read(path, name) for path, name in zip(folders, _names(folders), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """The folder of each, behind as many folders above it as tell all of them apart."""
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({folders[-depth:] for folders in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(folders[-depth:]) for folders in parts]


def _read(path: Path, name: str) -> Listing:
    run = None
    try:
        run = read_run(path)
        if run.state.kind == "broken":
            return Listing(path, name, run.state, run)
        return Listing(path, name, run.state, run, Entry(run, _analysis(run)))
    except RequestError as error:
        return Listing(path, name, State("broken", reason=str(error)), run)


def _analysis(run: Run) -> Mapping[str, Any]:
    """What ``labo analyze`` wrote; or else, to be quick, of the last split alone, which is test."""
    if (run.path / FILE).is_file():
        return load_analysis(run.path)
    return analyze_run(run.path, run.splits()[-1:])


# ------------------------------------------------------------------ sorting


def make_groups(entries: Sequence[Entry]) -> list[Group]:
    """Sort runs into groups: what one holds may stand in one table."""
    hashes = {entry.data: entry.signature["data"] for entry in entries if entry.signature}
    members: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        data = entry.signature.get("data") or hashes.get(entry.data, entry.data)
        members.setdefault((entry.run.task, data, entry.model), []).append(entry)
    colours = _colours({str(entry.run.method["name"]) for entry in entries})
    titles = _titles([runs[0] for runs in members.values()])
    return [
        Group(title, task, _variants(runs, colours))
        for ((task, _, _), runs), title in zip(members.items(), titles, strict=True)
    ]


def _titles(entries: Sequence[Entry]) -> list[str]:
    """For each group the name of its data, with model and hash where that alone does not tell."""
    names = []
    for entry in entries:
        model = _section(entry, "model")
        name, hashed = _data_name(entry), entry.signature.get("data", "unfinished")
        named = f"{name}, {model.get('preset') or model.get('name')}"
        names.append((name, named, f"{named}, {hashed}"))
    for candidates in zip(*names, strict=True):
        if len(set(candidates)) == len(candidates):
            return list(candidates)
    return [name[-1] for name in names]


def _data_name(entry: Entry) -> str:
    """What people call the data: a prepared folder by its name, phrases with their languages."""
    data = _section(entry, "data")
    if data.get("path"):
        return Path(str(data["path"])).name
    return " ".join([str(data.get("name", entry.run.task)), *map(str, data.get("languages") or ())])


def _section(entry: Entry, name: str) -> Mapping[str, Any]:
    section = entry.run.recipe.get(name)
    return section if isinstance(section, dict) else {}


def _colours(names: set[str]) -> dict[str, tuple[str, bool]]:
    """Method -> colour, and whether it is drawn dashed: the same all over the page."""
    colours = {name: (colour, False) for name, colour in _OWN_COLOURS.items()}
    for place, name in enumerate(sorted(names - colours.keys())):
        turn, which = divmod(place, len(_OTHER_COLOURS))
        colours[name] = _OTHER_COLOURS[which], turn % 2 == 1
    return colours


def _variants(entries: Sequence[Entry], colours: Mapping[str, tuple[str, bool]]) -> list[Variant]:
    """base, ls and labo first, then the others by name; the runs of each by seed."""
    members: dict[str, list[Entry]] = {}
    for entry in entries:
        members.setdefault(json.dumps(_recipe(entry.run), sort_keys=True), []).append(entry)
    recipes = [_recipe(runs[0].run) for runs in members.values()]
    known = list(_OWN_COLOURS)
    variants: list[Variant] = []
    for recipe, runs in zip(recipes, members.values(), strict=True):
        name = str(recipe["method"]["name"])
        colour, dashed = colours[name]
        repeated = any(variant.name == name for variant in variants)
        runs.sort(key=lambda entry: (entry.run.seed, entry.run.name))
        label = _label(recipe, recipes)
        variants.append(Variant(label, name, colour, dashed or repeated, runs))

    def order(variant: Variant) -> tuple[int, str]:
        return known.index(variant.name) if variant.name in known else len(known), variant.label

    return sorted(variants, key=order)


def _recipe(run: Run) -> dict[str, Any]:
    """What the runs of one variant share."""
    method = {key: value for key, value in run.method.items() if key not in _PER_RUN}
    return {**run.recipe, "seed": None, "method": method}


def _label(recipe: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The name of a method, with what tells its recipe from others of that name."""
    name = recipe["method"]["name"]
    alike = [other for other in others if other["method"]["name"] == name]
    telling = sorted({key for other in alike for key in differing_keys(recipe, other)})
    return " ".join([name, *(f"{key.split('.')[-1]}={_at(recipe, key)}" for key in telling)])


def _at(document: Any, key: str) -> Any:
    for name in key.split("."):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def method_text(method: Mapping[str, Any]) -> str:
    """A method with its hyper-parameters.

    Example:
        >>> method_text({"name": "ls", "alpha": 0.1})
        'ls alpha=0.1'
    """
    hyper = [f"{key}={value}" for key, value in method.items() if key != "name"]
    return " ".join([str(method["name"]), *hyper])


def signature_line(entries: Sequence[Entry]) -> str:
    """What the numbers of a figure rest on, each part once."""

    def each(values: Iterable[object], between: str = ", ") -> str:
        return between.join(dict.fromkeys(str(value) for value in values if value is not None))

    parts = {
        "labo": each(entry.signature.get("labo") for entry in entries),
        "data": each(entry.signature.get("data") for entry in entries),
        "loss": each((method_text(_recipe(entry.run)["method"]) for entry in entries), "; "),
        "seed": each(entry.run.seed for entry in entries),
        "sacreBLEU": each(entry.results.get("sacrebleu", {}).get("bleu") for entry in entries),
    }
    return " · ".join(f"{name} {value}" for name, value in parts.items() if value)
