"""The losses as Modules, with hyper-parameters and state.

Each has the name stem of its function in :mod:`labo.functional`, which documents the equation and
the arguments. ``LOSSES`` lists them by short name.

Losses with state need two calls from the training loop: ``step()`` after each optimizer step
(:class:`Warmup`) and ``end_epoch()`` after each epoch (:class:`OnlineLabelSmoothingLoss`,
:class:`PSKDLoss`, :class:`DecoupledDistillationLoss`). Their state is in ``state_dict()``, so that
a run can be resumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import functional as F
from ._checks import TeacherError, check_hyper
from ._names import Registry
from ._rows import Rows
from .fused import linear, spec
from .fused.spec import Spec

__all__ = [
    "LOSSES",
    "AntiFocalLoss",
    "BetaSmoothingLoss",
    "CSKDLoss",
    "ConNetLoss",
    "ConfidencePenaltyLoss",
    "CrossEntropyLoss",
    "DFTLoss",
    "DecoupledDistillationLoss",
    "DistillationLoss",
    "EAFTLoss",
    "FocalLoss",
    "GeneralizedEntropyLoss",
    "HeldLABOLoss",
    "KRLSLoss",
    "LABOLoss",
    "LabelSmoothingLoss",
    "LogitNormLoss",
    "MarginSmoothingLoss",
    "MaskedLabelSmoothingLoss",
    "MaxSuppressionLoss",
    "OnlineLabelSmoothingLoss",
    "PSKDLoss",
    "Poly1Loss",
    "RDropLoss",
    "TFRegLoss",
    "TopKDistillationLoss",
    "Warmup",
    "WeightedLabelSmoothingLoss",
]


_SHARED = ("weight", "ignore_index", "reduction", "dim")


class _Loss(nn.Module):
    """The base of the Modules: the arguments of ``F.cross_entropy``, checks, and a repr.

    A subclass sets ``function`` and passes its hyper-parameters to ``__init__``. They become
    attributes; tensors become buffers.
    """

    function: Callable[..., Tensor]
    # The function of labo.fused.spec that describes the loss, if the fused backends have it.
    spec_of: Callable[..., Spec | None] | None = None
    weight: Tensor | None
    ignore_index: int
    reduction: str
    dim: int
    # Whether the value of a row depends on that row alone and the loss has no parameters.
    rowwise = True
    # The name of the function's argument for teacher logits, if it has one.
    teacher_argument: str | None = None
    teacher_optional = False
    # Whether the teacher is given as stored classes and their log-probabilities, not as logits.
    teacher_is_stored = False
    # Whether ``alpha`` is the weight of a smoothing distribution in the label.
    smooths = False
    _function_name: str
    _spec_arguments: tuple[str, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "function"):
            cls._function_name = linear.register(cls.function)
        if cls.spec_of is not None:
            cls._spec_arguments = tuple(inspect.signature(cls.spec_of).parameters)

    def __init__(
        self, weight: Tensor | None, ignore_index: int, reduction: str, dim: int, **hyper: Any
    ) -> None:
        super().__init__()
        check_hyper(reduction=reduction, **hyper)
        self._hyper = tuple(hyper)
        shared = {
            "weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "dim": dim,
        }
        for name, value in (hyper | shared).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the function, with their current values."""
        return {name: getattr(self, name) for name in (*self._hyper, *_SHARED)}

    def forward(
        self, logits: Tensor, target: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        self.check_teacher(teacher_logits is not None)
        arguments = self.arguments()
        if teacher_logits is None:
            return type(self).function(logits, target, **arguments)
        return type(self).function(logits, target, teacher_logits, **arguments)

    def check_teacher(self, given: bool) -> None:
        """Refuse missing teacher logits, and teacher logits that the loss does not take."""
        name = type(self).__name__
        if given and self.teacher_argument is None:
            raise TeacherError(f"{name} takes no teacher logits")
        if not given and self.teacher_argument is not None and not self.teacher_optional:
            raise TeacherError(
                f"{name} needs teacher_logits: the logits of a teacher, of the shape of the logits"
            )

    def row_function(self) -> tuple[str, dict[str, Any]]:
        """For :func:`labo.linear_loss`: the name of the function, and its arguments for one value
        per row by the reference.
        """
        arguments = self.arguments() | {"reduction": "none"}
        if "impl" in arguments:
            arguments |= {"impl": "reference", "inplace": False}
        return self._function_name, arguments

    def spec(self, teacher: bool = True) -> Spec | None:
        """The loss as the fused backends know it, or None if they do not compute it.

        Args:
            teacher: whether teacher logits are given, if the loss takes any.
        """
        if self.spec_of is None:
            return None
        arguments = self.arguments()
        chosen: dict[str, Any] = {name: arguments[name] for name in self._spec_arguments}
        return self.spec_of(**chosen)

    @property
    def smoothing_weight(self) -> float | str:
        """The weight of the smoothing distribution: a number, "adaptive", or 0 without one."""
        weight: float | str = self.alpha if self.smooths else 0.0  # type: ignore[assignment]
        return weight

    def class_row(self, num_classes: int) -> Tensor | None:
        """The row of classes, (K,), that the formula of the loss takes, if it takes one."""
        return None

    def extra_repr(self) -> str:
        usual: dict[str, Any] = {
            "weight": None,
            "ignore_index": -100,
            "reduction": "mean",
            "dim": -1,
        }
        usual |= {"z_loss": 0.0, "impl": "auto", "inplace": False}
        parts = []
        for name in (*self._hyper, *_SHARED):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                parts.append(f"{name}=<{len(value)} classes>")
            elif name not in usual or value != usual[name]:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)


