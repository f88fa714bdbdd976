"""The sections of a recipe that all tasks share, and how YAML files are read and checked.

A recipe file is found by its path or, for those that come with the package, by its bare name.
:mod:`labo.lab.recipes` turns one into a complete :class:`Recipe`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .._checks import unknown_name
from .errors import RequestError

RECIPES = Path(__file__).parents[1] / "recipes"

# Where, in the run directory's copy of a recipe, stands what is no part of the recipe.
PROVENANCE = "made_with"


class RecipeError(RequestError):
    """A recipe that cannot be run; one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class Section(BaseModel):
    """What all sections share: no unknown keys, no silent conversions, no change once made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# YAML has lists only; pydantic, being strict, would ask for tuples.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Epochs = Annotated[tuple[int, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class Optim(Section):
    """The optimizer and its learning rate, which is a pure function of the step."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    betas: Pair = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    decay_vectors: bool = Field(
        True, description="Apply weight decay also to biases and to the scales of norms."
    )
    schedule: Literal["constant", "step", "cosine", "inverse_sqrt"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    warmup_from: float = Field(0.0, ge=0)  # the learning rate of step 0
    milestones: Epochs = ()  # for "step": the epochs at which lr is multiplied by gamma
    gamma: float = Field(0.1, gt=0)
    clip_norm: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Optim:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if (
            list(self.milestones) != sorted(set(self.milestones))
            or min(self.milestones, default=1) < 1
        ):
            raise ValueError("milestones must be epochs in ascending order, from 1")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError("schedule 'step' needs milestones, and no other schedule has any")
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("schedule 'inverse_sqrt' needs warmup_steps")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Train(Section):
    """The loop. With both ``epochs`` and ``max_steps`` the run ends with whichever comes first."""

    epochs: int | None = Field(None, ge=1)
    max_steps: int | None = Field(None, ge=1)
    accumulate: int = Field(1, ge=1)  # pieces a batch is worked off in, to save memory
    precision: Literal["no", "bf16", "fp16"] = "no"
    sync_batchnorm: bool = False  # statistics over all processes; GPUs only
    log_every: int = Field(50, ge=1)  # steps
    eval_every: int = Field(1, ge=1)  # epochs; a run always ends with an evaluation
    eval_every_steps: int | None = Field(
        None, ge=1, description="Steps between two evaluations, instead of `eval_every`."
    )
    save_every: int | None = Field(None, ge=1)  # steps, besides a save at each evaluation
    patience: int | None = Field(None, ge=1)  # evaluations without a better one before the end
    select: str  # the score on the validation split that selects the model; each task names its own
    average_last: int = Field(0, ge=0)  # select the mean of the last so many evaluated models
    workers: int = Field(0, ge=0)  # threads that prepare batches ahead of time

    @field_validator("precision", mode="before")
    @classmethod
    def _spelled(cls, value: object) -> object:
        return "no" if value is False else value  # what YAML makes of an unquoted no

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("give epochs or max_steps")
        if self.average_last and self.patience is not None:
            raise ValueError("average_last needs a known end: it does not go with patience")
        return self


class Recipe(Section):
    """What all tasks share; each task adds its ``data`` and ``model`` sections."""

    task: str
    seed: int = Field(0, ge=0)
    method: dict[str, Any]  # name and hyper-parameters, resolved by methods.resolve
    optim: Optim
    train: Train

    def as_document(self) -> dict[str, Any]:
        """The recipe as plain YAML and JSON values."""
        document: dict[str, Any] = self.model_dump(mode="json")
        return document

    def digest(self) -> str:
        """A name for exactly this recipe."""
        text = json.dumps(self.as_document(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ reading


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-4 is a number, and a key may be given only once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not YAML"
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError([f"{where}{line}: {problem}"]) from error


def known_recipes() -> list[str]:
    """The bare names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or by bare name."""
    path = Path(name)
    if path.is_file():
        return path
    if name in known_recipes():
        return RECIPES / f"{name}.yaml"
    if path.is_dir():
        raise RecipeError([f"{name} is a folder, not a recipe"])
    raise RecipeError([unknown_name("recipe", name, known_recipes())])


def read_document(path: Path) -> dict[str, Any]:
    """A YAML file as a dict, without the run directory's provenance."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([f"cannot read {path}: {error}"]) from error
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise RecipeError([f"{path}: a recipe is a mapping of sections"])
    document.pop(PROVENANCE, None)
    return document


# ------------------------------------------------------------------ saying what is wrong


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One line per key that pydantic found wrong in ``model``; ``prefix`` goes before each key."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        path, section = _locate(model, problem["loc"])
        key = prefix + ".".join(path)
        if problem["type"] == "extra_forbidden":
            above = key.removesuffix(path[-1])
            line = unknown_name("key", key, [above + name for name in section.model_fields])
        elif problem["type"] == "missing":
            line = f"{key}: missing"
        elif problem["type"] == "value_error":  # from one of our own checks
            message = problem["msg"].removeprefix("Value error, ")
            line = f"{key}: {message}" if key else message
        else:
            line = f"{key}: {problem['msg'].removeprefix('Input ')}, got {problem['input']!r}"
        lines.setdefault(key, line)  # each member of a union complains for itself
    return list(lines.values())


def _locate(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[list[str], type[BaseModel]]:
    """The key that an error is about, and the section it stands in."""
    path = []
    for part in location:
        path.append(str(part))
        field = model.model_fields.get(str(part))
        kind = None if field is None else _section(field.annotation)
        if kind is None:
            break  # a value: what is inside it has no key
        model = kind
    return path, model


def _section(annotation: Any) -> type[Section] | None:
    """The section that an annotation such as ``Section | None`` stands for."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys at which two documents differ."""
    keys: list[str] = []
    for name in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(name), other.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys += differing_keys(ours, theirs, f"{prefix}{name}.")
        elif ours != theirs:
            keys.append(f"{prefix}{name}")
    return keys
