"""Logits that are computed when something uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# What can be told without the values: properties, whose functions are their getters, and methods.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn")
_KNOWN = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.__len__,
        Tensor.is_floating_point,
    ]
)


class LazyLogits(Tensor):
    """The logits of an evaluated model, which most evaluations do not look at.

    A ``Trainer`` drops them if there is no ``compute_metrics``. This tensor knows its shape, and
    computes the logits when an operation needs their values.

    Args:
        compute: returns the logits.
        shape, dtype, device: of the logits.
    """

    _compute: Callable[[], Tensor]
    _found: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Any, dtype: torch.dtype, device: torch.device
    ) -> LazyLogits:
        # a wrapper has no memory of its own
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._compute, made._found = compute, None
        return made

    def computed(self) -> Tensor:
        """The logits as a plain tensor."""
        if self._found is None:
            self._found = self._compute()
        return self._found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs)
        # accelerate's mixed precision, and ZeRO-3 with every output
        if function in (Tensor.float, Tensor.detach) and args[0]._found is None:
            lazy = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                dtype = torch.float32 if function is Tensor.float else lazy.dtype
                facts = (lazy.shape, dtype, lazy.device)
            return LazyLogits(lambda: function(lazy.computed()), *facts)
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For callers that do not go through ``__torch_function__``, in C++."""
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.computed())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.computed().clone()