class CrossEntropyLoss(_Loss):
    """Cross entropy, the baseline.

    See :func:`labo.functional.cross_entropy_loss`.

    Example:
        >>> loss = CrossEntropyLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4493)
    """

    function = staticmethod(F.cross_entropy_loss)
    spec_of = staticmethod(spec.cross_entropy)

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **fast)


class LABOLoss(_Loss):
    """LABO: optimal instance-specific label smoothing, in closed form.

    See :func:`labo.functional.labo_loss`.

    Example:
        >>> loss = LABOLoss(tau=1.25)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(1.1205)
    """

    function = staticmethod(F.labo_loss)
    smooths = True
    spec_of = staticmethod(spec.labo)
    tau: float
    alpha: float | str
    rho: float
    multiplier: float
    alpha_grad: bool

    def __init__(
        self,
        *,
        tau: float = 1.25,
        alpha: float | str = "adaptive",
        rho: float = 0.5,
        multiplier: float = 1.0,
        alpha_grad: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"tau": tau, "alpha": alpha, "rho": rho, "multiplier": multiplier}
        hyper["alpha_grad"] = alpha_grad
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)


class LabelSmoothingLoss(_Loss):
    """Label smoothing, in a named convention.

    See :func:`labo.functional.label_smoothing_loss`.

    Example:
        >>> loss = LabelSmoothingLoss(alpha=0.1)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5968)
    """

    function = staticmethod(F.label_smoothing_loss)
    smooths = True
    spec_of = staticmethod(spec.label_smoothing)
    alpha: float
    convention: str
    padding_idx: int | None

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        convention: str = "torch",
        padding_idx: int | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"alpha": alpha, "convention": convention, "padding_idx": padding_idx}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)

    def class_row(self, num_classes: int) -> Tensor | None:
        if self.convention != "joeynmt":
            return None
        return F._not_padding(torch.empty(0, num_classes), -1, self.padding_idx)


class ConfidencePenaltyLoss(_Loss):
    """Cross entropy minus beta times the entropy of the prediction.

    See :func:`labo.functional.confidence_penalty_loss`.

    Example:
        >>> loss = ConfidencePenaltyLoss(beta=0.1)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.3532)
    """

    function = staticmethod(F.confidence_penalty_loss)
    spec_of = staticmethod(spec.confidence_penalty)

    def __init__(
        self,
        *,
        beta: float = 0.1,
        threshold: float | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight, ignore_index, reduction, dim, beta=beta, threshold=threshold, **fast
        )


class MaxSuppressionLoss(_Loss):
    """Max suppression: the penalty of label smoothing, on the largest logit.

    With ``final_lam`` the strength goes linearly from ``lam`` in the first of ``epochs`` epochs to
    ``final_lam`` in the last one. Call ``end_epoch()`` after each epoch.
    See :func:`labo.functional.max_suppression_loss`.

    Args:
        lam: strength lambda; with ``final_lam`` that of the first epoch.
        final_lam: lambda of the last epoch; None keeps lambda constant. The authors' code goes from
            0.1 to 0.2.
        epochs: epochs of the whole training; needed with ``final_lam``.

    Example:
        >>> loss = MaxSuppressionLoss(lam=0.1)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5968)
    """

    function = staticmethod(F.max_suppression_loss)
    spec_of = staticmethod(spec.max_suppression)
    lam: float
    epoch: Tensor

    def __init__(
        self,
        *,
        lam: float = 0.1,
        final_lam: float | None = None,
        epochs: int | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, lam=lam, **fast)
        check_hyper(final_lam=final_lam)
        if final_lam is not None and (epochs is None or epochs < 1):
            raise ValueError(f"final_lam needs epochs, 1 or more, got epochs={epochs!r}")
        self.final_lam, self.epochs = final_lam, epochs or 1
        if final_lam is not None:
            self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))

    def arguments(self) -> dict[str, Any]:
        if self.final_lam is None:
            return super().arguments()
        done = _progress(self.epoch - 1, max(1, self.epochs - 1))
        return super().arguments() | {"lam": self.lam + (self.final_lam - self.lam) * done}

    def end_epoch(self) -> None:
        if self.final_lam is not None:
            self.epoch += 1

    def extra_repr(self) -> str:
        schedule = f"final_lam={self.final_lam}, epochs={self.epochs}, "
        return ("" if self.final_lam is None else schedule) + super().extra_repr()


