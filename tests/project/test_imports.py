"""The import graph: no cycles, and no import against the map in ``labo/lab/__init__.py``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from labo.lab.tasks import TASKS
from scripts import ROOT

SOURCE = ROOT / "src"
PACKAGE = SOURCE / "labo"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it, types included."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in MODULES:
                    yield submodule
                elif base in MODULES:
                    yield base


GRAPH = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    """``labo.lab.images.task`` and ``labo.lab.images`` are in the room ``images``."""
    return module.removeprefix("labo.lab.").partition(".")[0]


IN_THE_LAB = [name for name in MODULES if name.startswith("labo.lab.")]


def imported_rooms(module: str) -> set[str]:
    return {room(other) for other in GRAPH[module] if other.startswith("labo.lab.")}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_graph_sees_imports():
    assert "labo.lab.run.directory" in GRAPH["labo.lab.tasks"]
    assert "labo.rows" in GRAPH["labo.functional"]
    assert cycle({"a": {"b"}, "b": {"a"}}) != []


def test_no_module_imports_itself_through_others():
    # The package's own __init__ offers names of the modules below it, on first use.
    graph = {name: found - {"labo"} for name, found in GRAPH.items() if name != "labo"}
    assert cycle(graph) == []


def test_no_cycle_between_rooms():
    rooms: dict[str, set[str]] = {}
    for name in IN_THE_LAB:
        rooms.setdefault(room(name), set()).update(imported_rooms(name) - {room(name)})
    assert cycle(rooms) == []


def layers() -> list[list[str]]:
    """The lines of the map, lowest first."""
    table = re.findall(r"^=+  =+\n(.*?)^=+  =+$", MODULES["labo.lab"].read_text(), re.S | re.M)[0]
    return [
        line.partition("  ")[0].replace("/", "").replace(",", " ").split()
        for line in table.splitlines()
    ]


TASK_ROOMS = {room(package) for package in TASKS.values()}
LAYERS = {name: level for level, names in enumerate(layers()) for name in names}
# A task needs one folder and one line in TASKS: the map need not list its room.
LAYERS |= dict.fromkeys(TASK_ROOMS - LAYERS.keys(), LAYERS["images"])


def test_the_map_lists_every_room():
    assert {room(name) for name in IN_THE_LAB} == set(LAYERS)


def test_imports_follow_the_map():
    for name in IN_THE_LAB:
        allowed = {other for other, level in LAYERS.items() if level <= LAYERS[room(name)]}
        assert imported_rooms(name) <= allowed, name


# The command line, and the reader of what `labo teacher` has stored, for other trainers.
KNOW_THE_LAB = ("labo.cli", "labo.__main__", "labo.integrations.huggingface.stored")


def test_the_core_does_not_know_the_lab():
    for name, found in GRAPH.items():
        if not f"{name}.".startswith("labo.lab.") and name not in KNOW_THE_LAB:
            assert not [other for other in found if f"{other}.".startswith("labo.lab.")], name


def words(name: str) -> set[str]:
    """The string constants of a module."""
    return {
        node.value
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


OUTSIDE = [name for name in IN_THE_LAB if room(name) not in TASK_ROOMS]


def test_no_module_outside_of_its_room_names_a_task():
    for name in OUTSIDE:
        assert room(name) == "tasks" or not words(name) & TASKS.keys(), name


# Metrics, records and options of one task, or of the tasks on text, which share the room "text".
# The experiments of the paper have metrics, too.
OF_ONE_TASK = {"bleu", "chrf", "sacrebleu", "length_ratio", "beams", "part_size"}
OF_ONE_TASK |= {"forced", "forced_after", "decoded", "hypothesis", "token_accuracy"}


def test_no_module_outside_of_its_room_branches_on_what_only_one_task_has():
    for name in OUTSIDE:
        assert room(name) in ("reproduce", "text") or not words(name) & OF_ONE_TASK, name


def test_only_the_paper_s_experiments_import_the_room_of_a_task():
    for name in IN_THE_LAB:
        allowed = TASK_ROOMS if room(name) == "reproduce" else {room(name)}
        assert imported_rooms(name) & TASK_ROOMS <= allowed, name


def test_no_two_public_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if name.startswith("labo.integrations"):
            continue  # each names its parts as the library it is for
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
