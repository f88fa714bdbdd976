"""Reads a recipe file, applies ``key=value`` overrides, and checks the result.

:func:`load_recipe` returns a frozen :class:`labo.lab.config.Recipe` with all defaults filled in, or
raises a :class:`labo.lab.config.RecipeError` with one line for each wrong key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from .._names import unknown_name
from .config import Recipe, RecipeError, Section, explain, find_recipe, parse_yaml, read_document
from .custom import is_reference, trust
from .errors import RequestError
from .methods import method_name, resolve
from .run.directory import RunDirectory
from .tasks import TASKS, find_task


def override(document: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply ``a.b=value`` settings in place; the values are YAML.

    Whole sections are set before single keys, so their order on the command line does not matter.
    ``method=NAME`` keeps the settings of the recipe if NAME is the method of the recipe.
    """
    settings = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise RecipeError(
                [f"{text!r} is not an override; write KEY=VALUE, such as optim.lr=0.1"]
            )
        settings.append((key.split("."), parse_yaml(value, text)))
    for path, value in sorted(settings, key=lambda setting: len(setting[0])):
        section = document
        for depth, name in enumerate(path[:-1], 1):
            section = _as_section(section, name)
            if not isinstance(section, dict):
                raise RecipeError([f"{'.'.join(path[:depth])} is not a section of the recipe"])
        if path != ["method"] or not _same_method(document.get("method"), value):
            section[path[-1]] = value


def _same_method(section: object, name: object) -> bool:
    """Whether the ``method`` section of a recipe names this method."""
    if not isinstance(section, dict) or not isinstance(name, str):
        return False
    return method_name(section.get("name")) == method_name(name)


def _as_section(parent: dict[str, Any], name: str) -> Any:
    """``parent[name]``; the short form ``method: NAME`` becomes a section first."""
    if name == "method" and isinstance(parent.get(name), str):
        parent[name] = {"name": parent[name]}
    return parent.setdefault(name, {})


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        name: a path, or the name of a recipe of the package.
        overrides: ``a.b=value`` settings.

    Raises:
        RecipeError: one line per wrong key, and per override that would have no effect. (A key in
            the file may: a recipe for ``sgd`` can be run with ``optim.name=adamw``.)
    """
    overrides = tuple(overrides)
    document = read_document(find_recipe(name))
    override(document, overrides)
    recipe = build_recipe(document)
    _refuse_unused(recipe, [text.partition("=")[0] for text in overrides])
    return recipe


def _refuse_unused(recipe: Recipe, keys: Iterable[str]) -> None:
    problems = []
    for key in keys:
        name, _, field = key.partition(".")
        section = getattr(recipe, name)
        reason = section.unused().get(field) if isinstance(section, Section) else None
        if reason and getattr(section, field) != type(section).model_fields[field].default:
            problems.append(f"{key} has no effect with {name}.{reason}")
    if problems:
        raise RecipeError(problems)


def build_recipe(document: Mapping[str, Any]) -> Recipe:
    """Check a recipe given as a dict and fill in every default.

    The functions that it names may then be imported and called, with the arguments in it.
    """
    recipe = _build(document)
    for section in recipe.as_document().values():
        for value in section.values() if isinstance(section, dict) else ():
            if isinstance(value, str) and is_reference(value):
                trust(value, section.get("arguments", {}))
    return recipe


def _build(document: Mapping[str, Any]) -> Recipe:
    document = dict(document)
    task = document.get("task")
    if task is None:
        raise RecipeError([f"task: missing (known: {', '.join(TASKS)})"])
    if not isinstance(task, str) or task not in TASKS:
        raise RecipeError([unknown_name("task", task, TASKS)])
    problems: list[str] = []
    try:
        document["method"] = resolve(document.get("method"), task)
    except RecipeError as error:
        problems += error.problems
        document["method"] = {}
    recipe_class = find_task(task).Recipe
    try:
        recipe = recipe_class.model_validate(document)
    except ValidationError as error:
        problems += explain(error, recipe_class)
    else:
        if recipe.train.parallel == "fsdp" and not find_task(task).shardable:
            problems.append(f"train.parallel: {task} does not support fsdp; leave it at data")
    if problems:
        raise RecipeError(problems)
    return recipe


def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe of a run directory. It may be someone else's: its functions are not trusted."""
    try:
        return _build(run.document())
    except RecipeError as error:
        raise RequestError(f"{run.recipe_file}: {'; '.join(error.problems)}") from error


def keys_named(name: str) -> list[str]:
    """The recipe keys with this last part, of any task.

    Example:
        >>> keys_named("epochs")
        ['train.epochs']
    """
    keys: list[str] = []
    for task in TASKS:
        for key, field in find_task(task).Recipe.model_fields.items():
            kind = field.annotation
            if key == name:
                keys.append(key)
            elif isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields:
                keys.append(f"{key}.{name}")
    return list(dict.fromkeys(keys))