class MarginSmoothingLoss(_Loss):
    """Margin-based label smoothing: logits may differ by a margin without a penalty.

    See :func:`labo.functional.margin_smoothing_loss`.

    Example:
        >>> loss = MarginSmoothingLoss(lam=0.1, margin=1.5)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.4968)
    """

    function = staticmethod(F.margin_smoothing_loss)
    spec_of = staticmethod(spec.margin_smoothing)

    def __init__(
        self,
        *,
        lam: float = 0.1,
        margin: float = 10.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, lam=lam, margin=margin, **fast)


class FocalLoss(_Loss):
    """Focal loss: less weight on well-fitted samples.

    See :func:`labo.functional.focal_loss`.

    Example:
        >>> loss = FocalLoss(gamma=2)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.0589)
    """

    function = staticmethod(F.focal_loss)
    spec_of = staticmethod(spec.focal)

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        detach_factor: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight, ignore_index, reduction, dim, gamma=gamma, detach_factor=detach_factor, **fast
        )


class AntiFocalLoss(_Loss):
    """Anti-focal loss: more weight on well-fitted samples.

    See :func:`labo.functional.anti_focal_loss`.

    Example:
        >>> loss = AntiFocalLoss(gamma=1, scale=0.5)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.5927)
    """

    function = staticmethod(F.anti_focal_loss)
    spec_of = staticmethod(spec.anti_focal)

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        scale: float = 0.5,
        detach_factor: bool = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight,
            ignore_index,
            reduction,
            dim,
            gamma=gamma,
            scale=scale,
            detach_factor=detach_factor,
            **fast,
        )


class Poly1Loss(_Loss):
    """Poly-1: cross entropy plus epsilon (1 - p_y).

    See :func:`labo.functional.poly1_loss`.

    Example:
        >>> loss = Poly1Loss(epsilon=2)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(1.1732)
    """

    function = staticmethod(F.poly1_loss)
    spec_of = staticmethod(spec.poly1)

    def __init__(
        self,
        *,
        epsilon: float = 2.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, epsilon=epsilon, **fast)


class LogitNormLoss(_Loss):
    """LogitNorm: cross entropy of logits that are divided by their norm.

    See :func:`labo.functional.logit_norm_loss`.

    Example:
        >>> loss = LogitNormLoss(tau=1.0)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.8837)
    """

    function = staticmethod(F.logit_norm_loss)
    spec_of = staticmethod(spec.logit_norm)

    def __init__(
        self,
        *,
        tau: float = 0.04,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, tau=tau, **fast)


class DFTLoss(_Loss):
    """Dynamic fine-tuning: cross entropy times the probability of the target, held constant.

    See :func:`labo.functional.dft_loss`.

    Example:
        >>> loss = DFTLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.2867)
    """

    function = staticmethod(F.dft_loss)
    spec_of = staticmethod(spec.dft)

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **fast)


class EAFTLoss(_Loss):
    """Entropy-adaptive fine-tuning: cross entropy times the entropy of the prediction.

    See :func:`labo.functional.eaft_loss`.

    Example:
        >>> loss = EAFTLoss()
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.3114)
    """

    function = staticmethod(F.eaft_loss)
    spec_of = staticmethod(spec.eaft)

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        top_k: int | None = None,
        normalizer: float | str | None = "log_k",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"gamma": gamma, "top_k": top_k, "normalizer": normalizer}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)


class GeneralizedEntropyLoss(_Loss):
    """Generalized entropy regularization, from confidence penalty to label smoothing.

    See :func:`labo.functional.generalized_entropy_loss`.

    Example:
        >>> loss = GeneralizedEntropyLoss(alpha=0.5, beta=0.7)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.7571)
    """

    function = staticmethod(F.generalized_entropy_loss)
    spec_of = staticmethod(spec.generalized_entropy)

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        beta: float = 0.7,
        prior: Tensor | None = None,
        generator: str = "kl",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"alpha": alpha, "beta": beta, "prior": prior, "generator": generator}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)


class TFRegLoss(_Loss):
    """TF-reg: distillation from a virtual teacher.

    See :func:`labo.functional.tf_reg_loss`.

    Example:
        >>> loss = TFRegLoss(tau=20, multiplier=100)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(1.7040)
    """

    function = staticmethod(F.tf_reg_loss)
    spec_of = staticmethod(spec.tf_reg)

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        tau: float = 20.0,
        mode: str = "repo",
        multiplier: float | None = None,
        confidence: float = 0.99,
        tau_squared: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight,
            ignore_index,
            reduction,
            dim,
            alpha=alpha,
            tau=tau,
            mode=mode,
            multiplier=multiplier,
            confidence=confidence,
            tau_squared=tau_squared,
            **fast,
        )


