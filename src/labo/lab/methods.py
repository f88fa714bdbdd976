"""Every method the lab can train with, by name: the one list that all else reads.

A method is a loss, perhaps a teacher, and defaults per task. Its hyper-parameters are the
keyword-only parameters of the two; their positional parameters are what the run knows (the number
of classes, the number of epochs, the model, ...). So a new method is a class and an entry here: the
recipe's ``method`` section, its checks, the command line and ``labo methods`` follow.

Where a paper leaves a value open, or its authors' code differs from it, the choice made here is
the default, and the variant is a hyper-parameter; ``labo methods`` shows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field, ValidationError, create_model
from torch import Tensor, nn

from .. import losses
from .._checks import check_hyper
from .._names import unknown_name
from .config import RecipeError, Section, explain
from .teachers import EMA, Frozen, SameClassPeer, Teacher, past_self

# Parameters of a loss that are no choice of a recipe.
_NOT_HYPER = {"weight", "ignore_index", "reduction", "dim", "padding_idx", "impl", "inplace"}

IMAGES = "image_classification"
TRANSLATION = "translation"


@dataclass(frozen=True)
class Method:
    """A way to regularize labels.

    Attributes:
        summary: what it does, in a line.
        reference: who proposed it.
        loss: builds the loss.
        teacher: builds the teacher.
        defaults: per task, where they differ from the defaults of loss and teacher.
        tasks: what it can be used for.
        mixes: whether labels may be mixed (mixup, CutMix).
    """

    summary: str
    reference: str
    loss: Callable[..., nn.Module]
    teacher: Callable[..., Teacher] = Teacher
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tasks: tuple[str, ...] = (IMAGES, TRANSLATION)
    mixes: bool = False

    def hyper_parameters(self, task: str) -> type[Section]:
        """The recipe section of this method for a task: names, types and defaults."""
        defaults = self.defaults.get(task, {})
        fields: dict[str, Any] = {}
        for builder in (self.loss, self.teacher):
            for name, (kind, default) in _keywords(builder).items():
                fields[name] = (kind, defaults.get(name, default))
        return create_model("Method", __base__=Section, **fields)

    def build(
        self, hyper: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> tuple[nn.Module, Teacher]:
        """The loss, which sums over its samples, and the teacher."""
        loss = _call(self.loss, {**hyper, "reduction": "sum"}, facts)
        teacher = _call(self.teacher, hyper, facts)
        return loss, teacher


def _signature(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


def _keywords(builder: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The hyper-parameters of a loss or teacher: name -> (type, default)."""
    hints = get_type_hints(
        builder.__init__ if inspect.isclass(builder) else builder, include_extras=True
    )
    return {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in _signature(builder).items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and name not in _NOT_HYPER
        and Tensor not in get_args(hints[name])
    }


