"""``METHODS``: every method the lab can train with, by name.

A method is a loss and, for some, a teacher. Its hyper-parameters are the keyword-only parameters of
the two. Their positional parameters are supplied by the run (the number of classes, the number of
epochs, the model, ...). A new method is a class and an entry here. The ``method`` section of a
recipe, its checks, ``labo methods`` and the page of recipe keys follow from them. A task may
override the defaults of a method (``method_defaults`` of the task).

Where a paper does not give a value, or the authors' code differs from the paper, one choice is the
default and the alternative is a hyper-parameter.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field, ValidationError, create_model
from torch import Tensor, nn

from .. import losses, smoothing
from .._checks import check_hyper
from .._names import unknown_name
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

# Parameters of a loss that a recipe cannot set.
_NOT_HYPER = {"weight", "ignore_index", "reduction", "dim", "padding_idx"} | {
    *("z_loss", "impl", "inplace")
}


@dataclass(frozen=True)
class Method:
    """A label regularization method.

    Attributes:
        summary: one line on what it does.
        reference: the authors and the year of its paper.
        loss: builds the loss.
        teacher: builds the teacher.
        needs: what the task must provide, see :attr:`labo.lab.tasks.Task.provides`.
        mixes: whether it accepts mixed labels (mixup, CutMix).
        from_scratch: what a user should know who trains a model with many classes from scratch.
    """

    summary: str
    reference: str
    loss: Callable[..., nn.Module]
    teacher: Callable[..., Teacher] = Teacher
    needs: frozenset[str] = frozenset()
    mixes: bool = False
    from_scratch: str | None = None

    def build(
        self, hyper: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> tuple[nn.Module, Teacher]:
        """The loss, with reduction "sum", and the teacher.

        Raises:
            RequestError: the hyper-parameters do not go together.
        """
        try:
            loss = _call(self.loss, {**hyper, "reduction": "sum"}, facts)
        except ValueError as error:
            raise RequestError(f"method: {error}") from error
        teacher = _call(self.teacher, hyper, facts)
        return loss, teacher


def updates_per_batch(hyper: Mapping[str, Any]) -> int:
    """How many updates in a row a method makes on each batch."""
    return int(hyper.get("outer_steps", 1))


def hyper_parameters(method: str, task: str) -> type[Section]:
    """The recipe section of a method for a task: names, types, defaults and descriptions."""
    defaults = find_task(task).method_defaults.get(method, {})
    fields: dict[str, Any] = {}
    for builder in (METHODS[method].loss, METHODS[method].teacher):
        described = _descriptions(builder)
        for name, (kind, default) in _keywords(builder).items():
            about = Field(defaults.get(name, default), description=described.get(name))
            fields[name] = (kind, about)
    return create_model("MethodSection", __base__=Section, **fields)


def methods_for(task: str) -> list[str]:
    """The methods that a task can be trained with."""
    provided = find_task(task).provides
    return [name for name, method in METHODS.items() if method.needs <= provided]


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


_ARGUMENTS = re.compile(r"^( *)Args:\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def _descriptions(builder: Callable[..., Any]) -> dict[str, str]:
    """Name -> text, from the ``Args`` of the docstring of a loss and of its function."""
    found: dict[str, str] = {}
    for documented in (getattr(builder, "function", None), builder):
        for section in _ARGUMENTS.findall(f"{inspect.getdoc(documented)}\n"):
            for names, text in _ARGUMENT.findall(section[1]):
                for name in names.split(", "):
                    found[name] = " ".join(text.split())
    return found


def _call(builder: Callable[..., Any], hyper: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """Call a builder with those facts and hyper-parameters that it has parameters for."""
    signature = _signature(builder)
    asked = {
        name: facts[name]
        for name, parameter in signature.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    return builder(**asked, **{name: value for name, value in hyper.items() if name in signature})


def warmed_up_labo(
    num_classes: int = 1,
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    rescale: bool = False,
    warmup_steps: Annotated[int, Field(ge=0)] = 0,
    warmup_alpha: Annotated[float, Field(ge=0, le=1)] = 0.1,
    reduction: str = "mean",
) -> losses.Warmup:
    """LABO after a warm-up with label smoothing (Algorithm 1 of the paper).

    Args:
        tau: temperature of the smoothing distribution; the paper searches {1.15, 1.25}.
        alpha: "adaptive", or a number in [0, 1].
        rho: how far the entropy of a prediction lowers adaptive alpha.
        rescale: divide the loss by the share of the label that LABO keeps in the end, so that the
            learning rate of cross entropy fits, also that of a warm-up. Ours, not the paper's.
        warmup_steps: T_w. Steps 1 to T_w - 1 use label smoothing, so 0 and 1 mean no warm-up. With
            several outer steps these are batches, not updates.
        warmup_alpha: alpha of label smoothing during the warm-up.
    """
    before = losses.LabelSmoothingLoss(alpha=warmup_alpha, reduction=reduction)
    multiplier = 1.0
    if rescale:
        kept = smoothing.stationary_label_weight(num_classes, tau=tau, alpha=alpha, rho=rho)
        if kept == 0:
            raise ValueError("rescale needs tau above 1 and alpha below 1: no label is kept")
        multiplier = 1 / kept
    hyper: dict[str, Any] = {"tau": tau, "alpha": alpha, "rho": rho, "multiplier": multiplier}
    after = losses.HeldLABOLoss(**hyper, reduction=reduction)
    return losses.Warmup(before, after, warmup_steps)


def max_suppression(
    epochs: int = 1,
    *,
    lam: float = 0.1,
    final_lam: float | None = None,
    reduction: str = "mean",
) -> losses.MaxSuppressionLoss:
    """Max suppression, with a constant lambda or with that of the authors' code.

    Args:
        lam: strength lambda; with final_lam that of the first epoch.
        final_lam: lambda of the last epoch, reached linearly; null keeps lambda constant. The
            authors' code goes from 0.1 to 0.2.
    """
    return losses.MaxSuppressionLoss(
        lam=lam, final_lam=final_lam, epochs=epochs, reduction=reduction
    )


def masked_smoothing(
    task: Any, *, alpha: float = 0.1, reduction: str = "mean"
) -> losses.MaskedLabelSmoothingLoss:
    """Label smoothing over the tokens of the target language.

    Args:
        alpha: mass moved away from the label, in [0, 1].
    """
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
    """Label smoothing with shares for target-only, common and source-only tokens.

    Args:
        alpha: mass moved away from the label, in [0, 1].
        shares: shares of target-only, common and source-only tokens in the smoothing mass.
        normalize: make the label sum to 1; False is the authors' code.
    """
    return losses.WeightedLabelSmoothingLoss(
        task.vocabulary_groups(),
        alpha=alpha,
        shares=shares,
        normalize=normalize,
        reduction=reduction,
    )


def confidence_network(
    model: Any,
    *,
    alpha: float = 0.1,
    lam: float = 30.0,
    decay_steps: float = 30_000.0,
    trust: float = 0.5,
    reduction: str = "mean",
) -> losses.ConNetLoss:
    """ConNet-LS for hidden states of the size of the model.

    Args:
        alpha: smoothing of a token of mean confidence, in [0, 1].
        lam: the price of a low confidence at the start of the training.
        decay_steps: steps in which that price falls to 1/e; 30000 or 6000 in the authors' settings.
        trust: probability that the label does not help a token, in [0, 1].
    """
    return losses.ConNetLoss(
        model.width, alpha=alpha, lam=lam, decay_steps=decay_steps, trust=trust, reduction=reduction
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
    "maxsup": Method(
        "max suppression: the penalty of label smoothing, on the largest logit",
        "Zhou et al. 2025",
        max_suppression,
        mixes=True,
    ),
    "mbls": Method(
        "margin-based label smoothing: penalize logits far below the largest",
        "Liu et al. 2022",
        losses.MarginSmoothingLoss,
        mixes=True,
    ),
    "fl": Method(
        "focal loss: less weight on samples with a high probability",
        "Lin et al. 2017",
        losses.FocalLoss,
    ),
    "afl": Method(
        "anti-focal loss: more weight on samples with a high probability",
        "Raunak et al. 2020",
        losses.AntiFocalLoss,
    ),
    "poly": Method(
        "Poly-1: cross entropy plus epsilon (1 - p_y)",
        "Leng et al. 2022",
        losses.Poly1Loss,
        mixes=True,
    ),
    "logitnorm": Method(
        "cross entropy of logits divided by their norm",
        "Wei et al. 2022",
        losses.LogitNormLoss,
        mixes=True,
    ),
    "dft": Method(
        "cross entropy times the probability of the target, held constant",
        "Wu et al. 2025",
        losses.DFTLoss,
        from_scratch="dft is for fine-tuning: it weighs each token by its probability, which is "
        "almost 0 in a new model, and the model may learn one token only",
    ),
    "eaft": Method(
        "cross entropy times the entropy of the prediction, held constant",
        "Diao et al. 2026",
        losses.EAFTLoss,
        mixes=True,
    ),
    "kd": Method(
        "knowledge distillation from the run named by method.teacher",
        "Hinton et al. 2015",
        losses.DistillationLoss,
        Frozen,
        mixes=True,
    ),
    "topk-kd": Method(
        "distillation from the k most probable tokens that `labo teacher` stored",
        "Hinton et al. 2015",
        losses.TopKDistillationLoss,
        Stored,
        needs=frozenset({"stored_teacher"}),
    ),
    "dkd": Method(
        "decoupled distillation: target class and other classes of the teacher weighted apart",
        "Zhao et al. 2022",
        losses.DecoupledDistillationLoss,
        Frozen,
    ),
    "tf-kd-self": Method(
        "distillation from an earlier run of the same model, named by method.teacher",
        "Yuan et al. 2020",
        losses.DistillationLoss,
        Frozen,
        mixes=True,
    ),
    "cs-kd": Method(
        "match the prediction for another sample of the same class",
        "Yun et al. 2020",
        losses.CSKDLoss,
        SameClassPeer,
        needs=frozenset({"peers"}),
    ),
    "tf-reg": Method(
        "distillation from a hand-designed teacher",
        "Yuan et al. 2020",
        losses.TFRegLoss,
    ),
    "beta-ls": Method(
        "random smoothing, ranked by the confidence of an averaged model",
        "Zhang and Sabuncu 2020",
        losses.BetaSmoothingLoss,
        EMA,
        needs=frozenset({"one_target_per_sample"}),
    ),
    "kr-ls": Method(
        "a learned table of how similar classes are",
        "Ding et al. 2021",
        losses.KRLSLoss,
        needs=frozenset({"class_table"}),
    ),
    "ps-kd": Method(
        "labels softened by the predictions of the previous epoch",
        "Kim et al. 2021",
        losses.PSKDLoss,
        past_self,
    ),
    "ols": Method(
        "soft labels averaged over the correct predictions of the previous epoch",
        "Zhang et al. 2021",
        losses.OnlineLabelSmoothingLoss,
        needs=frozenset({"class_table"}),
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
        needs=frozenset({"vocabulary_groups"}),
    ),
    "wls": Method(
        "label smoothing with shares for target-only, common and source-only tokens",
        "Chen et al. 2022",
        weighted_smoothing,
        needs=frozenset({"vocabulary_groups"}),
    ),
    "connet": Method(
        "a learned confidence decides how much each token is smoothed",
        "Lu et al. 2022",
        confidence_network,
        InnerStates,
        needs=frozenset({"inner_states"}),
    ),
    "r-drop": Method(
        "two passes with different dropout are to agree",
        "Wu et al. 2021",
        losses.RDropLoss,
        SecondPass,
        mixes=True,
    ),
    "labo": Method(
        "optimal instance-specific smoothing in closed form, after a warm-up with ls",
        "Lu et al. 2023",
        warmed_up_labo,
        held_label,
        mixes=True,
    ),
}


def method_name(name: object) -> str:
    """The name in ``METHODS`` for a spelling such as cs-kd, cskd or CS_KD."""

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
