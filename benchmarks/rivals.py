"""Losses of other libraries that take part on a GPU, where they are installed.

Each is called as its documentation shows. Some overwrite the logits with their gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

OnLogits = Callable[[Tensor, Tensor], Tensor]
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


def _found(module: str, name: str) -> Any:
    """A function of a library, or None: not installed, or it does not import on this machine."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None


def on_logits() -> dict[str, OnLogits]:
    """Called with logits and target."""
    losses: dict[str, OnLogits] = {}
    liger = _found("liger_kernel.transformers.functional", "liger_cross_entropy")
    if liger is not None:
        losses["Liger CE"] = liger
        losses["Liger LS"] = lambda z, y: liger(z, y, label_smoothing=0.1)
    quack = _found("quack.cross_entropy", "cross_entropy")
    if quack is not None:
        losses["quack CE"] = lambda z, y: quack(z, y).mean()
    trl = _found("trl.kernels", "selective_log_softmax_and_entropy")
    if trl is not None:
        losses["TRL log-probabilities and entropy"] = lambda z, y: -trl(z, y)[0].mean()
    return losses


def linear() -> dict[str, Linear]:
    """Called with hidden states, weight and target."""
    losses: dict[str, Linear] = {}
    liger = _found("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if liger is not None:
        losses["Liger linear CE"] = liger
        losses["Liger linear LS"] = lambda x, w, y: liger(x, w, y, label_smoothing=0.1)
    cut = _found("cut_cross_entropy", "linear_cross_entropy")
    if cut is not None:
        losses["cut-cross-entropy"] = cut
    quack = _found("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    if quack is not None:
        losses["quack linear CE"] = quack
    trl = _found("trl.kernels", "ChunkedLogProbFunction")
    if trl is not None:
        size = _found("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE") or 8192
        fixed = (1.0, size, None, 1.0, ())
        losses["TRL chunked log-probabilities"] = lambda x, w, y: (
            -trl.apply(x, w, None, y, *fixed)[0].mean()
        )
    return losses
