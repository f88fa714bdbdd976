r"""What the fused kernels compute, said once: the losses that one pass over a row can give.

Cross entropy, label smoothing and LABO are cross entropies with a label
:math:`\hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P`; they differ in P and alpha. Three layers
compute them with the same results (:mod:`labo.fused.blocked`, :mod:`labo.fused.native`,
:mod:`labo.fused.kernels`), each through one function

``rows(logits, target, spec, *, weight, ignore_index, factor, out) -> (values, grad)``

- ``logits``: (N, K); ``target``: (N,) int64, checked before; ``weight``: (K,) class weights.
- ``factor``: None for values only; a number or one per row, (N,), for the gradient too, times it.
- ``out``: where the gradient goes, (N, K) of the dtype of the logits; may be ``logits`` itself.
- ``values``: (N,), at least float32; 0 for ignored rows, whose gradient is 0 whatever they hold.

The bits of a row depend on that row alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

CROSS_ENTROPY, LABEL_SMOOTHING, LABO, LABO_ADAPTIVE = range(4)


class RowSpec(NamedTuple):
    """A loss of the family; the numbers of the modes are those of the kernels."""

    mode: int
    alpha: float = 0.0
    tau: float = 1.0
    rho: float = 0.0

    def reference(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
    ) -> Tensor:
        """The values by the reference implementation, (N,), with their graph."""
        from .. import functional as F

        shared: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
        shared |= {"reduction": "none", "impl": "reference"}
        if self.mode == CROSS_ENTROPY:
            return F.cross_entropy_loss(logits, target, **shared)
        if self.mode == LABEL_SMOOTHING:
            alpha = self.alpha
            return F.label_smoothing_loss(logits, target, alpha=alpha, **shared)
        strength = "adaptive" if self.mode == LABO_ADAPTIVE else self.alpha
        return F.labo_loss(
            logits,
            target,
            tau=self.tau,
            alpha=strength,
            rho=self.rho,
            **shared,
        )


def cross_entropy() -> RowSpec:
    return RowSpec(CROSS_ENTROPY)


def label_smoothing(alpha: float) -> RowSpec:
    return RowSpec(LABEL_SMOOTHING, alpha=alpha)


def labo(tau: float, alpha: float | str, rho: float) -> RowSpec:
    if isinstance(alpha, str):
        return RowSpec(LABO_ADAPTIVE, tau=tau, rho=rho)
    return RowSpec(LABO, alpha=alpha, tau=tau)
