"""``METHODS``: every method the lab can train with, by name.

A method is a loss and, for some, a teacher. Its hyper-parameters are the fields of the loss and the
keyword-only parameters of the teacher. What the run knows (the number of classes, the number of
epochs, the vocabulary, ...) is supplied by it. A loss that needs no more is a method by itself; the
others have an entry here. The ``method`` section of a recipe, its checks, ``labo methods`` and the
page of recipe keys follow. A task may override the defaults of a method (``method_defaults`` of the
task).

Where a paper does not give a value, or the authors' code differs from the paper, one choice is the
default and the alternative is a hyper-parameter.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from pydantic import Field, ValidationError, create_model
from torch import Tensor, nn

from .. import fields, losses, smoothing
from .._names import Registry, UnknownNameError
from ..loss import Loss
from .config import RecipeError, Section, explain
from .errors import RequestError
from .tasks import find_task
from .teachers import (
    EMA,
    Frozen,
    InnerStates,
    SameClassPeer,
    SecondPass,
    Stored,
    Teacher,
    held_label,
    past_self,
)

# Fields of a loss that a recipe cannot set.
_NOT_HYPER = {*Loss.fields, "padding_idx", "prior"}

# What the run supplies, from what it knows.
_SUPPLIED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_classes": lambda facts: facts["num_classes"],
    "epochs": lambda facts: facts["epochs"],
    "mask": lambda facts: facts["task"].vocabulary_groups() < 2,
    "groups": lambda facts: facts["task"].vocabulary_groups(),
    "features": lambda facts: facts["model"].width,
}


@dataclass(frozen=True)
class Method:
    """A label regularization method."""

    # The class of the loss, or a function that builds it (see :func:`with_fields`)
    loss: Callable[..., nn.Module]
    teacher: Callable[..., Teacher] = Teacher  # builds the teacher
    warmup: bool = False  # whether it may begin with label smoothing
    # What the task must provide, see :attr:`labo.lab.tasks.Task.provides`
    needs: frozenset[str] = frozenset()
    # What a user should know who trains a model with many classes from scratch
    from_scratch: str | None = None
    about: str = ""  # one line on what it does, if that of the loss does not say it
    paper: str = ""  # the authors and the year of its paper, if they are not those of the loss

    @property
    def fields(self) -> dict[str, fields.Field]:
        """The hyper-parameters of the loss that a recipe can set."""
        declared: dict[str, fields.Field] = getattr(self.loss, "fields", {})
        left_out = _NOT_HYPER | _SUPPLIED.keys()
        return {name: field for name, field in declared.items() if name not in left_out}

    @property
    def summary(self) -> str:
        """One line on what it does."""
        line = self.about or (inspect.getdoc(self.loss) or "").partition("\n")[0]
        return line.rstrip(".")

    @property
    def reference(self) -> str:
        """The authors and the year of its paper."""
        paper = re.search(r"Reference:\n\s*(.+? \d{4})", self.loss.__doc__ or "")
        return self.paper or (paper[1] if paper else "the baseline")

    @property
    def mixes(self) -> bool:
        """Whether it accepts mixed labels (mixup, CutMix)."""
        linear = getattr(self.loss, "linear", True)
        return linear and not self.needs and self.teacher is not past_self

    def build(
        self, hyper: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> tuple[nn.Module, Teacher]:
        """The loss, with reduction "sum", and the teacher."""
        try:
            loss = _call(self.loss, {**hyper, "reduction": "sum"}, facts)
        except ValueError as error:
            raise RequestError(f"method: {error}") from error
        if self.warmup:
            before = losses.LabelSmoothingLoss(alpha=hyper["warmup_alpha"], reduction="sum")
            loss = losses.Warmup(before, loss, hyper["warmup_steps"])
        return loss, _call(self.teacher, hyper, facts)


def updates_per_batch(hyper: Mapping[str, Any]) -> int:
    """How many updates in a row a method makes on each batch."""
    return int(hyper.get("outer_steps", 1))


def hyper_parameters(method: str, task: str) -> type[Section]:
    """The recipe section of a method for a task: names, types, defaults and descriptions."""
    defaults = find_task(task).method_defaults.get(method, {})
    section: dict[str, Any] = {}
    for name, field in METHODS[method].fields.items():
        about = Field(
            defaults.get(name, _default(field)),
            description=_for_recipes(field.doc),
            strict=None if get_origin(field.kind) is not tuple else False,
        )
        section[name] = (_without_tensor(field.kind), about)
    loss, teacher = map(_keywords, (METHODS[method].loss, METHODS[method].teacher))
    further = loss | (_WARMUP if METHODS[method].warmup else {}) | teacher
    for name, (kind, default) in further.items():
        section.setdefault(name, (kind, defaults.get(name, default)))
    return create_model("MethodSection", __base__=Section, **section)


def _default(field: fields.Field) -> Any:
    if field.default is fields.REQUIRED:
        return ...
    return float(field.default) if field.kind is float else field.default


def _without_tensor(kind: Any) -> Any:
    """A type as a recipe can give it."""
    return float if kind == float | Tensor else kind


def _for_recipes(doc: str) -> str:
    """A description in the words of YAML and Markdown, as a sentence."""
    doc = re.sub(r":\w+:`(.+?)`", r"`\1`", doc).replace("``", "`")
    return re.sub(r"\bNone\b", "null", doc) + "."


def methods_for(task: str) -> list[str]:
    """The methods that a task can be trained with."""
    provided = find_task(task).provides
    return [name for name, method in METHODS.items() if method.needs <= provided]


def _signature(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


def _keywords(builder: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The keyword-only parameters of a teacher or a function: name -> (type, default)."""
    if inspect.isclass(builder) and issubclass(builder, Loss):
        return {}
    hints = get_type_hints(
        builder.__init__ if inspect.isclass(builder) else builder, include_extras=True
    )
    return {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in _signature(builder).items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _NOT_HYPER
    }


