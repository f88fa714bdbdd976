"""The private parts of PyTorch that the library uses, each because there is no public way.

Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

disable_compile = _disable_dynamo  # torch.compiler.disable would import the compiler at once


def inside_transform() -> bool:
    """Whether a transform of ``torch.func`` is running, inside which values cannot be read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


def assert_later(condition: Tensor, message: str) -> None:
    """Assert without waiting for the device and without a graph break."""
    torch._assert_async(condition.all() if condition.dim() else condition, message)


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Make autograd work inside an operator of torch.compile, where PyTorch switches it off."""
    off = torch._C._dispatch_tls_local_exclude_set()
    guard = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(),
        off.remove(torch._C.DispatchKey.AutogradFunctionality),
    )
    with guard, torch.enable_grad():
        yield


def fsdp_states() -> list[Any]:
    """The states of the modules under ``fully_shard``; empty if there is no such list."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return []
    return [reference() for reference in list(_module_state_mapping.values())]
