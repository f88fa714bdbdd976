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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..rows import wide
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
            _check_tensor(name, getattr(self, name))
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
        b = self.b
        dtype = wide((b if isinstance(self.base, QuantizedWeight) else self.base).dtype)
        with torch.no_grad():
            a, norms = self.a.to(dtype), []
            for part, rows in by_blocks(self.base).blocks(dtype):
                norms.append(torch.addmm(rows, b[part].to(dtype), a, alpha=self.scale).norm(dim=1))
        return self.magnitude.to(wide(self.magnitude.dtype)) / torch.cat(norms)


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
