r"""The losses that the fused backends compute, and the rules that every backend follows.

Cross entropy, label smoothing and LABO are cross entropies with a label
:math:`\hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P`. They differ in P and alpha. Three
backends compute them with the same results: :mod:`labo.fused.blocked`, :mod:`labo.fused.native`
and :mod:`labo.fused.kernels`. Each has one function

``rows(logits, target, spec, *, weight, ignore_index, factor, out) -> (values, grad)``

- ``logits``: (N, K); ``target``: (N,) int64, checked before; ``weight``: (K,) class weights.
- ``factor``: None for values only. For the gradient too: the number, or the (N,) numbers, that it
  is multiplied with before it is rounded to the dtype of the logits.
- ``out``: where the gradient is written, (N, K) of the dtype of the logits. May be ``logits``.
- ``values``: (N,), at least float32. The value and the gradient of an ignored row are 0, whatever
  its logits are.

The rules, which the reference follows too:

- A class whose logit is -inf is masked. It has no part in P, and its gradient is 0 unless it is
  the label.
- 0 * inf = 0. A masked label costs infinity, unless its share 1 - alpha (in the precision of the
  computation) or its class weight is 0: then it costs nothing. 0 * NaN is NaN.
- The mean divides by the sum of the weights of the labels. If that is 0, because no row counts or
  because all labels have weight 0, the mean and its gradient are 0.
- The computation uses u = z - max z in at least float32. Where z is finite u is too: if the
  difference overflows, it is the lowest finite number. Such a class is not masked.
- A row with a NaN or a +inf, or with all classes masked, has the value NaN.
- The bits of a row depend on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

CROSS_ENTROPY, LABEL_SMOOTHING, LABO, LABO_ADAPTIVE = range(4)


class RowSpec(NamedTuple):
    """A loss of this family. The modes have the same numbers in ``native.c`` and the kernels."""

    mode: int
    alpha: float = 0.0
    tau: float = 1.0
    rho: float = 0.0


def cross_entropy() -> RowSpec:
    return RowSpec(CROSS_ENTROPY)


def label_smoothing(alpha: float) -> RowSpec:
    return RowSpec(LABEL_SMOOTHING, alpha=alpha)


def labo(tau: float, alpha: float | str, rho: float) -> RowSpec:
    if isinstance(alpha, str):
        return RowSpec(LABO_ADAPTIVE, tau=tau, rho=rho)
    return RowSpec(LABO, alpha=alpha, tau=tau)
