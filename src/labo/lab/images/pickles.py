"""The pickles of CIFAR, read without executing anything from them.

A pickle is a program. Of the names that it may look up, this reader knows those of numpy's array
only, and replaces them by a record of shape and bytes.

The reader is the one written in Python: the one in C allocates as much memory as an index in the
file asks for. Keys of dicts must be plain values, because hashing a nested tuple that a short
pickle can describe takes forever.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..errors import DataError


class _Dtype:
    """Replaces numpy.dtype; only its name is kept."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


class ByteArray:
    """Replaces numpy.ndarray: what the pickle says of it, checked when it is used."""

    def __init__(self, *_: object) -> None:
        self.__setstate__((1, (), None, False, b""))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.data = state

    def to_tensor(self, shape: tuple[int, int]) -> Tensor:
        """The array as uint8 tensor; a ValueError unless it is plain bytes of this shape."""
        kind = self.dtype.name if isinstance(self.dtype, _Dtype) else None
        if not isinstance(kind, str) or kind not in ("u1", "|u1"):
            raise ValueError(f"an array of type {kind[:20] if isinstance(kind, str) else None!r}")
        if not _is_shape(self.shape) or self.shape != shape:
            found = self.shape if _is_shape(self.shape) else "of something else"
            raise ValueError(f"an array of shape {found}")
        if not isinstance(self.data, bytes | bytearray) or len(self.data) != math.prod(shape):
            raise ValueError(f"an array of shape {shape} without its {math.prod(shape)} bytes")
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        return flat.view(shape[::-1]).t() if self.is_fortran else flat.view(shape)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and len(value) < 9 and all(type(n) is int for n in value)


def _from_buffer(
    data: object, dtype: object, shape: object, order: object, *_: object
) -> ByteArray:
    """Replaces the function that makes an array in pickles of protocol 5."""
    array = ByteArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Python 3 writes bytes into an old protocol as text in Latin-1."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode(encoding)


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): ByteArray,
}
for _core in ("numpy.core", "numpy._core"):  # before and since numpy 2
    _KNOWN[f"{_core}.multiarray", "_reconstruct"] = ByteArray
    _KNOWN[f"{_core}.numeric", "_frombuffer"] = _from_buffer


_PythonUnpickler: Any = vars(pickle)["_Unpickler"]  # a private name; type stubs may lack it


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}") from None

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_dict()

    def _check_keys(self, keys: list[object]) -> None:
        if not all(isinstance(key, str | bytes | int) for key in keys):
            raise pickle.UnpicklingError("a key of a dict is not a plain value")

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict


def _refuse(unpickler: object) -> NoReturn:
    raise pickle.UnpicklingError("it makes objects, sets or persistent references")


for _opcode in (
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
):
    _Unpickler.dispatch[_opcode[0]] = _refuse


def _text(key: object) -> object:
    return key.decode("latin1") if isinstance(key, bytes) else key


def read_pickle(data: bytes, path: Path) -> dict[object, Any]:
    """The dict in a pickle of plain values and numpy arrays, with its keys as text.

    Arrays are :class:`ByteArray`, text of Python 2 is bytes.

    Raises:
        DataError: it is no such pickle, or it asks for anything else, which is not executed.
    """
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error)[:100] or type(error).__name__
        raise DataError(f"{path}: refused, not a pickle of plain arrays ({reason})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: the pickle holds a {type(content).__name__}, not a dict")
    return {_text(key): value for key, value in content.items()}
