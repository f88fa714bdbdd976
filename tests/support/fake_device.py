"""A device that computes nothing: what a loss would do on a GPU, counted without one.

Meta tensors have shapes and no memory. Here they say that they are on ``cuda:0`` (or ``mps:0``),
and go through the dispatch of the library, autograd and its backward pass as real ones would.
:class:`Counted` notes every operation of PyTorch and every launch of a Triton kernel, the bytes of
large tensors that it reads and writes, how much of them is alive, and every time the host would
wait for the device. Sizes cost nothing.

It changes PyTorch for the whole process, so it is imported by scripts only (`gpu_costs.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: launches are counted

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.jit import JITFunction

from labo.fast import kernels  # compiled ones, because the interpreter is off

# They read as many entries of their first argument as they give.
_PICK = frozenset(("gather", "index", "index_select", "embedding"))
# They change some entries of their first argument in place.
_PUT = frozenset(("scatter_", "scatter_add_", "index_put_", "index_add_"))
# They do not read their first argument.
_OVERWRITE = frozenset(("fill_", "zero_", "copy_", "zeros_like", "ones_like", "full_like"))
# The host waits for their result.
_WAIT = frozenset(("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"))


def _is_free(func: Any, name: str) -> bool:
    """Whether an operation starts no kernel: a view, or memory that is not written."""
    return func.is_view or "empty" in name or name in ("_unsafe_view", "lift_fresh")


def _bytes(x: Tensor) -> int:
    """The bytes of the entries of a tensor in memory: what is expanded counts once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count


def _as_meta(x: Any, kind: str) -> Any:
    """The device "meta" for one of this kind; anything else as it is."""
    if isinstance(x, torch.device):
        return torch.device("meta") if x.type == kind else x
    return "meta" if isinstance(x, str) and x.partition(":")[0] == kind else x


class Counted(TorchDispatchMode):
    """Counts what happens on the device.

    Attributes:
        launches: (name, bytes read, bytes written) of each kernel.
        waits: names of the operations for which the host waits.
        peak: the most bytes of large tensors that were alive at once and not `given`.
        read: what the host reads for any number on the device; None makes reading an error.
    """

    read: float | None = None

    def __init__(self, large: int, kind: str, refused: torch.dtype | None) -> None:
        super().__init__()
        self.large, self.kind, self.refused, self.inside = large, kind, refused, False
        self.given()

    def given(self, *tensors: Tensor) -> None:
        """Start to count, with tensors that are there already."""
        self.launches: list[tuple[str, int, int]] = []
        self.waits: list[str] = []
        self.peak = 0
        self._given = {x.untyped_storage()._cdata for x in tensors}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def moved(self) -> int:
        return sum(read + written for _, read, written in self.launches)

    def names(self) -> Counter[str]:
        return Counter(name for name, _, _ in self.launches)

    @property
    def held(self) -> int:
        """Bytes of large tensors that are alive now and were not given."""
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in _WAIT and any(x.is_meta for x in taken):
            self.waits.append(name)
            if name in ("_local_scalar_dense", "equal") and self.read is not None:
                return bool(self.read) if name == "equal" else self.read
        if "device" in kwargs:  # in a backward pass, where the mode for functions is off
            kwargs["device"] = _as_meta(kwargs["device"], self.kind)
        with self.as_meta():
            result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in (*taken, *made)):
            return result
        if any(x.is_meta and x.dtype == self.refused for x in made):
            raise TypeError(f"{name} of {self.refused}, which this device does not have")
        if not _is_free(func, name):
            # A number on the CPU is an argument of a kernel, unless it is copied.
            copies = name in ("copy_", "_to_copy")
            if any(not x.is_meta and (x.dim() or copies) for x in taken):
                self.waits.append(f"{name} of a CPU tensor")
            if copies and any(not x.is_meta for x in made):
                self.waits.append(f"{name} to the CPU")
            self.launches.append((name, *self._traffic(name, taken, made)))
        self._note(made)
        return result

    @contextmanager
    def as_meta(self) -> Iterator[None]:
        """For code of PyTorch that makes meta tensors of meta tensors."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def _traffic(self, name: str, taken: list[Tensor], made: list[Tensor]) -> tuple[int, int]:
        """Bytes of large tensors that are read and written."""
        rest, written = self._large(taken[1:]), self._large(made)
        if name in _PICK:
            return rest + written, written
        if name in _PUT:
            return rest, rest
        return (rest if name in _OVERWRITE else self._large(taken)), written

    def _large(self, tensors: list[Tensor]) -> int:
        return sum(size for x in tensors if (size := _bytes(x)) >= self.large)

    def _note(self, made: list[Tensor]) -> None:
        """What is alive after an operation may be the peak."""
        for storage in (x.untyped_storage() for x in made if x.is_meta):
            if storage.nbytes() >= self.large and storage._cdata not in self._given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.peak = max(self.peak, self.held)

    def triton(self, name: str, arguments: dict[str, Any]) -> None:
        """A launch of a Triton kernel of the library: it writes ``out`` and reads the others."""
        matrices = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
        read = self._large([x for key, x in matrices.items() if key != "out"])
        if arguments.get("MASSES") == kernels.BEYOND_MARGIN.value and "out" not in arguments:
            read *= 2  # once for the maximum
        written = self._large([x for key, x in matrices.items() if key == "out"])
        self.launches.append((f"triton {name}", read, written))


class _Moved(TorchFunctionMode):
    """Tensors that are asked for on the device are meta tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], "meta")
        if func is not torch.autocast and func is not torch.amp.autocast_mode.autocast:
            args, kwargs = tree_map(lambda x: _as_meta(x, self.kind), (args, kwargs))
        return func(*args, **kwargs)


