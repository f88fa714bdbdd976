"""Label smoothing with a fixed distribution over the classes, and with a hand-designed teacher."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _checks
from ..fast.kernel import LABEL_SMOOTHING, Kernel
from ..fields import NOT_NEGATIVE, POSITIVE, UNIT
from ..loss import Loss, hyper
from ..rows import exact, times
from ..sums import FROM_ROW, UNIFORM, RowSums


class LabelSmoothingLoss(Loss):
    r"""Label smoothing, in the three conventions in use.

    .. math:: -\sum_j \hat P_j \log p_j

    with a label :math:`\hat P` that has a part of its mass on the other classes:

    ============  ====================================  =========================================
    convention    label of the true class, of others    used by
    ============  ====================================  =========================================
    ``torch``     1 - alpha + alpha/K, alpha/K          PyTorch, the paper's Eq. 1, Hugging Face
    ``fairseq``   1 - alpha, alpha/(K-1)                fairseq since 2021
    ``joeynmt``   1 - alpha, alpha/(K-2), padding 0     JoeyNMT (which logs the KL divergence: this
                                                        value minus the entropy of the label)
    ============  ====================================  =========================================

    fairseq(alpha) equals torch(alpha K/(K-1)). With "torch" the result equals
    ``F.cross_entropy(label_smoothing=alpha)``, except that masked classes (-inf) get no smoothing
    mass, where PyTorch returns inf.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss, fairseq = LabelSmoothingLoss(alpha=0.1), LabelSmoothingLoss(convention="fairseq")
        >>> loss(logits, target), fairseq(logits, target)
        (tensor(0.5968), tensor(0.6460))

    Reference:
        Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision.
    """

    name, function_name, smooths = "ls", "label_smoothing_loss", True

    alpha: float = hyper(default=0.1, within=UNIT, doc="mass moved away from the label, in [0, 1]")
    convention: str = hyper(
        default="torch",
        choices=("torch", "fairseq", "joeynmt"),
        doc='which classes share alpha, see the table: "torch", "fairseq" or "joeynmt"',
    )
    padding_idx: int | None = hyper(default=None, doc='the padding class, needed by "joeynmt" only')

    def value(self, row: RowSums) -> Tensor:
        alpha, hard = self.alpha, row.nll()
        spread = row.masses(UNIFORM if self.convention != "joeynmt" else FROM_ROW)
        if self.convention == "torch":
            return times(1 - alpha, hard) + alpha * spread.cross_entropy() / spread.q
        others = spread.q - spread.q_y
        soft = spread.cross_entropy() - times(spread.q_y, hard)
        soft = torch.where(others > 0, soft / others.clamp(min=1), hard)
        return times(1 - alpha, hard) + times(alpha, soft)

    def check_together(self) -> None:
        if (self.convention == "joeynmt") != (self.padding_idx is not None):
            raise ValueError(
                'convention="joeynmt" and padding_idx go together: give both or neither'
            )

    def class_row(self, num_classes: int) -> Tensor | None:
        if self.padding_idx is None:
            return None
        return torch.ne(torch.arange(num_classes), self.padding_idx).to(torch.float32)

    def kernel(self) -> Kernel | None:
        if self.z_loss or self.convention != "torch":
            return None
        return Kernel(LABEL_SMOOTHING, self.alpha)


class MaskedLabelSmoothingLoss(Loss):
    r"""Masked label smoothing: no smoothing mass on words that only the source language has.

    With M the classes of ``mask`` and :math:`e = \alpha/(|M|-1)` the label is
    :math:`(1 - \alpha - e)\,\mathrm{onehot}(y) + e\,1_M`: 1 - alpha on a true class in M, e on the
    other classes of M, 0 elsewhere.

    Example:
        >>> loss = MaskedLabelSmoothingLoss(torch.tensor([True, True, False, True]))
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.6493)

    Reference:
        Chen et al. 2022, Focus on the Target's Vocabulary: Masked Label Smoothing for Machine
        Translation.
    """

    name, function_name, smooths = "mls", "masked_label_smoothing_loss", True

    mask: Tensor = hyper(
        kw_only=False, doc="(K,) bool, True for classes that may get smoothing mass (at least two)"
    )
    alpha: float = hyper(default=0.1, within=UNIT, doc="mass moved away from the label, in [0, 1]")

    def value(self, row: RowSums) -> Tensor:
        allowed = row.masses(FROM_ROW)
        e = self.alpha / (allowed.q - 1).clamp(min=1)
        return times(1 - self.alpha - e, row.nll()) + e * allowed.cross_entropy()

    def class_row(self, num_classes: int) -> Tensor:
        mask = self.mask
        if mask.dtype != torch.bool or mask.shape != (num_classes,):
            raise ValueError(
                f"mask must be a bool tensor of shape ({num_classes},), "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        return mask.to(torch.float32)


class WeightedLabelSmoothingLoss(Loss):
    r"""Weighted label smoothing: shares of the mass for target-only, common and source-only words.

    A class of group g gets :math:`e_g = \alpha s_g / |g|`, and the label is
    :math:`(1 - \alpha - e_0)\,\mathrm{onehot}(y) + \sum_g e_g 1_g`. In the authors' code this sums
    to 1 - e_0; ``normalize`` divides by that sum. The share of a group without classes goes to the
    other groups, and that of a masked class to the other classes.

    Example:
        >>> loss = WeightedLabelSmoothingLoss(torch.tensor([0, 0, 2, 1]), normalize=False)
        >>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
        tensor(0.6183)

    Reference:
        Chen et al. 2022, as for :class:`labo.MaskedLabelSmoothingLoss`.
    """

    name, function_name, smooths = "wls", "weighted_label_smoothing_loss", True

    groups: Tensor = hyper(
        kw_only=False,
        doc="(K,) integers: 0 for target-only, 1 for common, 2 for source-only classes",
    )
    alpha: float = hyper(default=0.1, within=UNIT, doc="mass moved away from the label, in [0, 1]")
    shares: tuple[float, float, float] = hyper(
        default=(0.4, 0.4, 0.2),
        doc="shares of target-only, common and source-only classes in the smoothing mass; they are "
        "normalized",
    )
    normalize: bool = hyper(default=True, doc="make the label sum to 1; False is the authors' code")

    def value(self, row: RowSums) -> Tensor:
        mass = row.masses(FROM_ROW)
        first = _group_shares(self.groups, self.shares, mass.q.dtype)[0]
        total = mass.q.masked_fill(mass.q == 0, 1.0)
        of_first = self.alpha * first / total
        hard = times(1 - self.alpha - of_first, row.nll())
        label = hard + self.alpha * mass.cross_entropy() / total
        return label / (1 - of_first) if self.normalize else label

    def check_together(self) -> None:
        shares = self.shares
        if len(shares) != 3 or any(not share >= 0 for share in shares) or sum(shares) <= 0:
            raise ValueError(
                f"shares must be three numbers of 0 or more, not all 0, got {shares!r}"
            )

    def class_row(self, num_classes: int) -> Tensor:
        """The share of each class in the smoothing mass."""
        groups = self.groups
        integers = not (groups.is_floating_point() or groups.is_complex())
        if not integers or groups.dtype == torch.bool or groups.shape != (num_classes,):
            raise ValueError(
                f"groups must be integers of shape ({num_classes},), "
                f"got {groups.dtype} of shape {tuple(groups.shape)}"
            )
        groups = groups.long()
        _checks.ensure(
            (groups >= 0) & (groups <= 2),
            lambda: ValueError(
                f"groups must be 0, 1 or 2, got values from {groups.min()} to {groups.max()}"
            ),
            "groups must be 0, 1 or 2",
        )
        return _group_shares(groups, self.shares, exact(groups.device))[groups]


def _group_shares(groups: Tensor, shares: tuple[float, float, float], dtype: torch.dtype) -> Tensor:
    """The share of one class of each group in the smoothing mass, (3,); groups are (K,) integers.

    A group without classes has no share.
    """
    numbers = torch.arange(3, device=groups.device)
    sizes = (groups == numbers.unsqueeze(1)).sum(1)
    # Filled on the device: a copy of the numbers would wait for it.
    of_groups = torch.full_like(numbers, shares[0], dtype=dtype)
    for group in (1, 2):
        of_groups = of_groups.masked_fill(numbers == group, shares[group])
    each = of_groups * (sizes > 0) / sizes.clamp(min=1)
    return each / (each * sizes).sum()


class TFRegLoss(Loss):
    r"""TF-reg: distillation from a virtual teacher, as in the authors' code or as in their paper.

    With s the :func:`labo.smoothing.virtual_teacher`:

    - ``mode="repo"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,(m/K)\,\mathrm{KL}(s \Vert p)`, the
      element-wise mean of the authors' code (hence 1/K), temperature on the teacher only.
    - ``mode="paper"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,\mathrm{KL}(s \Vert p_\tau)`, their
      Eq. 9, temperature on both; ``tau_squared`` multiplies the KL by tau squared.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> loss, paper = TFRegLoss(tau=20, multiplier=100), TFRegLoss(tau=20, mode="paper")
        >>> loss(logits, target), paper(logits, target)
        (tensor(1.7040), tensor(0.4045))

    Reference:
        Yuan et al. 2020, Revisiting Knowledge Distillation via Label Smoothing Regularization.
    """

    name, function_name, linear = "tf-reg", "tf_reg_loss", False

    alpha: float = hyper(default=0.1, within=UNIT, doc="weight of the teacher, in [0, 1]")
    tau: float = hyper(
        default=20.0,
        within=POSITIVE,
        doc='temperature of the virtual teacher; with mode "paper" of the model as well',
    )
    mode: str = hyper(
        default="repo",
        choices=("repo", "paper"),
        doc='"repo", the loss of the authors\' code, or "paper", their Eq. 9',
    )
    multiplier: float | None = hyper(
        default=None,
        within=NOT_NEGATIVE,
        doc='the factor m of mode "repo". None is K, which is what their CIFAR-100 ResNet18 uses '
        "(100)",
    )
    confidence: float = hyper(
        default=0.99, within=UNIT, doc="the value of the virtual teacher for the true class"
    )
    tau_squared: bool = hyper(
        default=False, doc='multiply the KL divergence of mode "paper" by tau squared'
    )

    def value(self, row: RowSums) -> Tensor:
        if self.mode == "paper":
            factor: float | Tensor = self.tau**2 if self.tau_squared else 1.0
            tau, log_total = self.tau, row.tempered(self.tau).log()
        else:
            factor = 1.0 if self.multiplier is None else self.multiplier / row.classes
            tau, log_total = 1.0, row.log_e
        kl = self._kl(row, tau, log_total)
        return times(1 - self.alpha, row.nll()) + row.weigh(self.alpha * factor * kl)

    def _kl(self, row: RowSums, tau: float, log_total: Tensor) -> Tensor:
        """KL(s || softmax(z / tau)); s has one value for the target and one for each other."""
        logit = self.confidence / self.tau
        other = (1 - self.confidence) / (row.classes - 1).clamp(min=1) / self.tau
        flat = row.masses(UNIFORM)
        others = flat.q - flat.q_y
        log_sum = (flat.q_y * math.exp(logit) + others * other.exp()).log()
        s_y, s = flat.q_y * (logit - log_sum).exp(), (other - log_sum).exp()
        negative_entropy = s_y * (logit - log_sum) + others * s * (other - log_sum)
        mean_u = s * flat.qu + times(s_y - s * flat.q_y, row.u_y)
        return negative_entropy - mean_u / tau + log_total
