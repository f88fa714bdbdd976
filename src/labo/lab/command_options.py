"""Options of a command from the fields of a model, so that each is written once.

A field with a description is an option: the name, the type, the description and whether it is
required are those of the field. ``json_schema_extra={"panel": NAME}`` of a field is the heading of
its option in the help of the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from .config import Section, explain
from .errors import RequestError

__all__ = ["Separated", "command_options", "validated"]


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


_COMMAS = BeforeValidator(_split)
Separated = Annotated[tuple[str, ...], Field(strict=False), _COMMAS]
"""Names that are one option, separated by commas. Other tuples are options that can be repeated."""

_S = TypeVar("_S", bound=Section)


class _Option(NamedTuple):
    name: str
    field: FieldInfo
    panel: str | None
    negatable: bool  # whether a switch has a --no-

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def parameter(self) -> Parameter:
        """The parameter of a function of which Typer makes the option."""
        kind = _kind(self.field)
        names = [self.flag] if kind is bool and not self.negatable else []
        about = typer.Option(*names, help=self.field.description, rich_help_panel=self.panel)
        if self.field.is_required():
            default, annotation = Parameter.empty, Annotated[kind, about]
        else:
            default, annotation = None, Annotated[kind | None, about]
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command_options(model: type[Section]) -> list[Any]:
    """The options of a command, as Typer's parameters. Those that are not given are None.

    The fields of a section inside the model are options as well; their switches can be turned off.
    """
    parameters = [option.parameter() for option in _options(model)]

    def command(**options: Any) -> None:
        """Never called: Typer reads its signature."""

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return list(typer.main.get_command(app).params)


def _options(model: type[Section]) -> Iterator[_Option]:
    """The options of the model, before those of the models that it extends."""
    own = model.__annotations__
    for name in sorted(model.model_fields, key=lambda name: name not in own):
        field = model.model_fields[name]
        extra = field.json_schema_extra
        panel: Any = extra.get("panel") if isinstance(extra, dict) else None
        if field.description is not None:
            yield _Option(name, field, panel, negatable=False)
        elif isinstance(section := field.annotation, type) and issubclass(section, Section):
            for inner, inner_field in section.model_fields.items():
                yield _Option(inner, inner_field, panel, negatable=True)


def _kind(field: FieldInfo) -> Any:
    """The type of an option: of ``X | None`` it is X, of a choice between names it is str."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if get_origin(kind) is tuple:
            return str if _COMMAS in field.metadata else list[str]
        if kind in (bool, int, float, str):
            return kind
    return str


def validated(model: type[_S], values: Mapping[str, Any]) -> _S:
    """The model with these values; None leaves one as it is.

    The RequestError has a line for each wrong value, with the name of its option.
    """
    try:
        return model.model_validate({k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        flags = {option.name: option.flag for option in _options(model)}
        lines = [_about_option(line, flags, model) for line in explain(error, model)]
        raise RequestError("\n".join(dict.fromkeys(lines))) from error


def _about_option(line: str, flags: Mapping[str, str], model: type[Section]) -> str:
    key, _, message = line.partition(": ")
    name = key.rpartition(".")[2]
    if name in flags:
        return f"{flags[name]}: {message}"
    # The message about a whole section names the options itself.
    return message if key in model.model_fields else line