class DistillationLoss(_Loss):
    """Knowledge distillation; called as ``loss(logits, target, teacher_logits)``.

    See :func:`labo.functional.distillation_loss`.

    Example:
        >>> loss = DistillationLoss(alpha=0.9, tau=4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.1304)
    """

    function = staticmethod(F.distillation_loss)
    spec_of = staticmethod(spec.distillation)
    teacher_argument = "teacher_logits"

    def __init__(
        self,
        *,
        alpha: float = 0.9,
        tau: float = 4.0,
        kl_reduction: str = "batchmean",
        multiplier: float = 1.0,
        standardize: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight,
            ignore_index,
            reduction,
            dim,
            alpha=alpha,
            tau=tau,
            kl_reduction=kl_reduction,
            multiplier=multiplier,
            standardize=standardize,
            **fast,
        )


class DecoupledDistillationLoss(_Loss):
    """Decoupled distillation with its warm-up; called as ``loss(logits, target, teacher_logits)``.

    In epoch e = 1, 2, ... the multiplier of the two KL divergences is
    ``multiplier * min(e / warmup_epochs, 1)``. Call ``end_epoch()`` after each epoch.
    See :func:`labo.functional.decoupled_distillation_loss`.

    Args:
        warmup_epochs: epochs until the teacher has its full weight; 0 and 1 mean no warm-up.

    Example:
        >>> loss = DecoupledDistillationLoss(warmup_epochs=1)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.7009)
    """

    function = staticmethod(F.decoupled_distillation_loss)
    spec_of = staticmethod(spec.decoupled_distillation)
    teacher_argument = "teacher_logits"
    multiplier: float
    epoch: Tensor

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        beta: float = 8.0,
        tau: float = 4.0,
        hard_weight: float = 1.0,
        multiplier: float = 1.0,
        standardize: bool = False,
        warmup_epochs: int = 20,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(
            weight,
            ignore_index,
            reduction,
            dim,
            alpha=alpha,
            beta=beta,
            tau=tau,
            hard_weight=hard_weight,
            multiplier=multiplier,
            standardize=standardize,
            **fast,
        )
        check_hyper(warmup_epochs=warmup_epochs)
        self.warmup_epochs = warmup_epochs
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))

    def arguments(self) -> dict[str, Any]:
        progress = _progress(self.epoch, max(1, self.warmup_epochs))
        return super().arguments() | {"multiplier": self.multiplier * progress}

    def end_epoch(self) -> None:
        self.epoch += 1

    def extra_repr(self) -> str:
        return f"warmup_epochs={self.warmup_epochs}, {super().extra_repr()}"


class TopKDistillationLoss(_Loss):
    """Distillation from the stored k largest probabilities of a teacher.

    Called as ``loss(logits, target, indices, log_probabilities)``. In :func:`labo.linear_loss` the
    two are passed as ``teacher_logits=(indices, log_probabilities)``.
    See :func:`labo.functional.topk_distillation_loss`.

    Example:
        >>> loss = TopKDistillationLoss(alpha=0.5, tail="bucket")
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> stored = torch.tensor([[3.0, 1.0, 0.2, -0.5]]).log_softmax(-1).topk(2)
        >>> loss(logits, target, stored.indices, stored.values)
        tensor(0.2630)
    """

    function = staticmethod(F.topk_distillation_loss)
    spec_of = staticmethod(spec.topk_distillation)
    teacher_argument = "indices"
    teacher_is_stored = True

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        tail: str = "bucket",
        tau: float = 1.25,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"alpha": alpha, "tail": tail, "tau": tau}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        indices: Tensor | None = None,
        log_probabilities: Tensor | None = None,
    ) -> Tensor:
        self.check_teacher(indices is not None and log_probabilities is not None)
        assert indices is not None
        assert log_probabilities is not None
        return type(self).function(logits, target, indices, log_probabilities, **self.arguments())

    def check_teacher(self, given: bool) -> None:
        if not given:
            raise TeacherError(
                "TopKDistillationLoss needs indices and log_probabilities: the stored classes of "
                "a teacher"
            )


def _progress(epoch: Tensor, epochs: int) -> Tensor:
    """min((epoch + 1) / epochs, 1), for an epoch counted from 0.

    A tensor, so that torch.compile does not compile again for each epoch; in float64, so that it
    does not limit the precision of the loss (MPS has no float64).
    """
    dtype = torch.float32 if epoch.device.type == "mps" else torch.float64
    return (epoch + 1).clamp(max=epochs).to(dtype) / epochs


class CSKDLoss(_Loss):
    """CS-KD; called as ``loss(logits, target, teacher_logits)`` with the logits of the peers.

    See :func:`labo.functional.cs_kd_loss`.

    Example:
        >>> loss = CSKDLoss(lam=1, tau=4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target, torch.tensor([[3.0, 1.0, 0.2, -0.5]]))
        tensor(0.5443)
    """

    function = staticmethod(F.cs_kd_loss)
    spec_of = staticmethod(spec.cs_kd)
    teacher_argument = "peer_logits"

    def __init__(
        self,
        *,
        lam: float = 1.0,
        tau: float = 4.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, lam=lam, tau=tau, **fast)


