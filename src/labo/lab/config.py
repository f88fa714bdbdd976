"""The sections of a recipe that all tasks share, and how YAML files are read and checked.

A recipe file is given by its path or, if it is part of the package, by its name.
:mod:`labo.lab.recipes` turns it into a complete :class:`Recipe`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .._names import unknown_name
from .errors import RequestError

RECIPES = Path(__file__).parents[1] / "recipes"

# The key under which the copy of a recipe in a run directory records versions and commands.
PROVENANCE = "made_with"


class RecipeError(RequestError):
    """A recipe that cannot be run; one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class Section(BaseModel):
    """Base of all sections: unknown keys and silent conversions are errors; values are frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def unused(self) -> dict[str, str]:
        """Keys that have no effect beside the other values, with the value that is the reason."""
        return {}


# YAML has lists only; strict mode would reject them where a tuple is declared.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Epochs = Annotated[tuple[int, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]

# The experiment trackers of accelerate.
TRACKERS = (
    *("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab"),
    "trackio",
)


class Optim(Section):
    """The optimizer and its learning rate, which is a pure function of the step."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="The optimizer.")
    lr: float = Field(gt=0, description="The learning rate, at its highest.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of `sgd`.")
    nesterov: bool = Field(False, description="Use Nesterov momentum with `sgd`.")
    betas: Pair = Field((0.9, 0.999), description="Decay rates of `adam` and `adamw`.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay: an L2 penalty for `sgd` and `adam`, decoupled for `adamw`.",
    )
    decay_vectors: bool = Field(
        True, description="Apply weight decay also to biases and to the scales of norms."
    )
    schedule: Literal["constant", "step", "cosine", "inverse_sqrt"] = Field(
        "constant",
        description="The learning rate after the warm-up: constant, lowered at `milestones`, a "
        "cosine to 0, or falling with the inverse square root of the step.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps in which the learning rate rises linearly to `lr`."
    )
    warmup_from: float = Field(0.0, ge=0, description="The learning rate of the first step.")
    milestones: Epochs = Field(
        (),
        description="With `step`: epochs after which the learning rate is multiplied by `gamma`.",
    )
    gamma: float = Field(0.1, gt=0, description="The factor applied at each milestone.")
    clip_norm: float | None = Field(
        None, gt=0, description="The largest norm of the gradient; larger ones are scaled down."
    )

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

    def unused(self) -> dict[str, str]:
        of_others = ("betas",) if self.name == "sgd" else ("momentum", "nesterov")
        unused = dict.fromkeys(of_others, f"name={self.name}")
        if self.schedule != "step":
            unused["gamma"] = f"schedule={self.schedule}"
        if self.warmup_steps == 0:
            unused["warmup_from"] = "warmup_steps=0"
        if self.weight_decay == 0:
            unused["decay_vectors"] = "weight_decay=0"
        return unused


