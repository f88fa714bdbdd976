"""Writes docs/recipe.md, the page of all recipe keys: ``python tools/recipe_page.py``.

Names, types, defaults and descriptions come from the recipe models, the methods and the options of
``labo prepare``. A test compares the page with :func:`page`.
"""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from typer.main import get_command

from labo import cli, fields
from labo.lab.config import Optim, Recipe, Section, Train, known_recipes
from labo.lab.methods import METHODS, hyper_parameters, methods_for
from labo.lab.tasks import TASKS, find_task

OUT = Path(__file__).parents[1] / "docs" / "recipe.md"
_SHARED: dict[str, type[Section]] = {"optim": Optim, "train": Train}
_DECLARED_BY_TASKS = {"select"}  # keys of shared sections that every task declares again
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES = {"NoneType": "null", "str": "string", "int": "integer", "dict": "section"}

INTRODUCTION = f"""\
# Recipe keys

<!-- Written by `python tools/recipe_page.py`. Edit the descriptions in the code, not this page. -->

A recipe is a YAML file that describes one training run: the task, the data, the model, the method,
the optimizer and the training loop. `labo train` takes the path of such a file or the name of a
recipe of the package:
{textwrap.fill(", ".join(f"`{name}`" for name in known_recipes()), 100, break_on_hyphens=False)}.

Any key can be set on the command line as `KEY=VALUE`. The value is YAML. A key inside a section is
written with a dot:

```sh
labo train cldr seed=1 method=ls method.alpha=0.2 optim.lr=0.001 'optim.betas=[0.9, 0.98]'
```

A wrong key or value stops the command before anything is written, and the message names the key. So
does a key that would have no effect, such as `optim.betas` with `optim.name=sgd`. The complete
recipe, with every default filled in, is saved as `recipe.yaml` in the run directory.

"""


def page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION, "## Keys of all tasks\n\n", _table(_rows("", Recipe))]
    parts += [_section(name, model) for name, model in _SHARED.items()]
    for task in TASKS:
        parts.append(f"## `task: {task}`\n\n")
        sections = _sections(find_task(task).Recipe)
        parts += [_section(name, model) for name, model in sections.items() if name not in _SHARED]
        parts += [
            _section(name, model, further_than=_SHARED[name])
            for name, model in sections.items()
            if name in _SHARED and model is not _SHARED[name]
        ]
    parts.append(
        "## `method`\n\n"
        "`method: NAME` selects a method with its defaults. To set hyper-parameters, use a\n"
        "section with `name` and the keys below, or `method.KEY=VALUE` on the command line.\n"
        "`labo methods --task TASK` lists the methods and defaults of a task.\n"
        "[Methods](methods.md) has the equations.\n\n"
    )
    parts += [_method(name) for name in METHODS]
    parts.append(
        "## Options of `labo prepare`\n\n"
        "`labo prepare OUT` turns parallel text into the folder that `data.path` names; see\n"
        "[Translation](translation.md). `--no-moses` turns off `--moses`, and so on.\n\n"
    )
    parts.append(_options("prepare"))
    parts.append(
        "## Options of `labo prepare-text`\n\n"
        "`labo prepare-text OUT` turns text into the folder that `data.path` names; see\n"
        "[Language models](language_models.md).\n\n"
    )
    parts.append(_options("prepare-text"))
    return "".join(parts).rstrip("\n") + "\n"


def _summary(model: type[Section]) -> str:
    text = " ".join((model.__doc__ or "").split())
    return textwrap.fill(re.sub(r"``(.*?)``", r"`\1`", text), 100)


def _sections(recipe: type[Section]) -> dict[str, type[Section]]:
    kinds = {name: field.annotation for name, field in recipe.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _section(name: str, model: type[Section], further_than: type[Section] | None = None) -> str:
    """Heading, summary and table of a section, or of the keys it has beyond another one."""
    title = f"`{name}`" + (", further keys" if further_than else "")
    rows = _rows(f"{name}.", model, further_than)
    return f"### {title}\n\n{_summary(model)}\n\n{_table(rows)}"


def _rows(
    prefix: str, model: type[Section], without: type[Section] | None = None
) -> list[tuple[str, ...]]:
    left_out = {*_sections(model), *_DECLARED_BY_TASKS} if without is None else set()
    rows: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        inherited = None if without is None else without.model_fields.get(name)
        if name in left_out or (inherited and inherited.annotation == field.annotation):
            continue
        kind = "string or section" if name == "method" else _kind(field)
        row = (f"`{prefix}{name}`", kind, _default(field), field.description or "")
        rows.append(row)
        for kind in get_args(field.annotation):  # a section that may be left out
            if isinstance(kind, type) and issubclass(kind, Section):
                rows += _rows(f"{prefix}{name}.", kind)
    return rows


def _method(name: str) -> str:
    method = METHODS[name]
    tasks = [task for task in TASKS if name in methods_for(task)]
    sections = {task: hyper_parameters(name, task).model_fields for task in tasks}
    rows = []
    for key, field in sections[tasks[0]].items():
        defaults = {task: _default(fields[key]) for task, fields in sections.items()}
        text = defaults[tasks[0]]
        if len(set(defaults.values())) > 1:
            text = ", ".join(f"{value} ({task})" for task, value in defaults.items())
        meaning = _capitalized(field.description or "")
        rows.append((f"`method.{key}`", _hyper_kind(method.fields.get(key), field), text, meaning))
    only = "" if len(tasks) == len(TASKS) else f" Only for {', '.join(tasks)}."
    about = f"{_capitalized(method.summary)} ({method.reference}).{only}"
    head = f"### `{name}`\n\n{textwrap.fill(about, 100)}\n\n"
    return head + (_table(rows) if rows else "No hyper-parameters.\n\n")


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _hyper_kind(declared: fields.Field | None, field: FieldInfo) -> str:
    """Types of hyper-parameters, with the ranges of their declaration."""
    if declared is not None and declared.choices:
        return ", ".join(f"`{choice}`" for choice in declared.choices)
    if declared is not None and declared.range is not None:
        optional = " or null" if type(None) in get_args(field.annotation) else ""
        word = f"`{declared.word}` or " if declared.word else ""
        return f"{word}{declared.range}{optional}"
    return _kind(field)


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = [part for part in get_args(kind) if part is not Ellipsis]
        count = "" if Ellipsis in get_args(kind) else f"{len(parts)} "
        return f"list of {count}{_type_name(parts[0])}s"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return _NAMES.get(name, name)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(str(part) for part in value)}]"
    return f"`{value}`" if isinstance(value, str) else str(value)


def _options(command: str) -> str:
    group: Any = get_command(cli.app)
    context = group.commands[command].make_context(command, [], resilient_parsing=True)
    options = [
        parameter
        for parameter in context.command.get_params(context)
        if parameter.param_type_name == "option" and parameter.name not in ("debug", "help")
    ]
    panels = [option.rich_help_panel for option in options]
    options.sort(key=lambda option: panels.index(option.rich_help_panel))
    rows = [(f"`{option.opts[0]}`", option.help) for option in options]
    return _table(rows, ("option", "meaning"))


def _table(
    rows: Iterable[tuple[str, ...]],
    head: tuple[str, ...] = ("key", "type", "default", "meaning"),
) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n\n"


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(f"wrote {OUT}")