class BetaSmoothingLoss(_Loss):
    """Beta smoothing; called as ``loss(logits, target, teacher_logits, draws=None)``.

    The teacher is the averaged model. Draws that are not given come from the default generator of
    PyTorch. See :func:`labo.functional.beta_smoothing_loss`.

    Example:
        >>> loss = BetaSmoothingLoss(alpha=0.6)
        >>> logits = torch.tensor([[2.0, 1.0, 0.1, -1.0]])
        >>> loss(logits, torch.tensor([0]), logits, draws=torch.tensor([0.8]))
        tensor(0.6853)
    """

    function = staticmethod(F.beta_smoothing_loss)
    smooths = True
    teacher_argument = "ema_logits"
    rowwise = False

    def __init__(
        self,
        *,
        alpha: float = 0.6,
        a: float = 3.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, dim, alpha=alpha, a=a)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        teacher_logits: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        self.check_teacher(teacher_logits is not None)
        arguments = self.arguments()
        return F.beta_smoothing_loss(logits, target, teacher_logits, draws=draws, **arguments)


class PSKDLoss(_Loss):
    """PS-KD with its growing alpha; called as ``loss(logits, target, teacher_logits)``.

    The teacher logits are the logits or log-probabilities of the past prediction. In the first
    epoch they may be left out.

    alpha_t = alpha (e + 1) / epochs in epoch e = 0, 1, ... Call ``end_epoch()`` after each epoch.
    See :func:`labo.functional.ps_kd_loss`.

    Args:
        epochs: epochs of the whole training.
        alpha: weight of the past prediction in the last epoch; it grows linearly.

    Example:
        >>> loss = PSKDLoss(alpha=0.8, epochs=2)  # alpha_t is 0.4 in the first epoch
        >>> past = torch.tensor([[0.7, 0.2, 0.06, 0.04]])
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), past.log())
        tensor(0.6229)
    """

    function = staticmethod(F.ps_kd_loss)
    spec_of = staticmethod(spec.ps_kd)
    teacher_argument = "past_logits"
    teacher_optional = True
    alpha: float
    z_loss: float
    epoch: Tensor

    def __init__(
        self,
        epochs: int,
        *,
        alpha: float = 0.8,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, alpha=alpha, **fast)
        if epochs < 1:
            raise ValueError(f"epochs must be 1 or more, got {epochs!r}")
        self.epochs = epochs
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"alpha": self.alpha * _progress(self.epoch, self.epochs)}

    def spec(self, teacher: bool = True) -> Spec | None:
        return super().spec() if teacher else spec.cross_entropy(self.z_loss)

    def end_epoch(self) -> None:
        self.epoch += 1

    def extra_repr(self) -> str:
        return f"epochs={self.epochs}, {super().extra_repr()}"


class MaskedLabelSmoothingLoss(_Loss):
    """Masked label smoothing over the classes of ``mask``.

    See :func:`labo.functional.masked_label_smoothing_loss`.

    Example:
        >>> loss = MaskedLabelSmoothingLoss(torch.tensor([True, True, False, True]))
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.6493)
    """

    function = staticmethod(F.masked_label_smoothing_loss)
    smooths = True
    spec_of = staticmethod(spec.masked_label_smoothing)
    mask: Tensor

    def __init__(
        self,
        mask: Tensor,
        *,
        alpha: float = 0.1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, mask=mask, alpha=alpha, **fast)

    def class_row(self, num_classes: int) -> Tensor | None:
        return self.mask.to(torch.float32)


class WeightedLabelSmoothingLoss(_Loss):
    """Weighted label smoothing over target-only, common and source-only classes.

    See :func:`labo.functional.weighted_label_smoothing_loss`.

    Example:
        >>> loss = WeightedLabelSmoothingLoss(torch.tensor([0, 0, 2, 1]), normalize=False)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.6183)
    """

    function = staticmethod(F.weighted_label_smoothing_loss)
    smooths = True
    spec_of = staticmethod(spec.weighted_label_smoothing)
    groups: Tensor
    shares: tuple[float, float, float]

    def __init__(
        self,
        groups: Tensor,
        *,
        alpha: float = 0.1,
        shares: tuple[float, float, float] = (0.4, 0.4, 0.2),
        normalize: bool = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"groups": groups, "alpha": alpha, "shares": shares, "normalize": normalize}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)

    def class_row(self, num_classes: int) -> Tensor | None:
        like = self.groups.new_empty(0, num_classes)
        return F._group_row(self.groups, self.shares, like, -1)


