"""What :func:`labo.linear_loss` loops over: the output layer, the loss of its rows, and the chunks.

A chunk is a slice of the rows, or the (n,) indices of some of them if ignored rows are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import metrics
from ._torch import autograd_enabled
from .fast.dispatch import FastRows
from .fields import describe, described
from .heads.quantized import QuantizedWeight, by_blocks, product_dtype
from .heads.split import SplitLoss, SplitRows
from .rows import row_sum, times, wide

Factor = float | Tensor | None
Part = slice | Tensor

# On CUDA a chunk has a multiple of so many rows: whole tiles of a matrix product.
TILE = 256


def cut(rows: int, most: int, multiple: int = 1) -> list[slice]:
    """Chunks of at most ``most`` rows, of about equal size, so that the last one is not small."""
    size = math.ceil(rows / max(1, math.ceil(rows / most)))
    size = min(most, math.ceil(size / multiple) * multiple)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size or 1)]


def parts_of(target: Tensor, ignore_index: int, most: int, drop: bool) -> list[Part]:
    """The chunks; with ``drop`` of the rows whose target is not ``ignore_index``.

    How many rows these are has to be known, so a device is waited for.
    """
    multiple = TILE if target.is_cuda else 1
    if drop and not target.is_floating_point():
        kept = (target != ignore_index).nonzero().squeeze(1)
        if len(kept) < len(target):
            return [kept[part] for part in cut(len(kept), most, multiple)]
    return [*cut(len(target), most, multiple)]


def length(part: Part) -> int:
    """How many rows a chunk has."""
    return part.stop - part.start if isinstance(part, slice) else len(part)


class Mean(NamedTuple):
    """How the values of the rows become one: sum_i token_weight_i value_i / divisor.

    Attributes:
        divisor: a number or a scalar tensor; 1 for a sum, inf if nothing counts.
        token_weight: (N,), or None for 1.
    """

    divisor: float | Tensor = 1.0
    token_weight: Tensor | None = None

    def factor(self, count: int) -> float | Tensor:
        """The derivative of the result for the value of each row: one number, or (N,)."""
        if self.token_weight is not None:
            return self.token_weight / self.divisor
        factor = 1 / self.divisor
        return factor.expand(count) if isinstance(factor, Tensor) else factor

    def weigh(self, values: Tensor) -> Tensor:
        """(N,) to (N,)."""
        return values if self.token_weight is None else times(self.token_weight, values)

    def reduce(self, values: Tensor) -> Tensor:
        """(N,) to the result."""
        return row_sum(self.weigh(values)) / self.divisor


# ------------------------------------------------------------------ the output layer


class HeadRows(NamedTuple):
    """An output layer and its rows: z = (h W^T + low B^T) scale + bias, then a cap.

    ``low``, ``b`` and ``scale`` are those of an adapter, see :mod:`labo.heads.low_rank`.
    """

    input: Tensor  # (N, D), h
    weight: Any  # (V, D), W, a tensor or a QuantizedWeight
    bias: Tensor | None = None  # (V,)
    low: Tensor | None = None  # (N, r)
    b: Tensor | None = None  # (V, r)
    scale: Tensor | None = None  # (V,), at least float32
    softcap: float | None = None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What gradients are computed for."""
        return self[:6]

    @property
    def dtype(self) -> torch.dtype:
        """Of the products, and so of the logits."""
        return product_dtype(self.input)

    def rows(self, part: Part) -> Tensor:
        """The hidden states of a chunk, in the dtype of the products."""
        return self.input[part].to(self.dtype)

    def buffer(self, rows: int) -> Tensor:
        """For the logits of a chunk."""
        return self.input.new_empty(rows, len(self.weight), dtype=self.dtype)

    @property
    def _blocks(self) -> QuantizedWeight | None:
        """The weight, if it is brought to the dtype of the products block by block."""
        weight = self.weight
        dense = not isinstance(weight, QuantizedWeight) and weight.dtype == self.dtype
        return None if dense else by_blocks(weight)

    def products(self, rows: Tensor, part: Part, out: Tensor) -> Tensor:
        """The logits of a chunk before scale and cap, (n, V), written to ``out``."""
        bias, blocks = self.bias, self._blocks
        bias = None if bias is None or self.scale is not None else bias.to(self.dtype)
        if blocks is not None:
            blocks.logits(rows, bias, out)
        elif bias is None:
            torch.mm(rows, self.weight.T, out=out)
        else:
            torch.addmm(bias, rows, self.weight.T, out=out)
        if self.low is not None and self.b is not None:
            out.addmm_(self.low[part].to(self.dtype), self.b.T.to(self.dtype))
        return out

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and cap, in place."""
        if self.scale is not None:
            logits.mul_(self.scale)
            if self.bias is not None:
                logits.add_(self.bias)
        return logits if self.softcap is None else capped(logits, self.softcap, out=logits)

    def logits(self, part: Part, out: Tensor) -> Tensor:
        """(n, V), written to ``out``."""
        return self.finish(self.products(self.rows(part), part, out))

    def totals(self, parts: Sequence[Part], needs: Sequence[bool]) -> list[Tensor | None]:
        """Where the gradients of the tensors are summed; None for those that nobody needs."""
        # All rows are written, unless some are dropped. A product is written by the first chunk.
        every_row = bool(parts) and isinstance(parts[0], slice)
        written = {0: every_row, 3: every_row, 1: bool(parts), 4: bool(parts)}

        def total(i: int, x: Tensor) -> Tensor:
            make = torch.empty_like if written.get(i) else torch.zeros_like
            # What is summed over chunks is summed in float32.
            dtype = x.dtype if i in (0, 3) else wide(x.dtype)
            return make(x, dtype=dtype, memory_format=torch.contiguous_format)

        both = zip(self.tensors, needs, strict=True)
        return [total(i, x) if need else None for i, (x, need) in enumerate(both)]

    def add_gradients(
        self,
        totals: Sequence[Tensor | None],
        grad: Tensor,
        rows: Tensor,
        part: Part,
        raw: Tensor | None,
        first: bool,
    ) -> None:
        """From the gradient of the logits of a chunk, which is used up, as is ``raw``."""
        d_input, d_weight, d_bias, d_low, d_b, d_scale = totals
        if d_bias is not None:
            d_bias += grad.sum(0, dtype=d_bias.dtype)
        if d_scale is not None and raw is not None:
            d_scale += raw.mul_(grad).sum(0, dtype=d_scale.dtype)
        if self.scale is not None:
            grad.mul_(self.scale)
        if d_input is not None:
            whole = isinstance(part, slice)
            out = d_input[part] if whole else d_input.new_empty(rows.shape)
            blocks = self._blocks
            torch.mm(grad, self.weight, out=out) if blocks is None else blocks.times(grad, out)
            if not whole:
                d_input[part] = out
        if d_weight is not None:
            _add_product(d_weight, grad, rows, first)
        if self.low is None or self.b is None:
            return
        if d_low is not None:
            d_low[part] = (grad @ self.b.to(grad.dtype)).to(d_low.dtype)
        if d_b is not None:
            _add_product(d_b, grad, self.low[part].to(grad.dtype), first)


def capped(logits: Tensor, softcap: float, out: Tensor | None = None) -> Tensor:
    """Softcap tanh(z / softcap)."""
    scaled = torch.div(logits, softcap, out=out)
    return torch.mul(torch.tanh(scaled, out=out), softcap, out=out)


def cap_slope(logits: Tensor, softcap: float, out: Tensor) -> Tensor:
    """The derivative of the cap, 1 - tanh^2, from the capped logits."""
    torch.div(logits, softcap, out=out)
    return out.square_().neg_().add_(1)


def _sums_in_product(total: Tensor) -> bool:
    """Whether a product of half types is added to float32 without being rounded in between."""
    # torch 2.8 or newer; ROCm refuses the two dtypes.
    return total.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype_out")


def _add_product(total: Tensor, grad: Tensor, rows: Tensor, first: bool) -> None:
    """total += grad^T rows, or = for the first chunk. For half types the sum is in float32."""
    if total.dtype == grad.dtype:
        torch.mm(grad.T, rows, out=total) if first else total.addmm_(grad.T, rows)
    elif _sums_in_product(total):
        kind: dict[str, Any] = {"out_dtype": total.dtype, "out": total}
        torch.mm(grad.T, rows, **kind) if first else torch.addmm(total, grad.T, rows, **kind)
    else:
        product = grad.T @ rows
        total.copy_(product) if first else total.add_(product)


# ------------------------------------------------------------------ the loss of the rows


class LossRows(NamedTuple):
    """A loss on a backend, with what it takes for each class or row.

    Attributes:
        loss: with ``reduction="none"`` for the reference.
        backend: "reference", "blocked" or "native".
        source: what the masses come from that are no teacher's, see :mod:`labo.sums`.
        teacher: (logits,), (N, V); (head,), the output layer of the teacher; (indices,
            log_probabilities), (N, k), for stored classes; or ().
    """

    loss: Any
    backend: str
    source: Tensor | None = None
    teacher: tuple[Any, ...] = ()

    def pack(self) -> tuple[list[Tensor], str, str]:
        """The arguments of an operator, as ``ROW_LOSS_SCHEMA`` declares them."""
        given: dict[str, Any] = {"source": self.source}
        given |= {f"teacher{i}": x for i, x in enumerate(self.teacher) if isinstance(x, Tensor)}
        if self.teacher and isinstance(self.teacher[0], HeadRows):
            given |= {f"teacher_{k}": v for k, v in self.teacher[0]._asdict().items()}
        text, tensors = describe(self.loss._registered, self.loss.values() | given)
        return tensors, self.backend, text

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], backend: str, text: str) -> LossRows:
        """The inverse of :meth:`pack`."""
        kind, values = described(text, tensors)
        layer = {
            k: values.pop(f"teacher_{k}") for k in HeadRows._fields if f"teacher_{k}" in values
        }
        given = [values.pop(f"teacher{i}") for i in (0, 1) if f"teacher{i}" in values]
        teacher = (HeadRows(**layer),) if layer else tuple(given)
        source = values.pop("source")
        return cls(kind.bare(values), backend, source, teacher)  # type: ignore[attr-defined]


class ChunkRows:
    """A loss on the rows of a call, with the statistics of the rows if they are asked for.

    Args:
        loss: the loss.
        target: (N,) class indices or (N, V) class probabilities.
        parts: the chunks.
        measure: whether the statistics are asked for.
        split: the loss on the columns of this process, if there are others.
        keep: whether their sums are kept for the gradient in the backward pass.

    Attributes:
        statistics: (N, 5), see :func:`labo.metrics.row_statistics`; None if not asked for.
    """

    def __init__(
        self,
        loss: LossRows,
        target: Tensor,
        parts: list[Part],
        measure: bool,
        split: SplitLoss | None = None,
        keep: bool = False,
    ) -> None:
        self.loss, self.target, self.parts = loss, target, parts
        self.split, self.keep = split, keep
        self._reduced: dict[int, Any] = {}  # of the chunks, see SplitRows
        self.longest = max(map(length, parts), default=0)
        self._teacher_logits: Tensor | None = None  # one buffer for all chunks
        self._known: set[int] = set()  # the chunks whose statistics are there
        self.statistics: Tensor | None = None
        if measure:
            shape = (len(target), metrics.COLUMNS)
            self.statistics = torch.zeros(shape, dtype=torch.float64, device=target.device)

    def __call__(self, logits: Tensor, number: int, factor: Factor) -> tuple[Tensor, Tensor | None]:
        """Values and gradient of a chunk, as :meth:`labo.fast.dispatch.FastRows.rows` gives them.

        The logits are those of the chunk, and are overwritten by the gradient. The factor is for
        all rows of the call.
        """
        part = self.parts[number]
        target, given = self.target[part], self._given(part)
        factor = factor[part] if isinstance(factor, Tensor) else factor
        (loss, backend, source, _), fast = self.loss, None
        if self.split is None and backend != "reference":
            # Stored classes: their log-probabilities are the source.
            fast = FastRows(loss, backend, *(given[::-1] if given else (source,)))
        measured = self._measured(logits, number, target, fast)
        if fast is not None:
            values, grad = fast.rows(logits, target, factor, logits, measured)
            if measured is not None and self.statistics is not None:
                self.statistics[part] = measured
            return values, grad
        if self.split is not None:
            rows = SplitRows(self.split, logits, target, given, out=logits)
            rows.reduced = self._reduced.get(number)
            values, grad = rows.rows(logits, factor)
            if self.keep:
                self._reduced[number] = rows.reduced
            return values, grad
        return _by_autograd(loss, logits, target, given, factor)

    def _given(self, part: Part) -> tuple[Tensor, ...]:
        """What the teacher gives for a chunk."""
        teacher = self.loss.teacher
        if not teacher or not isinstance(teacher[0], HeadRows):
            return tuple(x[part] for x in teacher)
        if self._teacher_logits is None:
            self._teacher_logits = teacher[0].buffer(self.longest)
        return (teacher[0].logits(part, out=self._teacher_logits[: length(part)]),)

    def _measured(
        self, logits: Tensor, number: int, target: Tensor, fast: FastRows | None
    ) -> Tensor | None:
        """Where the pass of the loss writes the statistics; None if they are not to be written."""
        # A backward pass has them from the forward pass.
        if self.statistics is None or number in self._known:
            return None
        self._known.add(number)
        if fast is not None and fast.measures(logits):
            return self.statistics.new_empty(len(target), metrics.COLUMNS)
        columns = None if self.split is None else self.split.columns
        found = metrics.row_statistics(logits, target, self.loss.loss.ignore_index, columns)
        self.statistics[self.parts[number]] = found
        return None


def _by_autograd(
    loss: Any, logits: Tensor, target: Tensor, teacher: tuple[Tensor, ...], factor: Factor
) -> tuple[Tensor, Tensor | None]:
    """The reference, differentiated by autograd; the gradient is written over the logits."""
    if factor is None:
        with torch.no_grad():
            return loss.compute(logits, target, *teacher), None
    with autograd_enabled():
        leaf = logits.detach().requires_grad_()
        values = loss.compute(leaf, target, *teacher)
        upstream = factor if isinstance(factor, Tensor) else torch.full_like(values, factor)
        (grad,) = torch.autograd.grad(values, leaf, upstream.to(values.dtype))
    return values.detach(), logits.copy_(grad)
