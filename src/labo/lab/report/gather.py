"""The runs of a report: read, named, and sorted into the groups that are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.groups import Group, Member, Variant, group_runs
from ..analysis.reading import Run, State, read_run
from ..analysis.run import FILE, analyze_run, load_analysis
from ..analysis.task import find_analysis
from ..errors import RequestError
from .palette import OWN, Style, styles


@dataclass(frozen=True, eq=False)
class Listing:
    """One of the directories a report was asked for."""

    path: Path
    name: str  # what it is called in the report
    state: State  # finished, unfinished or broken
    run: Run | None = None  # its content, if it is a run
    member: Member | None = None  # the run with its analysis, if it can be reported

    @property
    def readable(self) -> bool:
        """Whether its recipe could be read."""
        return self.run is not None and bool(self.run.recipe)


@dataclass(frozen=True, eq=False)
class DrawnVariant(Variant):
    """A variant and how it is drawn."""

    style: Style


@dataclass(frozen=True, eq=False)
class ReportGroup(Group):
    """A group with a title, and how its variants are drawn."""

    variants: Sequence[DrawnVariant]
    title: str = ""

    @property
    def shown(self) -> list[DrawnVariant]:
        """The variants as they are shown: base, ls and labo first, then the others by name."""

        def order(variant: DrawnVariant) -> tuple[int, str]:
            return OWN.index(variant.name) if variant.name in OWN else len(OWN), variant.label

        return sorted(self.variants, key=order)


# ------------------------------------------------------------------ reading


def read_runs(paths: Iterable[str | Path]) -> list[Listing]:
    """The runs in the given order. The state of one that cannot be read says why."""
    folders = [Path(path) for path in paths]
    return [_read(path, name) for path, name in zip(folders, _names(folders), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many parent folders as make all names different."""
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
        return Listing(path, name, run.state, run, Member(run, _analysis(run)))
    except RequestError as error:
        return Listing(path, name, State("broken", reason=str(error)), run)


def _analysis(run: Run) -> Mapping[str, Any]:
    """What ``labo analyze`` wrote; without it an analysis of the last split, which is quicker."""
    if (run.path / FILE).is_file():
        return load_analysis(run.path)
    return analyze_run(run.path, run.splits()[-1:])


# ------------------------------------------------------------------ groups


def make_groups(members: Sequence[Member]) -> list[ReportGroup]:
    """The groups of :func:`labo.lab.analysis.groups.group_runs` with titles and colours."""
    groups = group_runs(members)
    keys = [_numbered(group.variants) for group in groups]
    chosen = styles(key for of_group in keys for key in of_group)
    return [
        ReportGroup(
            group.task,
            group.split,
            [
                DrawnVariant(variant.label, variant.recipe, variant.members, chosen[key])
                for key, variant in zip(of_group, group.variants, strict=True)
            ],
            group.repeated,
            title,
        )
        for group, of_group, title in zip(
            groups, keys, _titles([group.members[0] for group in groups]), strict=True
        )
    ]


def _numbered(variants: Sequence[Variant]) -> list[tuple[str, int]]:
    """For each variant the name of its method and its number among those of this name."""
    names = [variant.name for variant in variants]
    return [(name, names[:place].count(name)) for place, name in enumerate(names)]


def _titles(members: Sequence[Member]) -> list[str]:
    """For each group the name of its data; with model, hash and number if names are equal."""
    names = []
    for member in members:
        model = _section(member, "model")
        name, hashed = _data_name(member), member.signature.get("data", "unfinished")
        folder = Path(str(model.get("pretrained"))).name
        named = f"{name}, {model.get('preset') or model.get('name') or folder}"
        names.append((name, named, f"{named}, {hashed}"))
    for candidates in zip(*names, strict=True):
        if len(set(candidates)) == len(candidates):
            return list(candidates)
    return [f"{name[-1]} ({number})" for number, name in enumerate(names, 1)]


def _data_name(member: Member) -> str:
    """The name of the data, of phrases also their languages; of a user's own what they hold."""
    data = _section(member, "data")
    name, languages = str(data.get("name", member.run.task)), data.get("languages")
    own = data.get({"prepared": "path", "folder": "root"}.get(name, ""))
    if own:
        return _prepared_name(Path(str(own)).expanduser()) or Path(str(own)).name
    more = map(str, languages) if isinstance(languages, list) else ()
    return " ".join([name, *more])


def _prepared_name(folder: Path) -> str | None:
    """What prepared text is, as its manifest says: languages or files, and its size.

    None if there is no manifest (any more), or it does not say.
    """
    try:
        manifest = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        if "pairs" in manifest:
            names = [f"{pair['source']}-{pair['target']}" for pair in manifest["pairs"]]
            unit = "sentence pairs"
        else:
            names = list(dict.fromkeys(str(entry["file"]) for entry in manifest["inputs"]))
            unit = "documents"
        more = [f"{len(names) - 3} more"] if len(names) > 4 else names[3:]
        size = f"{manifest['sizes']['train']:,}".replace(",", "\u202f")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return f"{', '.join([*names[:3], *more])} ({size} {unit})" if names else None


def _section(member: Member, name: str) -> Mapping[str, Any]:
    section = member.run.recipe.get(name)
    return section if isinstance(section, dict) else {}


# ------------------------------------------------------------------ signatures


def method_text(method: Mapping[str, Any]) -> str:
    """A method with its hyper-parameters.

    Example:
        >>> method_text({"name": "ls", "alpha": 0.1})
        'ls alpha=0.1'
    """
    hyper = [f"{k}={v}" for k, v in method.items() if k != "name" and v is not None]
    return " ".join([str(method["name"]), *hyper])


def signature_line(members: Sequence[Member]) -> str:
    """What the numbers of a figure are computed from, each part once."""

    def each(values: Iterable[object], between: str = ", ") -> str:
        return between.join(dict.fromkeys(str(value) for value in values if value is not None))

    methods = [
        {key: value for key, value in member.run.method.items() if key != "teacher"}
        for member in members
    ]
    parts = {
        "labo": each(member.signature.get("labo") for member in members),
        "data": each(member.signature.get("data") for member in members),
        "loss": each(map(method_text, methods), "; "),
        "seed": each(member.run.seed for member in members),
    }
    for member in members:
        parts |= find_analysis(member.run.task).scoring(member.results)
    return " · ".join(f"{name} {value}" for name, value in parts.items() if value)
