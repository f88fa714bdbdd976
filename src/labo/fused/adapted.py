r"""An output layer with a low-rank adapter (LoRA, DoRA), for :func:`labo.linear_loss`.

.. math::
    z = h W^T + s\,(\mathrm{dropout}(h) A^T) B^T + b \qquad \text{(LoRA)} \\
    z_j = m_j \frac{h W_j^T + s\,(h A^T) B_j^T}{\lVert W_j + s B_j A \rVert} + b_j
    \qquad \text{(DoRA, the norm held constant)}

The rows are processed in chunks. Neither the logits nor W + s B A ever exist as a whole; W stays in
its dtype, and if it is frozen no gradient of its size is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .chunks import Mean, Rows

# Bytes of the rows of W + s B A of which norms are taken at a time.
_NORM_BYTES = 16 << 20


@dataclass(frozen=True)
class LowRankWeight:
    """The weight of an output layer with a low-rank adapter, as ``linear_weight`` of a fused head.

    Args:
        base: (V, D), W. A quantized weight is dequantized by the caller, to the dtype of the
            hidden states.
        a: (r, D), A.
        b: (V, r), B.
        scale: s; lora_alpha / r in PEFT.
        magnitude: (V,), m of DoRA; None for LoRA.
        dropout: applied to the hidden states before A, in training; not with a magnitude.

    Example:
        >>> from labo import LABOLoss, linear_loss
        >>> weight = LowRankWeight(torch.eye(4, 2), torch.ones(1, 2), torch.zeros(4, 1), scale=2.0)
        >>> linear_loss(torch.ones(3, 2), weight, torch.tensor([0, 1, 1]), LABOLoss(tau=1.25))
        tensor(1.2238)
    """

    base: Tensor
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    dropout: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        classes, width = self.base.shape
        rank = len(self.a)
        if self.a.shape != (rank, width) or self.b.shape != (classes, rank):
            raise ValueError(
                f"a and b must have shapes (r, {width}) and ({classes}, r) for a base of shape "
                f"{tuple(self.base.shape)}, got {tuple(self.a.shape)} and {tuple(self.b.shape)}"
            )
        if self.magnitude is None:
            return
        if self.magnitude.shape != (classes,):
            raise ValueError(
                f"magnitude must have shape ({classes},), got {tuple(self.magnitude.shape)}"
            )
        if self.dropout is not None and getattr(self.dropout, "p", 1.0) != 0:
            raise ValueError("a magnitude (DoRA) does not go with dropout before the adapter")

    def __len__(self) -> int:
        return len(self.base)

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def low_rank(self, rows: Tensor) -> Tensor:
        """s dropout(h) A^T, (N, r), in the dtype of ``rows``."""
        dropped = rows if self.dropout is None else self.dropout(rows)
        return (nn.functional.linear(dropped.to(self.a.dtype), self.a) * self.scale).to(rows.dtype)

    def class_scale(self) -> Tensor | None:
        """m / ||W + s B A||, (V,) at least float32; None for LoRA."""
        if self.magnitude is None:
            return None
        return self.magnitude.to(_wide(self.magnitude)) / self._norms()

    @torch.no_grad()
    def _norms(self) -> Tensor:
        dtype = _wide(self.base)
        a, norms = self.a.to(dtype), []
        for rows in zip(
            *(
                x.split(max(1, _NORM_BYTES // (4 * self.base.shape[1])))
                for x in (self.base, self.b)
            ),
            strict=True,
        ):
            base, b = (x.to(dtype) for x in rows)
            norms.append(torch.addmm(base, b, a, alpha=self.scale).norm(dim=1))
        return torch.cat(norms)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Tensors(NamedTuple):
    """What the logits are computed from, in one dtype; ``scale`` may be wider."""

    input: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    low: Tensor  # (N, r)
    b: Tensor  # (V, r)
    scale: Tensor | None  # (V,)


class _Chunks:
    """Logits, values and gradients of some rows at a time, in buffers that are used again."""

    def __init__(self, tensors: _Tensors, softcap: float | None, rows: Rows, chunk: int) -> None:
        self.tensors, self.softcap, self.rows, self.chunk = tensors, softcap, rows, chunk
        self.count = len(tensors.input)
        self.logits = tensors.input.new_empty(min(chunk, self.count), len(tensors.weight))

    def run(
        self, factor: float | Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Values (N,), and the gradients of sum_i factor_i value_i that are needed."""
        tensors = self.tensors
        values = tensors.input.new_empty(self.count, dtype=_wide(tensors.input))
        grads = [self._start(x, need) for x, need in zip(tensors, needs, strict=True)]
        for start in range(0, self.count, self.chunk):
            part = slice(start, min(start + self.chunk, self.count))
            logits, raw, slope = self._forward(part, with_raw=grads[-1] is not None)
            part_factor = factor[part] if isinstance(factor, Tensor) else factor
            values[part], grad = self.rows(logits, part, part_factor, logits)
            if grad is not None:
                self._add(grads, part, grad if slope is None else grad.mul_(slope), raw)
        dtypes = (None if x is None else x.dtype for x in tensors)
        finished = (None if x is None else x.to(t) for x, t in zip(grads, dtypes, strict=True))
        return values, list(finished)

    def _start(self, x: Tensor | None, need: bool) -> Tensor | None:
        if x is None or not need:
            return None
        # What is summed over chunks is summed in float32.
        by_rows = x is self.tensors.input or x is self.tensors.low
        return torch.zeros_like(x, dtype=x.dtype if by_rows else _wide(x))

    def _forward(self, part: slice, with_raw: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The logits; what they were before scale, bias and cap; the slope of the cap."""
        input, weight, bias, low, b, scale = self.tensors
        logits = torch.mm(input[part], weight.T, out=self.logits[: part.stop - part.start])
        logits.addmm_(low[part], b.T)
        raw = logits.clone() if with_raw else None
        if scale is not None:
            logits.mul_(scale)
        if bias is not None:
            logits.add_(bias)
        if self.softcap is None:
            return logits, raw, None
        slope = logits.div_(self.softcap).tanh_().square().neg_().add_(1)
        return logits.mul_(self.softcap), raw, slope

    def _add(
        self, grads: list[Tensor | None], part: slice, grad: Tensor, raw: Tensor | None
    ) -> None:
        """From the gradient of the logits of a chunk, which is used up."""
        input, weight, _, low, b, scale = self.tensors
        d_input, d_weight, d_bias, d_low, d_b, d_scale = grads
        if d_bias is not None:
            d_bias += grad.sum(0, dtype=d_bias.dtype)
        if d_scale is not None and raw is not None:
            d_scale += raw.mul_(grad).sum(0, dtype=d_scale.dtype)
        if scale is not None:
            grad.mul_(scale)
        if d_input is not None:
            torch.mm(grad, weight, out=d_input[part])
        if d_low is not None:
            torch.mm(grad, b, out=d_low[part])
        if d_weight is not None:
            d_weight += grad.T @ input[part]
        if d_b is not None:
            d_b += grad.T @ low[part]


class _AdaptedLoss(torch.autograd.Function):
    """With a mean: gradients in the forward pass. Without: computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        softcap: float | None,
        rows: Rows,
        chunk: int,
        mean: Mean | None,
        *tensors: Any,
    ) -> Tensor:
        chunks = _Chunks(_Tensors(*tensors), softcap, rows, chunk)
        ctx.needs = needs = ctx.needs_input_grad[4:]
        if mean is None:
            ctx.save_for_backward(*tensors)
            ctx.again = (softcap, rows, chunk)
            return chunks.run(None, (False,) * 6)[0]
        values, ctx.grads = chunks.run(mean.factor(chunks.count) if any(needs) else None, needs)
        return mean.reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.dim():
            chunks = _Chunks(_Tensors(*ctx.saved_tensors), *ctx.again)
            grads = chunks.run(upstream, ctx.needs)[1]
        else:
            grads = [None if x is None else (x * upstream).to(x.dtype) for x in ctx.grads]
        return (*(None,) * 4, *grads)


def adapted_loss(
    adapter: LowRankWeight,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    rows: Rows,
    chunk: int,
    mean: Mean | None,
) -> Tensor:
    """The end of :func:`labo.linear_loss` for a :class:`LowRankWeight`.

    Args:
        adapter: whose base is ``weight``, before autocast.
        input, weight, bias: (N, D), (V, D) and (V,) in one dtype.
        softcap: as in ``linear_loss``.
        rows: the loss of the rows of a chunk.
        chunk: the number of rows of a chunk.
        mean: how the values become one; None returns them, (N,).
    """
    low, scale = adapter.low_rank(input), adapter.class_scale()
    tensors = (input, weight, bias, low, adapter.b.to(input.dtype), scale)
    value: Tensor = _AdaptedLoss.apply(softcap, rows, chunk, mean, *tensors)
    return value
