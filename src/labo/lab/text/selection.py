"""Which tokens of a prediction are stored: the most probable ones, a nucleus, or draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RequestError
from .options import Sampling


@dataclass(frozen=True)
class ClassSelection:
    """How k entries are taken from a prediction; what is left of k is padding, -1 and -inf.

    "top" takes the most probable tokens, no more than reach ``top_p`` together. "random" draws k
    times from the prediction; each token has the share of the draws that it got. The mean of these
    is the prediction, so that the gradient of a KL divergence to them is unbiased; the k most
    probable tokens lean to their own.
    """

    top_k: int
    top_p: float = 1.0
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling == "random" and self.top_p < 1:
            raise RequestError("--top-p goes with --sampling top")

    def __str__(self) -> str:
        if self.sampling == "random":
            return f"random, seed {self.seed}"
        return "top" if self.top_p == 1 else f"top, p {self.top_p:g}"

    def __call__(self, log_p: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Indices, int32, and log-probabilities, (N, k), of predictions (N, V)."""
        if self.sampling == "random":
            return self._drawn(log_p, rng)
        top = log_p.topk(self.top_k)
        return self.nucleus(top.indices, top.values)

    def nucleus(self, indices: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Of the most probable tokens, in order, those that are needed to reach top_p."""
        before = log_p.double().exp().cumsum(-1) - log_p.double().exp()
        beyond = before >= self.top_p
        return indices.int().masked_fill(beyond, -1), log_p.masked_fill(beyond, -math.inf)

    def _drawn(self, log_p: Tensor, rng: torch.Generator | None) -> tuple[Tensor, Tensor]:
        k = self.top_k
        draws = torch.multinomial(log_p.float().cpu().exp(), k, replacement=True, generator=rng)
        draws = draws.sort(-1).values
        new = torch.ones_like(draws, dtype=torch.bool)
        new[:, 1:] = draws[:, 1:] != draws[:, :-1]
        place = new.long().cumsum(-1) - 1  # of each draw among the different tokens of its row
        counts = torch.zeros(draws.shape).scatter_add_(-1, place, torch.ones(draws.shape))
        indices = torch.full_like(draws, -1).scatter_(-1, place, draws)
        return indices.int(), (counts / k).log()