def _call(builder: Callable[..., Any], hyper: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """Call a builder with those facts and hyper-parameters that it has parameters for."""
    signature = _signature(builder)
    given: dict[str, Any] = {}
    for name, parameter in signature.items():
        if name in hyper:
            given[name] = hyper[name]
        elif name in _SUPPLIED:
            given[name] = _SUPPLIED[name](facts)
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given[name] = facts[name]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values()):
        given |= {name: hyper[name] for name in getattr(builder, "fields", {}) if name in hyper}
    return builder(**given)


def with_fields(loss: type[Loss], *names: str) -> Callable[[Any], Any]:
    """Give a function that builds a loss the fields of another, which it takes by ``**hyper``."""

    def give(builder: Any) -> Any:
        builder.fields = {name: loss.fields[name] for name in names}
        return builder

    return give


# Hyper-parameters of a method that begins with label smoothing: name -> (type, default)
_WARMUP: dict[str, tuple[Any, Any]] = {
    "warmup_steps": (
        Annotated[
            int,
            Field(
                ge=0,
                description="T_w. Steps 1 to T_w - 1 use label smoothing, so 0 and 1 mean no "
                "warm-up. With several outer steps these are batches, not updates.",
            ),
        ],
        0,
    ),
    "warmup_alpha": (
        Annotated[
            float, Field(ge=0, le=1, description="alpha of label smoothing during the warm-up.")
        ],
        0.1,
    ),
}


@with_fields(losses.HeldLABOLoss, "tau", "confidence", "alpha", "rho")
def labo_for_classes(
    num_classes: int = 1,
    *,
    rescale: Annotated[
        bool,
        Field(
            description="divide the loss by the share of the label that LABO keeps in the end, so "
            "that the learning rate of cross entropy fits, also that of a warm-up. Ours, not the "
            "paper's."
        ),
    ] = False,
    reduction: str = "mean",
    **hyper: Any,
) -> Loss:
    """Optimal instance-specific smoothing in closed form, after a warm-up with ls.

    Reference:
        Lu et al. 2023.
    """
    if hyper.get("confidence") is not None:  # which sets tau
        hyper = {**hyper, "num_classes": num_classes}
        hyper.pop("tau", None)
    loss = losses.HeldLABOLoss(**hyper, reduction=reduction)
    if not rescale:
        return loss
    kept = smoothing.stationary_label_weight(
        num_classes, tau=loss.tau, alpha=loss.alpha, rho=loss.rho
    )
    if kept == 0:
        raise ValueError("rescale needs tau above 1 and alpha below 1: no label is kept")
    return losses.HeldLABOLoss(**hyper, multiplier=1 / kept, reduction=reduction)