class OnlineLabelSmoothingLoss(_Loss):
    """Online label smoothing, with the table that it collects from correct predictions.

    In training mode each call adds the correct predictions to the row of their class. After each
    epoch, ``end_epoch()`` makes their means the table of the next epoch. A class without a correct
    prediction gets a uniform row. Mixed labels (probabilities) use the table and do not change it.
    Under ``torch.distributed`` the sums are added up over the processes.
    See :func:`labo.functional.online_label_smoothing_loss`.

    Args:
        num_classes: K; the table has K x K entries, so this is for images rather than vocabularies.
        hard_weight, soft_weight: weights of the label and of the soft label: 0.5 each in the
            authors' CIFAR code, 1 each in their fine-grained code.
        first_table: "zeros" (their CIFAR code: the first epoch is half the cross entropy) or
            "uniform" (their code for fine-grained data).
        freeze_above: keep a row once its largest entry reaches this (0.88 in their code for
            fine-grained data), until an epoch without a correct prediction of its class, which
            makes it uniform again.

    Example:
        >>> loss = OnlineLabelSmoothingLoss(4)
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss(logits, target)
        tensor(0.2247)
        >>> loss.end_epoch()
        >>> loss.table[0]
        tensor([0.6381, 0.2347, 0.0954, 0.0318])
    """

    function = staticmethod(F.online_label_smoothing_loss)
    spec_of = staticmethod(spec.online_label_smoothing)
    table: Tensor
    sums: Tensor
    counts: Tensor
    rowwise = False
    per_process = ("sums", "counts")  # buffers that add up over the processes

    def __init__(
        self,
        num_classes: int,
        *,
        hard_weight: float = 0.5,
        soft_weight: float = 0.5,
        first_table: str = "zeros",
        freeze_above: float | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        z_loss: float = 0.0,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"hard_weight": hard_weight, "soft_weight": soft_weight}
        fast = {"z_loss": z_loss, "impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)
        check_hyper(first_table=first_table)
        self.freeze_above = freeze_above
        first = 0.0 if first_table == "zeros" else 1 / num_classes
        self.register_buffer("table", torch.full((num_classes, num_classes), first))
        self.register_buffer("sums", torch.zeros(num_classes, num_classes))
        self.register_buffer("counts", torch.zeros(num_classes))

    def arguments(self) -> dict[str, Any]:
        # A copy for the graph: end_epoch() changes the table in place.
        return super().arguments() | {"table": self.table.clone()}

    def forward(
        self, logits: Tensor, target: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        loss = super().forward(logits, target, teacher_logits)
        if self.training and not target.is_floating_point():
            self._collect(logits.detach(), target)
        return loss

    @torch.no_grad()
    def _collect(self, logits: Tensor, target: Tensor) -> None:
        rows = Rows(logits, target, ignore_index=self.ignore_index, dim=self.dim)
        right = rows.logits.argmax(-1) == rows.target
        if rows.valid is not None:
            right = right & rows.valid
        hits = right.to(self.counts.dtype)
        predictions = torch.softmax(rows.logits, -1).to(self.sums.dtype)
        self.sums.index_add_(0, rows.target, predictions * hits.unsqueeze(-1))
        self.counts.index_add_(0, rows.target, hits)

    @torch.no_grad()
    def end_epoch(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.sums)
            torch.distributed.all_reduce(self.counts)
        seen = self.counts.unsqueeze(-1)
        means = self.sums / seen.clamp(min=1)
        if self.freeze_above is not None:
            frozen = self.table.amax(-1, keepdim=True) >= self.freeze_above
            means = torch.where(frozen, self.table, means)
        # Frozen rows too: the authors make any row without a correct prediction uniform.
        self.table.copy_(means.masked_fill(seen == 0, 1 / len(self.table)))
        self.sums.zero_()
        self.counts.zero_()

    def extra_repr(self) -> str:
        return f"num_classes={len(self.table)}, {super().extra_repr()}"


class KRLSLoss(_Loss):
    """KR-LS, with the table that it learns: pass ``table`` to the optimizer.

    We suggest a parameter group of its own without weight decay; the authors do not say.
    See :func:`labo.functional.kr_ls_loss`.

    Example:
        >>> loss = KRLSLoss(4)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])).detach()
        tensor(0.5757)
    """

    function = staticmethod(F.kr_ls_loss)
    rowwise = False

    def __init__(
        self,
        num_classes: int,
        *,
        alpha: float = 0.5,
        order: str = "pq",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, dim, alpha=alpha, order=order)
        self.table = nn.Parameter(torch.zeros(num_classes, num_classes))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"table": self.table}

    def extra_repr(self) -> str:
        return f"num_classes={len(self.table)}, {super().extra_repr()}"


class RDropLoss(_Loss):
    """R-Drop; called as ``loss(logits, target, other_logits)``, with the logits of two passes.

    The passes have different dropout. Gradients flow through both.
    See :func:`labo.functional.r_drop_loss`.

    Example:
        >>> loss = RDropLoss(lam=1.0)
        >>> other = torch.tensor([[3.0, 1.0, 0.2, -0.5]])
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), other)
        tensor(0.4113)
    """

    function = staticmethod(F.r_drop_loss)
    teacher_argument = "other_logits"
    rowwise = False  # linear_loss holds a second prediction constant

    def __init__(
        self,
        *,
        lam: float = 1.0,
        hard_weight: float = 0.5,
        label: str = "onehot",
        alpha: float | str | None = None,
        tau: float = 1.25,
        rho: float = 0.5,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
    ) -> None:
        hyper = {"lam": lam, "hard_weight": hard_weight, "label": label}
        smoothing = {"alpha": alpha, "tau": tau, "rho": rho}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **smoothing)
        F._strength_of(label, alpha)

    @property
    def smoothing_weight(self) -> float | str:
        label, alpha = self.label, self.alpha
        return 0.0 if label == "onehot" else F._strength_of(label, alpha)  # type: ignore[arg-type]

    def forward(self, logits: Tensor, target: Tensor, other_logits: Tensor | None = None) -> Tensor:
        return F.r_drop_loss(logits, target, other_logits, **self.arguments())


