r"""Losses whose classes are split over processes (tensor or vocabulary parallel).

Each process holds some columns of the logits: as a DTensor with ``Shard`` on the class dimension,
which the losses and :func:`labo.linear_loss` take as it is, or as a plain tensor with a process
group, for which there are the functions of this module. All processes hold the same rows and the
same targets.

Every loss that has fused backends is computed exactly, with the K of the whole vocabulary, from a
few sums per row (:mod:`labo.sums`). Losses with a teacher, with a table (OLS), with a
margin (MbLS) or with a norm (LogitNorm) are not.

1. each process takes the maximum of its columns, and with u = z - maximum the sums over them that
   the loss needs: :math:`\sum e^u`; :math:`\sum u e^u` for an entropy; :math:`\sum q` and
   :math:`\sum u q` for the smoothing masses q, also weighted by class weights;
2. one all-reduce (MAX) of N numbers gives the maximum of each row;
3. one all-reduce (SUM) of N times 2 to 7 numbers gives the sums, shifted to that maximum (MaxSup
   takes one more, for the first class that has the maximum);
4. value and gradient follow from the sums. The backward pass of the logits communicates nothing.

The value is the same on every process. Call ``backward()`` on each of them, as for any replicated
loss: nothing is multiplied by the number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..linear import (
    LinearLossOptions,
    ReturnMetrics,
    check_tensors,
    split_linear_loss,
    splittable,
)
from . import split
from .low_rank import LowRankWeight

__all__ = ["gather_weight", "linear_loss", "logits_loss"]


def logits_loss(
    logits: Tensor, target: Tensor, loss: nn.Module, *, group: Any | None = None
) -> Tensor:
    """``loss(all_logits, target)`` where each process holds some columns of the logits.

    Two all-reduces of a few numbers per row in the forward pass, none in the backward pass.

    Args:
        logits: (..., V_s), the columns of this process, in the order of the ranks; V_s may differ
            between processes. Or a DTensor, for which this is ``loss(logits, target)``.
        target: (...) class indices in [0, V), the same on all processes.
        loss: a loss with fused backends and without a teacher, see the module, or a
            :class:`labo.Warmup` of two. Class weights are those of all V classes.
        group: the ``torch.distributed`` process group that shares the columns; None for all
            processes. A DTensor brings its own.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; the same on all processes.

    Example:
        >>> from labo import LABOLoss  # with one process, its columns are all there are
        >>> logits_loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]), LABOLoss())
        tensor(1.1205)
    """
    if _checks.is_dtensor(logits):
        if group is not None:
            raise ValueError("a DTensor brings its own processes: do not give group")
        value: Tensor = loss(logits, target)
        return value
    _checks.check_tensors(logits, target)
    return split.row_loss(logits, target, splittable(loss), group)


def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: nn.Module,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
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
        softcap, z_loss: as for :func:`labo.linear_loss`.
        token_weight: (...), the same on all processes.
        return_metrics: as for :func:`labo.linear_loss`; the metrics are the same on all processes.
            Each chunk then takes two more all-reduces.
        group: the process group that shares the weight; None for all processes.
        options: as for :func:`labo.linear_loss`; the memory budget is that of one process.

    Returns:
        The reduced loss, or (...) if the loss has ``reduction="none"``; the same on all processes.
        With the metrics if they are asked for.

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
    widest = torch.full((1,), len(linear_weight), device=input.device)
    split.all_reduce(widest, group, "MAX")
    input, target = split.SumGradient.apply(input, group), split.replicated("target", target)
    head = split.LocalHead(input, linear_weight, linear_bias, target, group, int(widest))
    return split_linear_loss(head, loss, softcap, options, token_weight, z_loss, return_metrics)


def gather_weight(weight: Tensor) -> Tensor:
    """The whole of a weight that is split over *data-parallel* processes, as FSDP2 does.

    One all-gather. The gradient is averaged over the processes and split again, as FSDP2 hands
    gradients to its parameters. :func:`labo.linear_loss` calls this for the parameters of modules
    under ``fully_shard`` that are used outside of their forward pass.

    Args:
        weight: a DTensor, split or replicated, on a mesh whose processes hold different samples.

    Returns:
        A plain tensor.
    """
    whole: Tensor = split.gather_weight(weight)
    return whole
