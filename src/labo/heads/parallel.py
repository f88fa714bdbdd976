r"""Losses whose classes are split over processes (tensor or vocabulary parallel).

Each process holds some columns of the logits: as a DTensor with ``Shard`` on the class dimension,
which the losses and :func:`labo.linear_loss` take as it is, or as a plain tensor with a process
group, for which there are the functions of this module. All processes hold the same rows and the
same targets.

Every loss that has fused backends is computed exactly, with the K of the whole vocabulary, from a
few sums per row (:mod:`labo.sums`). Losses with a table (OLS), with a margin (MbLS), with the
largest logits (``top_k`` of EAFT) or with a norm (LogitNorm, ``standardize=True`` of distillation)
are not. The logits of a teacher, or its output layer, are split as those of the model are; stored
classes of a teacher are classes of the whole vocabulary, the same on all processes.

1. each process takes the maximum of its columns, and with u = z - maximum the sums over them that
   the loss needs: :math:`\sum e^u`; :math:`\sum u e^u` for an entropy; :math:`\sum q` and
   :math:`\sum u q` for the smoothing masses q, also weighted by class weights;
2. one all-reduce (MAX) of 2 N numbers gives the maximum of each row, and that of a teacher;
3. one all-reduce (SUM) of N times 2 to 8 numbers gives the sums, shifted to that maximum, and what
   one process has of the target and of stored classes (MaxSup takes one more, for the first class
   that has the maximum);
4. value and gradient follow from the sums. The backward pass of the logits communicates nothing.

The value is the same on every process. Call ``backward()`` on each of them, as for any replicated
loss: nothing is multiplied by the number of processes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import _checks
from ..linear import (
    Call,
    LinearLossOptions,
    ReturnMetrics,
    Teacher,
    check_tensors,
    compute,
    computing,
)
from . import split
from .low_rank import LowRankWeight
from .split import gather_weight

__all__ = ["gather_weight", "linear_loss", "logits_loss"]


def logits_loss(
    logits: Tensor,
    target: Tensor,
    loss: nn.Module,
    *,
    teacher_logits: Any = None,
    group: Any | None = None,
) -> Tensor:
    """``loss(all_logits, target)`` where each process holds some columns of the logits.

    Two all-reduces of a few numbers per row and, for plain tensors, one of a number per process in
    the forward pass, none in the backward pass.

    Args:
        logits: (..., V_s), the columns of this process, in the order of the ranks; V_s may differ
            between processes. Or a DTensor, for which this is ``loss(logits, target)``.
        target: (...) class indices in [0, V), the same on all processes.
        loss: a loss with fused backends, see the module, or a :class:`labo.Warmup` of two. Class
            weights are those of all V classes.
        teacher_logits: (..., V_s), the same columns of a teacher; for ``TopKDistillationLoss`` the
            pair (indices, log_probabilities), each (..., k), the same on all processes.
        group: the ``torch.distributed`` process group that shares the columns; None for all
            processes. A DTensor brings its own.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; the same on all processes.

    Example:
        >>> from labo import LABOLoss  # with one process, its columns are all there are
        >>> logits_loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), LABOLoss())
        tensor(1.1205)
    """
    teacher = () if teacher_logits is None else (teacher_logits,)
    if isinstance(teacher_logits, tuple | list):
        teacher = tuple(teacher_logits)
    if _checks.is_dtensor(logits):
        if group is not None:
            raise ValueError("a DTensor brings its own processes: do not give group")
        value: Tensor = loss(logits, target, *teacher)
        return value
    _checks.check_tensors(logits, target)
    member = computing(loss, bool(teacher), divided=True)
    return split.row_loss(logits, target, member, teacher, group)


def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_logits: Teacher = None,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    return_metrics: ReturnMetrics = False,
    group: Any | None = None,
    options: LinearLossOptions | None = None,
) -> Any:
    """:func:`labo.linear_loss` where each process holds some rows of the weight.

    The logits of this process's columns are computed by chunks and never exist at once. Each chunk
    takes two all-reduces of a few numbers per row. The backward pass sums the gradient of the
    hidden states over the processes; the gradient of the weight stays where the weight is.

    Args:
        input: (..., D) hidden states, the same on all processes.
        linear_weight: (V_s, D), the part of this process, in the order of the ranks; V_s may
            differ between processes.
        target: (...) class indices in [0, V), the same on all processes.
        loss: as for :func:`logits_loss`.
        linear_bias: (V_s,).
        teacher_logits: the same columns of a teacher's logits, or the same rows of its weight and
            bias.
        group: the process group that shares the weight; None for all processes.
        softcap, token_weight, z_loss, return_metrics, options: as for :func:`labo.linear_loss`, the
            same on all processes. With metrics each chunk takes two more all-reduces.

    Returns:
        As :func:`labo.linear_loss`; the same on all processes.

    Example:
        >>> from labo import LABOLoss  # with one process, its columns are all there are
        >>> hidden, head = torch.ones(3, 2), torch.eye(4, 2)
        >>> linear_loss(hidden, head, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """
    check_tensors(input, linear_weight, target)
    if isinstance(linear_weight, LowRankWeight):
        raise ValueError(
            "labo.parallel.linear_loss takes no LowRankWeight: gather its tensors from the "
            "processes (full_tensor() of a DTensor) and call labo.linear_loss"
        )
    if any(map(_checks.is_dtensor, (input, linear_weight, linear_bias))):
        raise ValueError("labo.parallel.linear_loss takes plain tensors; labo.linear_loss DTensors")
    columns = split.columns_of(len(linear_weight), input.device, group)
    input, target = split.SumGradient.apply(input, group), split.replicated("target", target)
    extras = (teacher_logits, token_weight, z_loss, return_metrics, "auto", options, columns)
    return compute(Call(input, linear_weight, target, loss, linear_bias, softcap, *extras))