class HeldLABOLoss(_Loss):
    """LABO with several outer steps; called as ``loss(logits, target, held_logits)``.

    The held logits are those of the first update on the batch. For that update they are left out,
    and the loss is LABO. See :func:`labo.functional.held_labo_loss`.

    Example:
        >>> loss, target = HeldLABOLoss(tau=1.25), torch.tensor([0])
        >>> start = torch.tensor([[2.0, 1.0, 0.1, -1.0]])
        >>> loss(start, target), loss(torch.tensor([[2.1, 1.0, 0.1, -1.0]]), target, start)
        (tensor(1.1205), tensor(1.1137))
    """

    function = staticmethod(F.held_labo_loss)
    smooths = True
    teacher_argument = "held_logits"
    teacher_optional = True
    tau: float
    alpha: float | str
    rho: float
    multiplier: float

    def __init__(
        self,
        *,
        tau: float = 1.25,
        alpha: float | str = "adaptive",
        rho: float = 0.5,
        multiplier: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
        impl: str = "auto",
        inplace: bool = False,
    ) -> None:
        hyper = {"tau": tau, "alpha": alpha, "rho": rho, "multiplier": multiplier}
        fast = {"impl": impl, "inplace": inplace}
        super().__init__(weight, ignore_index, reduction, dim, **hyper, **fast)

    def spec(self, teacher: bool = True) -> Spec | None:
        return None if teacher else spec.labo(self.tau, self.alpha, self.rho, self.multiplier)