class Train(Section):
    """The training loop. With both ``epochs`` and ``max_steps`` the earlier one ends the run."""

    epochs: int | None = Field(None, ge=1, description="Epochs to train for.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps to train for.")
    accumulate: int = Field(
        1, ge=1, description="Micro-batches that each batch is split into, to save memory."
    )
    precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="Mixed precision: none, bfloat16 or float16."
    )
    parallel: Literal["data", "fsdp"] = Field(
        "data",
        description="What several processes share: `data` (each has the whole model) or, for "
        "models that do not fit one device, also the model and the state of the optimizer "
        "(`fsdp`: FSDP2).",
    )
    sync_batchnorm: bool = Field(
        False, description="Compute the statistics of batch norm over all processes."
    )
    log_every: int = Field(50, ge=1, description="Steps between two logged losses.")
    log_with: Names = Field(
        ("tensorboard",),
        description="Where metrics are logged besides `metrics.jsonl`, one or a list of "
        + ", ".join(f"`{name}`" for name in TRACKERS)
        + ". They have to be installed and set up as their documentation says. TensorBoard is left "
        "out if it is not installed (`pip install 'torch-labo[tensorboard]'`); the run says so.",
    )
    eval_every: int = Field(
        1,
        ge=1,
        description="Epochs between two evaluations on the validation split. The end of a run is "
        "always evaluated.",
    )
    eval_every_steps: int | None = Field(
        None, ge=1, description="Steps between two evaluations, instead of `eval_every`."
    )
    save_every: int | None = Field(
        None, ge=1, description="Steps between two checkpoints. Each evaluation saves one as well."
    )
    patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without a better score."
    )
    select: str = Field(
        description="The score on the validation split that selects the model. Of equal scores the "
        "one with the lower NLL is selected, then the later one."
    )
    average_last: int = Field(
        0,
        ge=0,
        description="Select the average of the last N evaluated models; 0 selects the best.",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Evaluate and select an exponential moving average of the weights with this "
        "decay, such as 0.999, instead of the weights themselves.",
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Keep the N best evaluated models in the folder `kept`, for `labo average`.",
    )
    keep_last: int = Field(
        0, ge=0, description="Keep the last N evaluated models in the folder `kept`, likewise."
    )
    workers: int = Field(0, ge=0, description="Threads that prepare batches in advance.")

    @field_validator("log_with", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        names = [value] if isinstance(value, str) else value
        for name in names if isinstance(names, list | tuple) else ():
            if name not in TRACKERS:
                raise ValueError(unknown_name("tracker", name, TRACKERS))
        return names

    @field_validator("precision", mode="before")
    @classmethod
    def _spelled(cls, value: object) -> object:
        return "no" if value is False else value  # what YAML makes of an unquoted no

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("give epochs or max_steps")
        if self.eval_every_steps is not None and self.eval_every != 1:
            raise ValueError("eval_every and eval_every_steps exclude each other")
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError("parallel: fsdp goes with precision no or bf16, not with fp16")
        if self.average_last and self.patience is not None:
            raise ValueError("average_last needs a known end: it does not go with patience")
        if self.average_last and self.ema is not None:
            raise ValueError("average_last and ema exclude each other")
        return self


class Recipe(Section):
    """The part of a recipe that all tasks share. Each task adds ``data`` and ``model`` sections."""

    task: str = Field(description="The kind of data and model, as listed below.")
    seed: int = Field(
        0, ge=0, description="The seed of initialization, sample order, augmentation and dropout."
    )
    method: dict[str, Any] = Field(
        description="The method: its name, or its name and hyper-parameters."
    )
    optim: Optim
    train: Train

    @property
    def selected_by(self) -> str:
        """The name, among the validation scores, of the one that selects the model."""
        return self.train.select

    def as_document(self) -> dict[str, Any]:
        """The recipe as plain YAML and JSON values."""
        document: dict[str, Any] = self.model_dump(mode="json")
        return document

    def digest(self) -> str:
        """A hash of all values of the recipe."""
        return digest_of(self.as_document())


def digest_of(document: Mapping[str, Any]) -> str:
    """A hash of a complete recipe, given as plain values."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ reading

MAX_BYTES = 1 << 20  # of a recipe
_MAX_VALUES = 100_000  # of a recipe, with its aliases written out
_MAX_DIGITS = 100  # of an integer, in any base
_SHOWN = 100  # characters of a wrong value in a message


class _Loader(yaml.SafeLoader):
    """YAML with three rules of its own.

    1e-4 is a number. A key may be given only once, where keys merged by ``<<`` do not count. An
    integer must fit in 64 bits.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values_in(node) > _MAX_VALUES:
            raise _wrong(
                f"with its aliases written out it has more than {_MAX_VALUES} values", node
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _wrong("a key must be a plain value", key_node)
            if key in seen:
                raise _wrong(f"key {key!r} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) <= _MAX_DIGITS:
            value: int = super().construct_yaml_int(node)
            if -(2**63) <= value < 2**63:
                return value
        raise _wrong("an integer of more than 64 bits", node)


def _wrong(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that :class:`_Loader` would take for numbers, such as the commit 2222e39."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def dump_yaml(document: Mapping[str, Any]) -> str:
    """A document as YAML that :func:`parse_yaml` reads as it is."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False)


def _values_in(root: yaml.Node) -> float:
    """How many values a document has with its aliases written out; infinite if it holds itself."""
    sizes: dict[int, float] = {}

    def size(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # what is met again before its end holds itself
            inside = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                inside = [part for pair in inside for part in pair]
            sizes[id(node)] = 1 + sum(map(size, inside))
        return sizes[id(node)]

    return size(root)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not YAML"
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError([f"{where}{line}: {problem}"]) from error
    except RecursionError as error:
        raise RecipeError([f"{where}: nested too deeply"]) from error
    # A date such as 2020-13-01, or a tag that does not fit its value, as in !!bool x.
    except (ValueError, LookupError, AttributeError) as error:
        raise RecipeError([f"{where}: a value that does not fit its type ({error})"]) from error


def known_recipes() -> list[str]:
    """The names of the recipes of the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe, given by its path or, for recipes of the package, by its name."""
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
    document = _read_mapping(path)
    document.pop(PROVENANCE, None)
    return document


def read_provenance(path: Path) -> dict[str, str | None]:
    """The provenance in a run directory's copy of a recipe; empty if it has none."""
    provenance = _read_mapping(path).get(PROVENANCE, {})
    if not isinstance(provenance, dict) or not all(
        isinstance(key, str) and isinstance(value, str | None) for key, value in provenance.items()
    ):
        raise RecipeError([f"{path}: {PROVENANCE} must be a mapping of names to versions"])
    return provenance


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError([f"{path}: a recipe has at most {MAX_BYTES} bytes"])
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([f"cannot read {path}: {error}"]) from error
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise RecipeError([f"{path}: a recipe is a mapping of sections"])
    return document


# ------------------------------------------------------------------ error messages


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One line per key that pydantic found wrong in ``model``; ``prefix`` goes before each key."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        path, section = _locate(model, problem["loc"])
        key = prefix + ".".join(path)
        if problem["type"] == "extra_forbidden":
            line = _unknown_key(key.removesuffix(path[-1]), path[-1], section.model_fields)
        elif problem["type"] == "missing":
            line = f"{key}: missing"
        elif problem["type"] == "value_error":  # from one of our own checks
            message = problem["msg"].removeprefix("Value error, ")
            line = f"{key}: {message}" if key else message
        else:
            wanted = problem["msg"].removeprefix("Input ")
            line = f"{key}: {wanted}, got {_shortened(problem['input'])}"
        lines.setdefault(key, line)  # each member of a union complains for itself
    return list(lines.values())


def _unknown_key(above: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown key: a near one of its own section, or all of that section."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if near:
        return f"unknown key {above + name!r}; did you mean {above + near[0]!r}?"
    where = f" of {above.removesuffix('.')}" if above else ""
    return f"unknown key {above + name!r} (keys{where}: {', '.join(known)})"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _locate(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[list[str], type[BaseModel]]:
    """The key that an error is about, and the section it belongs to."""
    path = []
    for part in location:
        path.append(str(part))
        field = model.model_fields.get(str(part))
        kind = None if field is None else field.annotation
        if (section := _section(kind)) is not None:
            model = section
            continue
        if get_origin(kind) is dict and len(location) > len(path):
            path.append(str(location[len(path)]))
        break  # a value: what is inside it has no key
    return path, model


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation such as ``Section | None`` stands for."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A document with its sections written out: dotted key -> value."""
    values: dict[str, Any] = {}
    for key, value in document.items():
        section = isinstance(value, Mapping) and value
        values |= flat(value, f"{prefix}{key}.") if section else {f"{prefix}{key}": value}
    return values


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