_SPECIAL: dict[str, Method] = {
    "dft": Method(
        losses.DFTLoss,
        from_scratch="dft is for fine-tuning: it weighs each token by its probability, which is "
        "almost 0 in a new model, and the model may learn one token only",
    ),
    "kd": Method(
        losses.DistillationLoss,
        Frozen,
        about="knowledge distillation from the run named by method.teacher",
    ),
    "topk-kd": Method(
        losses.TopKDistillationLoss,
        Stored,
        needs=frozenset({"stored_teacher"}),
        about="distillation from the k most probable tokens that `labo teacher` stored",
        paper="Hinton et al. 2015",
    ),
    "dkd": Method(losses.DecoupledDistillationLoss, Frozen),
    "tf-kd-self": Method(
        losses.DistillationLoss,
        Frozen,
        about="distillation from an earlier run of the same model, named by method.teacher",
        paper="Yuan et al. 2020",
    ),
    "cs-kd": Method(losses.CSKDLoss, SameClassPeer, needs=frozenset({"peers"})),
    "beta-ls": Method(losses.BetaSmoothingLoss, EMA, needs=frozenset({"one_target_per_sample"})),
    "kr-ls": Method(losses.KRLSLoss, needs=frozenset({"class_table"})),
    "ps-kd": Method(losses.PSKDLoss, past_self),
    "ols": Method(losses.OnlineLabelSmoothingLoss, needs=frozenset({"class_table"})),
    "mls": Method(losses.MaskedLabelSmoothingLoss, needs=frozenset({"vocabulary_groups"})),
    "wls": Method(losses.WeightedLabelSmoothingLoss, needs=frozenset({"vocabulary_groups"})),
    "als": Method(
        losses.AdaptiveSmoothingLoss,
        warmup=True,
        about="Label smoothing with the alpha of LABO, after a warm-up with ls",
        paper="Lee et al. 2022",
    ),
    "als-past": Method(
        losses.PriorSmoothingLoss,
        past_self,
        warmup=True,
        about="Smoothing towards an earlier prediction with the alpha of LABO, after a warm-up "
        "with ls",
        paper="Lee et al. 2022",
    ),
    "connet": Method(losses.ConNetLoss, InnerStates, needs=frozenset({"inner_states"})),
    "r-drop": Method(losses.RDropLoss, SecondPass),
    "labo": Method(labo_for_classes, held_label, warmup=True),
}
# A loss without a teacher or a need is a method as it is.
_PLAIN = {
    name: Method(loss)
    for name, loss in losses.LOSSES.items()
    if name in _SPECIAL or loss.teacher_argument is None
}
METHODS = Registry("method", {**_PLAIN, **_SPECIAL}, {"ce": "base"})


def method_name(spelling: object) -> str:
    """The name in ``METHODS`` for a spelling such as cs-kd, cskd or CS_KD."""
    try:
        return METHODS.name_of(spelling)
    except UnknownNameError as error:
        raise RecipeError([f"method: {error}"]) from None


def resolve(section: object, task: str) -> dict[str, Any]:
    """A recipe's ``method`` with every hyper-parameter of the method filled in and checked."""
    given = {"name": section} if isinstance(section, str) else section
    if not isinstance(given, dict) or "name" not in given:
        raise RecipeError([f"method: missing; set method=NAME (known: {', '.join(METHODS)})"])
    name = method_name(given["name"])
    if name not in (suited := methods_for(task)):
        missing = ", ".join(sorted(METHODS[name].needs - find_task(task).provides))
        raise RecipeError(
            [
                f"method: {name} needs {missing}, which {task} does not provide "
                f"(known: {', '.join(suited)})"
            ]
        )
    kind = hyper_parameters(name, task)
    by_confidence = name == "labo" and given.get("confidence") is not None
    if by_confidence:
        if given.get("tau") is not None:
            raise RecipeError(
                ["method: tau and confidence are given; confidence sets tau, so set tau=null"]
            )
        given = {key: value for key, value in given.items() if key != "tau"}
    try:
        hyper = kind.model_validate({key: given[key] for key in given if key != "name"})
    except ValidationError as error:
        raise RecipeError(explain(error, kind, "method.")) from error
    known = METHODS[name].fields
    problems = [_range_problem(known[key], value) for key, value in hyper if key in known]
    if any(problems):
        raise RecipeError([problem for problem in problems if problem])
    return {"name": name, **hyper.model_dump()} | ({"tau": None} if by_confidence else {})


def _range_problem(field: fields.Field, value: object) -> str | None:
    try:
        field.check(value)
    except ValueError as error:
        return f"method.{field.name}: {error}"
    return None