class ConNetLoss(_Loss):
    """ConNet-LS, with the network that learns the confidence: ``loss(logits, target, states)``.

    The confidence of a row is sigmoid(linear(state)), where the state comes from inside the model:
    the authors average the outputs of the first three decoder layers. Pass ``network`` to the
    optimizer. Call ``step()`` after each optimizer step: the price of a low confidence falls as
    lam exp(-t / decay_steps). Under ``torch.distributed`` the mean confidence is that of all
    processes. See :func:`labo.functional.connet_loss`.

    Args:
        features: D, the size of a state.
        alpha: smoothing of a row of mean confidence.
        lam: lambda, the price of a low confidence at the start.
        decay_steps: steps in which lambda falls to 1/e.
        trust: probability that the label does not help a row, in training mode.

    Example:
        >>> loss = ConNetLoss(2, lam=0.0).eval()
        >>> states = torch.zeros(1, 2)
        >>> _ = loss.network.bias.data.fill_(torch.tensor(0.9).logit())
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), states).detach()
        tensor(0.6069)
    """

    function = staticmethod(F.connet_loss)
    smooths = True
    teacher_argument = "states"
    rowwise = False
    lam: float
    trust: float
    decay_steps: float
    steps: Tensor

    def __init__(
        self,
        features: int,
        *,
        alpha: float = 0.1,
        lam: float = 30.0,
        decay_steps: float = 30_000,
        trust: float = 0.5,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        dim: int = -1,
    ) -> None:
        hyper = {"alpha": alpha, "lam": lam, "decay_steps": decay_steps, "trust": trust}
        super().__init__(weight, ignore_index, reduction, dim, **hyper)
        self.network = nn.Linear(features, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        del arguments["trust"], arguments["decay_steps"]
        dtype = torch.float32 if self.steps.device.type == "mps" else torch.float64
        left = torch.exp(-self.steps.to(dtype) / self.decay_steps)
        return arguments | {"lam": self.lam * left}

    def step(self) -> None:
        """Count one optimizer step."""
        self.steps += 1

    def confidences(
        self, target: Tensor, states: Tensor | None, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """What :func:`labo.functional.connet_loss` takes, for rows that it gets in parts.

        Args:
            target: (...) class indices.
            states: (..., D).
            draws: (...) random numbers in [0, 1); rows with one below ``trust`` are trusted.

        Returns:
            The logits of the confidence, (...); the trusted rows, (...), in training mode; and the
            mean confidence of the rows that count.
        """
        if not isinstance(states, Tensor) or states.shape[:-1] != target.shape:
            raise TeacherError(
                "ConNetLoss needs states: hidden states of the model, of the shape "
                f"{(*target.shape, 'D')}"
            )
        layer = [parameter.to(states.dtype) for parameter in self.network.parameters()]
        confidence = nn.functional.linear(states, *layer).squeeze(-1)
        counts = (target != self.ignore_index).to(confidence.dtype)
        total = torch.stack([(confidence.sigmoid() * counts).sum(), counts.sum()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from torch.distributed.nn.functional import all_reduce

            total = all_reduce(total)
        trusted = None
        if self.training:
            draws = torch.rand_like(confidence) if draws is None else draws
            trusted = draws < self.trust
        return confidence, trusted, total[0] / total[1].clamp(min=1)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        states: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        return self.of_rows(logits, target, *self.confidences(target, states, draws))

    def of_rows(
        self,
        logits: Tensor,
        target: Tensor,
        confidence: Tensor,
        trusted: Tensor | None,
        mean_confidence: Tensor,
    ) -> Tensor:
        """The loss of some of the rows, given what :meth:`confidences` returns for all."""
        return F.connet_loss(
            logits,
            target,
            confidence,
            trusted=trusted,
            mean_confidence=mean_confidence,
            **self.arguments(),
        )

    def extra_repr(self) -> str:
        return f"features={self.network.in_features}, {super().extra_repr()}"


class Warmup(nn.Module):
    """The warm-up of Algorithm 1: ``before`` while the step i < ``steps``, then ``after``.

    Steps are counted from 1, so steps 1 .. steps - 1 use ``before``, and ``steps=1`` is no warm-up.
    Call ``step()`` after each optimizer step (not after each micro-batch), as with a learning-rate
    scheduler. The count is in ``state_dict()``.

    Teacher logits are passed on to the loss of the step, if it takes any.

    Args:
        before: the first loss; the paper uses label smoothing with alpha = 0.1.
        after: the loss after the warm-up.
        steps: T_w; 5000 (IWSLT) and 10000 (WMT) in the paper.

    Example:
        >>> loss = Warmup(LabelSmoothingLoss(alpha=0.1), LABOLoss(tau=1.25), steps=3)
        >>> for i in range(1, 5):
        ...     print(i, type(loss.active).__name__)
        ...     loss.step()
        1 LabelSmoothingLoss
        2 LabelSmoothingLoss
        3 LABOLoss
        4 LABOLoss
    """

    def __init__(self, before: nn.Module, after: nn.Module, steps: int) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number of 0 or more, got {steps!r}")
        self.before = before
        self.after = after
        self.steps = steps
        self._set(0)

    def _set(self, steps_done: int) -> None:
        self.steps_done = steps_done
        # forward reads this flag, not the count: torch.compile then compiles at most twice.
        self._warming = steps_done + 1 < self.steps

    @property
    def active(self) -> nn.Module:
        """The loss of the current step."""
        return self.before if self._warming else self.after

    def step(self) -> None:
        """Count one optimizer step."""
        self._set(self.steps_done + 1)

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        teacher_logits: Tensor | None = None,
        *draws: Tensor,
    ) -> Tensor:
        loss = self.before if self._warming else self.after
        unused = getattr(loss, "teacher_argument", "") is None
        extra = () if teacher_logits is None or unused else (teacher_logits, *draws)
        result: Tensor = loss(logits, target, *extra)
        return result

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps_done)

    def set_extra_state(self, state: Tensor) -> None:
        self._set(int(state))

    def extra_repr(self) -> str:
        return f"steps={self.steps}, steps_done={self.steps_done}"


LOSSES = Registry(
    "loss",
    {
        "ce": CrossEntropyLoss,
        "ls": LabelSmoothingLoss,
        "cp": ConfidencePenaltyLoss,
        "maxsup": MaxSuppressionLoss,
        "mbls": MarginSmoothingLoss,
        "fl": FocalLoss,
        "afl": AntiFocalLoss,
        "poly": Poly1Loss,
        "logitnorm": LogitNormLoss,
        "dft": DFTLoss,
        "eaft": EAFTLoss,
        "kd": DistillationLoss,
        "dkd": DecoupledDistillationLoss,
        "cskd": CSKDLoss,
        "tfreg": TFRegLoss,
        "betals": BetaSmoothingLoss,
        "krls": KRLSLoss,
        "pskd": PSKDLoss,
        "ols": OnlineLabelSmoothingLoss,
        "ger": GeneralizedEntropyLoss,
        "mls": MaskedLabelSmoothingLoss,
        "wls": WeightedLabelSmoothingLoss,
        "rdrop": RDropLoss,
        "connet": ConNetLoss,
        "labo": LABOLoss,
    },
)