def _call(builder: Callable[..., Any], hyper: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """Call a builder with the facts and hyper-parameters it asks for."""
    signature = _signature(builder)
    asked = {
        name: facts[name]
        for name, parameter in signature.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    return builder(**asked, **{name: value for name, value in hyper.items() if name in signature})


def warmed_up_labo(
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    warmup_steps: Annotated[int, Field(ge=0)] = 0,
    warmup_alpha: Annotated[float, Field(ge=0, le=1)] = 0.1,
    reduction: str = "mean",
) -> losses.Warmup:
    """Algorithm 1 of the paper: label smoothing until step ``warmup_steps``, LABO from there."""
    before = losses.LabelSmoothingLoss(alpha=warmup_alpha, reduction=reduction)
    after = losses.LABOLoss(tau=tau, alpha=alpha, rho=rho, reduction=reduction)
    return losses.Warmup(before, after, warmup_steps)


def masked_smoothing(
    task: Any, *, alpha: float = 0.1, reduction: str = "mean"
) -> losses.MaskedLabelSmoothingLoss:
    """Label smoothing over the tokens of the target language."""
    mask = task.vocabulary_groups() < 2
    return losses.MaskedLabelSmoothingLoss(mask, alpha=alpha, reduction=reduction)


def weighted_smoothing(
    task: Any,
    *,
    alpha: float = 0.1,
    shares: Annotated[tuple[float, float, float], Field(strict=False)] = (0.4, 0.4, 0.2),
    normalize: bool = True,
    reduction: str = "mean",
) -> losses.WeightedLabelSmoothingLoss:
    """Label smoothing with shares for target-only, common and source-only tokens."""
    return losses.WeightedLabelSmoothingLoss(
        task.vocabulary_groups(),
        alpha=alpha,
        shares=shares,
        normalize=normalize,
        reduction=reduction,
    )


METHODS: dict[str, Method] = {
    "base": Method(
        "cross entropy, no regularization",
        "the baseline",
        losses.CrossEntropyLoss,
        mixes=True,
    ),
    "ls": Method(
        "label smoothing: mass alpha spread evenly over the classes",
        "Szegedy et al. 2016",
        losses.LabelSmoothingLoss,
        mixes=True,
    ),
    "cp": Method(
        "confidence penalty: reward the entropy of the prediction",
        "Pereyra et al. 2017",
        losses.ConfidencePenaltyLoss,
        mixes=True,
    ),
    "fl": Method(
        "focal loss: less weight on well-fitted samples",
        "Lin et al. 2017",
        losses.FocalLoss,
    ),
    "afl": Method(
        "anti-focal loss: more weight on well-fitted samples",
        "Raunak et al. 2020",
        losses.AntiFocalLoss,
    ),
    "kd": Method(
        "knowledge distillation from the run named by method.teacher",
        "Hinton et al. 2015",
        losses.DistillationLoss,
        Frozen,
        # tau: the smallest of the paper's grid {5, 10, 20, 40}; with the batch mean of the KL the
        # size of its gradient hardly depends on it.
        defaults={IMAGES: {"alpha": 0.9, "tau": 5.0}, TRANSLATION: {"alpha": 0.5, "tau": 1.0}},
        mixes=True,
    ),
    "tf-kd-self": Method(
        "distillation from an earlier run of the same model, named by method.teacher",
        "Yuan et al. 2020",
        losses.DistillationLoss,
        Frozen,
        # The authors' scale is kl_reduction=elementwise with a multiplier per model.
        defaults={IMAGES: {"alpha": 0.95, "tau": 20.0}, TRANSLATION: {"alpha": 0.5, "tau": 1.0}},
        mixes=True,
    ),
    "cs-kd": Method(
        "agree with the prediction for another sample of the same class",
        "Yun et al. 2020",
        losses.CSKDLoss,
        SameClassPeer,
        tasks=(IMAGES,),
    ),
    "tf-reg": Method(
        "distillation from a hand-made teacher",
        "Yuan et al. 2020",
        losses.TFRegLoss,
    ),
    "beta-ls": Method(
        "random smoothing, ranked by the confidence of an averaged model",
        "Zhang and Sabuncu 2020",
        losses.BetaSmoothingLoss,
        EMA,
        tasks=(IMAGES,),
    ),
    "kr-ls": Method(
        "a learned table of how the other classes resemble each class",
        "Ding et al. 2021",
        losses.KRLSLoss,
        tasks=(IMAGES,),  # its table has classes x classes entries
    ),
    "ps-kd": Method(
        "labels softened by the model's predictions of the epoch before",
        "Kim et al. 2021",
        losses.PSKDLoss,
        past_self,
        defaults={TRANSLATION: {"alpha": 0.7}},
    ),
    "ols": Method(
        "a table of soft labels gathered from correct predictions, epoch by epoch",
        "Zhang et al. 2021",
        losses.OnlineLabelSmoothingLoss,
        tasks=(IMAGES,),  # its table has classes x classes entries
    ),
    "ger": Method(
        "generalized entropy regularization, between confidence penalty and label smoothing",
        "Meister et al. 2020",
        losses.GeneralizedEntropyLoss,
        mixes=True,
    ),
    "mls": Method(
        "label smoothing over the tokens of the target language only",
        "Chen et al. 2022",
        masked_smoothing,
        tasks=(TRANSLATION,),
    ),
    "wls": Method(
        "label smoothing with shares for target-only, common and source-only tokens",
        "Chen et al. 2022",
        weighted_smoothing,
        tasks=(TRANSLATION,),
    ),
    "labo": Method(
        "optimal instance-specific smoothing in closed form, after a warm-up with ls",
        "Lu et al. 2023",
        warmed_up_labo,
        # The paper gives neither tau nor a warm-up for images: tau as for translation, no warm-up.
        # labo.smoothing.tau_for_confidence chooses a tau by the confidence it leads to.
        defaults={TRANSLATION: {"warmup_steps": 5000}},
        mixes=True,
    ),
}


def method_name(name: object) -> str:
    """The name in ``METHODS``, however it is written: cs-kd, cskd, CS_KD."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "").replace(" ", "")

    names = {plain(known): known for known in METHODS}
    if plain(str(name)) not in names:
        raise RecipeError([f"method: {unknown_name('method', name, METHODS)}"])
    return names[plain(str(name))]


def resolve(section: object, task: str) -> dict[str, Any]:
    """A recipe's ``method`` with every hyper-parameter of the method filled in and checked."""
    given = {"name": section} if isinstance(section, str) else section
    if not isinstance(given, dict) or "name" not in given:
        raise RecipeError([f"method: give method=NAME (known: {', '.join(METHODS)})"])
    name = method_name(given["name"])
    if task not in METHODS[name].tasks:
        suited = ", ".join(known for known, method in METHODS.items() if task in method.tasks)
        raise RecipeError([f"method: {name} is not for {task}; there are {suited}"])
    kind = METHODS[name].hyper_parameters(task)
    try:
        hyper = kind.model_validate({key: given[key] for key in given if key != "name"})
    except ValidationError as error:
        raise RecipeError(explain(error, kind, "method.")) from error
    if problems := [problem for key, value in hyper if (problem := _range_problem(key, value))]:
        raise RecipeError(problems)
    return {"name": name, **hyper.model_dump()}


def _range_problem(key: str, value: object) -> str | None:
    try:
        check_hyper(**{key: value})
    except ValueError as error:
        return f"method.{key}: {error}"
    return None
