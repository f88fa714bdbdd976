"""What the tasks on text share: batches of tokens, and the loss at the tokens that are learned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..run.seeds import permutation
from ..tasks import Batch, Task
from .batching import token_draws
from .head import Head, head_loss

IGNORED = -100  # the target of a token that is given, not learned


class TokenTask(Task):
    """A task whose targets are tokens, and whose outputs are a :class:`Head` at those tokens.

    The batches are fixed for a run; each epoch uses them in another order.
    """

    tempered_records: ClassVar = True

    def set_batches(self, batches: Sequence[Tensor]) -> None:
        """Take the samples of each batch of an epoch."""
        self._batches = batches
        self.steps_per_epoch = len(batches)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> list[int]:
        order: list[int] = permutation(
            self.recipe.seed, epoch, len(self._batches), stream="order of batches"
        ).tolist()
        return order

    def global_batch(self, epoch: int, position: int) -> Tensor:
        return self._batches[self._order(epoch)[position]]

    def learned(self, batch: Batch) -> Tensor:
        """(N, T) bool: the targets that the outputs are for."""
        return batch.target != IGNORED

    def tokens(self, batch: Batch) -> Tensor:
        """(tokens,) the targets that the outputs are for."""
        return batch.target[self.learned(batch)]

    def token_draws(self, batch: Batch, stream: str) -> Tensor:
        return token_draws(self.recipe.seed, batch, self.learned(batch), stream)

    def loss(
        self, loss: nn.Module, outputs: Head, batch: Batch, teacher_outputs: tuple[Any, ...]
    ) -> Tensor:
        return head_loss(loss, outputs, self.tokens(batch), *teacher_outputs)

    def sums(self, outputs: Head, batch: Batch) -> Tensor:
        learned = self.learned(batch)
        sums = torch.zeros(learned.shape, device=learned.device)
        sums[learned] = outputs.states.detach().float().sum(-1)
        return sums.sum(-1)
