"""Hyper-parameters that change with the epoch."""

from __future__ import annotations

from torch import Tensor

from ..rows import exact


def progress(epoch: Tensor, epochs: int) -> Tensor:
    """min((epoch + 1) / epochs, 1), for an epoch counted from 0.

    A tensor, so that torch.compile does not compile again for each epoch; in float64, so that it
    does not limit the precision of the loss.
    """
    return (epoch + 1).clamp(max=epochs).to(exact(epoch.device)) / epochs
