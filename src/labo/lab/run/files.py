"""Files that are either whole or not there, whatever happens while they are written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LabError

if TYPE_CHECKING:  # the report writes files, too, and needs no tensors
    from torch import Tensor


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # only POSIX can flush a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(path: Path) -> Path:
    """Where a file is while it is written."""
    return path.with_name(f".{path.name}.tmp")


def _put_in_place(path: Path) -> None:
    flush(temporary(path))
    os.replace(temporary(path), path)
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    try:
        temporary(path).write_text(text, encoding="utf-8")
        _put_in_place(path)
    except OSError as error:
        temporary(path).unlink(missing_ok=True)
        raise LabError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file. Tensors that share memory (tied weights) are written out each."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        plain[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    try:
        save_file(plain, temporary(path), metadata={"format": "pt"})
        _put_in_place(path)
    except (OSError, SafetensorError) as error:
        temporary(path).unlink(missing_ok=True)
        raise LabError(f"cannot write {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; nothing else can be in one, and nothing is run."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise LabError(f"cannot read {path}: {error}") from error
