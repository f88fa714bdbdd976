"""What the functions of a backend take and return; see labo.fast.formula."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..sums import Passes


class RowInputs(NamedTuple):
    """What both functions of a backend take beside the logits."""

    target: Tensor  # (N,) int64
    plan: Passes
    weight: Tensor | None  # (K,) class weights
    ignore_index: int
    source: Tensor | None = None  # what the masses come from


# ``top`` and ``source_top`` are the largest logits of a row and of its teacher; ``top_at`` is the
# first class that has it, if a formula asks for that; ``u_y`` is u of the target, -inf if that is
# masked, and finite if it is not; ``qd`` and ``rd`` are the sums of q d and r d, d = (v - u) / tau;
# ``qs`` is that of q / (1 + exp(x)).
SUMS = (
    *("top", "source_top", "top_at", "u_y", "count", "e", "ue", "r"),
    *("ur", "q", "qu", "qd", "wq", "wqu", "rd", "rmix", "qmix", "qs", "mix", "emix"),
)
MIXED = SUMS[-2:]  # those of a mixture with the uniform distribution
MIXED_TEACHER = SUMS[-5:-2]  # with a teacher
# The gradient is from_e e + from_ue u e + from_r r + (from_q + from_wq w) q + from_one + from_u u
# + from_emix e log(1 + exp(-x)) + from_rd r d + from_rmix r log(1 + exp(x)) + from_qs q / (1 +
# exp(x)), except that at_target and at_top are the entries of the target and
# of the class top_at (with TOP; -1 for none). Masked classes have none of it.
COEFFICIENTS = (
    *("top", "source_top", "from_e", "from_ue", "from_r", "from_q"),
    *("from_wq", "from_one", "from_u", "from_emix", "at_target", "top_at", "at_top"),
    *("from_rd", "from_rmix", "from_qs"),
)