_counting: list[Counted] = []


def _count_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    arguments = dict(zip(self.arg_names, args, strict=False)) | options
    if _counting:
        _counting[-1].triton(self.fn.__name__, arguments)


@contextmanager
def fake_device(
    large: int, kind: str = "cuda", refused: torch.dtype | None = None
) -> Iterator[Counted]:
    """Tensors that are made with ``device="cuda"`` inside are on the device that is not there.

    Args:
        large: tensors of at least so many bytes are counted.
        kind: "cuda", or another type of device, which has no Triton kernels.
        refused: a dtype that the device does not have.
    """
    counted = Counted(large, kind, refused)
    plain = {name: getattr(Tensor, name) for name in ("device", "is_cuda", "data_ptr")}
    meta = torch.device(kind, 0)
    of_cuda = {
        name: getattr(torch.cuda, name) for name in ("is_available", "device_of", "_lazy_init")
    }
    run, make = JITFunction.run, torch.tensor

    def device(self: Tensor) -> torch.device:
        pretends = self.is_meta and not counted.inside
        return meta if pretends else plain["device"].__get__(self)

    def is_cuda(self: Tensor) -> bool:
        return kind == "cuda" and self.is_meta and not counted.inside

    def data_ptr(self: Tensor) -> int:
        return self.untyped_storage()._cdata if self.is_meta else plain["data_ptr"](self)

    Tensor.device, Tensor.is_cuda = property(device), property(is_cuda)  # type: ignore[assignment]
    Tensor.data_ptr = data_ptr  # type: ignore[assignment]
    torch.cuda.is_available = lambda: kind == "cuda"
    torch.cuda._lazy_init = lambda: None
    torch.cuda.device_of = lambda tensor: nullcontext()  # type: ignore[assignment, misc]
    JITFunction.run = _count_launch
    # In a backward pass, where the mode for functions is off.
    torch.tensor = lambda *x, device=None, **options: make(
        *x, device=_as_meta(device, kind), **options
    )
    try:
        with _Moved(kind), counted:
            _counting.append(counted)
            yield counted
    finally:
        _counting.clear()
        for name in plain:
            delattr(Tensor, name)
        for name, function in of_cuda.items():
            setattr(torch.cuda, name, function)
        JITFunction.run, torch.tensor = run, make
