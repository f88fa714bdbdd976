"""The pickles of CIFAR, read without trusting them.

A pickle is a program. This reader runs none of it: of all that a pickle may name, only numpy's
array is known here, and it stands for an inert record of shape and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError

__all__ = ["ByteArray", "read_pickle"]


class _Dtype:
    """Stands for numpy.dtype; of its state only the name matters here."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


class ByteArray:
    """Stands for numpy.ndarray: what a pickle says of it, unchecked until it is used."""

    def __init__(self, *_: object) -> None:
        self.__setstate__((1, (), None, False, b""))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.data = state

    def to_tensor(self, shape: tuple[int, int]) -> Tensor:
        """The array as uint8 tensor; a ValueError unless it is plain bytes of this shape."""
        kind = self.dtype.name if isinstance(self.dtype, _Dtype) else self.dtype
        if kind not in ("u1", "|u1") or self.shape != shape:
            raise ValueError(f"an array of type {kind!r} and shape {self.shape}")
        if not isinstance(self.data, bytes | bytearray) or len(self.data) != math.prod(shape):
            raise ValueError(f"an array of shape {shape} without its {math.prod(shape)} bytes")
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        return flat.view(shape[::-1]).t() if self.is_fortran else flat.view(shape)


def _from_buffer(
    data: object, dtype: object, shape: object, order: object, *_: object
) -> ByteArray:
    """How pickles of protocol 5 make an array."""
    array = ByteArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into an old protocol: as text in Latin-1."""
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}") from None


def _text(key: object) -> object:
    return key.decode("latin1") if isinstance(key, bytes) else key


def read_pickle(data: bytes, path: Path) -> dict[object, Any]:
    """The dict in a pickle of plain values and numpy arrays.

    Args:
        data: the pickle.
        path: where it comes from, for messages.

    Returns:
        The dict with its keys as text; arrays are :class:`ByteArray`, text of Python 2 is bytes.

    Raises:
        DataError: it is no such pickle, or it asks for anything else, which is not run.
    """
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path}: refused, not a pickle of plain arrays ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: the pickle holds a {type(content).__name__}, not a dict")
    return {_text(key): value for key, value in content.items()}
