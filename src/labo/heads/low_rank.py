r"""An output layer with a low-rank adapter (LoRA, DoRA), for :func:`labo.linear_loss`.

.. math::
    z = h W^T + s\,(\mathrm{dropout}(h) A^T) B^T + b \qquad \text{(LoRA)} \\
    z_j = m_j \frac{h W_j^T + s\,(h A^T) B_j^T}{\lVert W_j + s B_j A \rVert} + b_j
    \qquad \text{(DoRA, the norm held constant)}

The rows are processed in chunks. Neither the logits nor W + s B A ever exist as a whole; W stays in
its dtype, and if it is frozen no gradient of its size is computed. A quantized W is dequantized by
blocks of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import _checks
from ..chunks import Mean, Rows
from .quantized import QuantizedWeight, as_weight, by_blocks


@dataclass(frozen=True)
class LowRankWeight:
    """The weight of an output layer with a low-rank adapter, as ``linear_weight`` of a fused head.

    Args:
        base: (V, D), W. It may be quantized, as the weight of :func:`labo.linear_loss` may be (a
            tensor of torchao, a :class:`labo.QuantizedWeight`); it is frozen then.
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

    base: Tensor | QuantizedWeight
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    dropout: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        base: Any = as_weight("base", self.base)
        object.__setattr__(self, "base", base)  # the class is frozen
        for name in ("base", "a", "b", "magnitude"):
            self._check_tensor(name, getattr(self, name))
        if not _checks.is_number(self.scale):
            raise TypeError(
                f"scale must be a number, got {type(self.scale).__name__}: PEFT has it in "
                "layer.scaling[adapter]"
            )
        if len(base.shape) != 2:
            raise ValueError(f"base must have shape (V, D), got {tuple(base.shape)}")
        classes, width = base.shape
        rank = self.b.shape[-1] if self.b.dim() else 0
        if self.a.shape != (rank, width) or self.b.shape != (classes, rank):
            raise ValueError(
                f"a and b must have shapes (r, {width}) and ({classes}, r) for a base of shape "
                f"{tuple(base.shape)}, got {tuple(self.a.shape)} and {tuple(self.b.shape)}"
            )
        if self.magnitude is None:
            return
        if self.magnitude.shape != (classes,):
            raise ValueError(
                f"magnitude must have shape ({classes},), got {tuple(self.magnitude.shape)}"
            )
        # PEFT has nn.Identity for a dropout of 0.
        without = self.dropout is None or isinstance(self.dropout, nn.Identity)
        if not without and getattr(self.dropout, "p", 1.0) != 0:
            raise ValueError("a magnitude (DoRA) does not go with dropout before the adapter")

    @staticmethod
    def _check_tensor(name: str, x: Any) -> None:
        if isinstance(x, QuantizedWeight) or (x is None and name == "magnitude"):
            return
        _checks.check_tensor(name, x, "pass the weight of the layer")
        if _checks.is_dtensor(x):
            raise ValueError(
                f"{name} of a LowRankWeight must be a plain tensor, got a DTensor: use "
                f"labo.parallel.gather_weight({name}) if the processes hold different samples "
                f"(FSDP2), {name}.full_tensor() if they hold the same"
            )

    def __len__(self) -> int:
        return len(self.base)

    @property
    def shape(self) -> tuple[int, ...]:
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
        b, dtype = self.b, _wide(self.b if isinstance(self.base, QuantizedWeight) else self.base)
        a, norms = self.a.to(dtype), []
        for part, rows in by_blocks(self.base).blocks(dtype):
            norms.append(torch.addmm(rows, b[part].to(dtype), a, alpha=self.scale).norm(dim=1))
        return torch.cat(norms)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Tensors(NamedTuple):
    """What the logits are computed from, in one dtype; ``scale`` may be wider."""

    input: Tensor  # (N, D)
    weight: Tensor | QuantizedWeight  # (V, D)
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
        both: Iterable[tuple[Tensor | None, Any]] = zip(grads, tensors, strict=True)
        return values, [None if grad is None else grad.to(x.dtype) for grad, x in both]

    def _start(self, x: Tensor | QuantizedWeight | None, need: bool) -> Tensor | None:
        if not isinstance(x, Tensor) or not need:
            return None
        # What is summed over chunks is summed in float32.
        by_rows = x is self.tensors.input or x is self.tensors.low
        return torch.zeros_like(x, dtype=x.dtype if by_rows else _wide(x))

    def _forward(self, part: slice, with_raw: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The logits; what they were before scale, bias and cap; the slope of the cap."""
        input, weight, bias, low, b, scale = self.tensors
        logits = self.logits[: part.stop - part.start]
        if isinstance(weight, QuantizedWeight):
            weight.logits(input[part], None, logits)
        else:
            torch.mm(input[part], weight.T, out=logits)
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
            if isinstance(weight, QuantizedWeight):
                weight.times(grad, d_input[part])
            else:
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
            ctx.quantized = tensors[1] if isinstance(tensors[1], QuantizedWeight) else None
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in tensors))
            ctx.again = (softcap, rows, chunk)
            return chunks.run(None, (False,) * 6)[0]
        values, ctx.grads = chunks.run(mean.factor(chunks.count) if any(needs) else None, needs)
        return mean.reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.dim():
            tensors = _Tensors(*ctx.saved_tensors)
            if ctx.quantized is not None:
                tensors = tensors._replace(weight=ctx.quantized)
            chunks = _Chunks(tensors, *ctx.again)
            grads = chunks.run(upstream, ctx.needs)[1]
        else:
            grads = [None if x is None else (x * upstream).to(x.dtype) for x in ctx.grads]
        return (*(None,) * 4, *grads)


def adapted_loss(
    adapter: LowRankWeight,
    input: Tensor,
    weight: Tensor | QuantizedWeight,
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
