"""Files that are written whole or not at all, and read through a model that says what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..config import explain
from ..errors import LabError, RequestError

if TYPE_CHECKING:  # the report writes files too and needs no tensors
    from torch import Tensor


class Document(BaseModel):
    """The content of a JSON file. Keys that are not declared are kept and not checked."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


D = TypeVar("D", bound=BaseModel)


# ------------------------------------------------------------------ reading


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_regular(path: Path) -> Any:
    """Open a file for reading as bytes. A pipe or a device, which may never end, is an OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "not a regular file", str(path))
    return open(path, "rb")


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; a RequestError if it is missing or cannot be read."""
    try:
        with open_regular(path) as file:
            content: bytes = file.read()
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    return content


def read_json(path: Path, model: type[D]) -> D:
    """A JSON file as an instance of ``model``; a RequestError says what is wrong, and where."""
    content = read_bytes(path)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise RequestError(f"{path}: {explain_json(error, model)}") from error


def checked(value: Any, model: type[D], path: Path, prefix: str = "") -> D:
    """A value from a file as an instance of ``model``; ``prefix`` is where it is in the file."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise RequestError(f"{path}: {explain_json(error, model, prefix)}") from error


def explain_json(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """What is wrong with the content of a JSON file, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"not JSON ({first['ctx']['error']})"
    if not first["loc"] and first["type"] != "value_error":
        return f"{prefix.removesuffix('.')}: not an object" if prefix else "not a JSON object"
    return "; ".join(explain(error, model, prefix)[:3])


CHECKSUM = "checksum"  # the key of a JSON object that guards the others


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with a checksum of its own content."""
    plain = {name: value for name, value in document.items() if name != CHECKSUM}
    text = json.dumps(plain, sort_keys=True).encode("utf-8", "surrogatepass")
    return {**plain, CHECKSUM: "sha256:" + hashlib.sha256(text).hexdigest()}


def seal_fits(document: Mapping[str, Any]) -> bool:
    """Whether an object of :func:`sealed` is as it was written; True if it has no checksum."""
    return CHECKSUM not in document or sealed(document)[CHECKSUM] == document[CHECKSUM]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. The format holds tensors only; nothing is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open_regular(path):
            return load_file(path)
    # A damaged header can also name a type that torch does not have.
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise LabError(f"cannot read {path}: {error}") from error


# ------------------------------------------------------------------ writing


def refuse_foreign(path: Path, mark: bytes) -> None:
    """Refuse to replace a file without ``mark`` in its first 4096 bytes: labo did not write it."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if mark in file.read(4096):
                return
    raise RequestError(f"{path} exists and was not written by labo: choose another --out")


def flush(path: Path) -> None:
    """Flush a file, or the list of files in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # only POSIX can flush a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> BinaryIO:
    """A new, empty file, open for writing. What has the name is removed; no link is followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def append(path: Path) -> BinaryIO:
    """A file open for adding to its end; made if it is missing. A symbolic link is an OSError."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def temporary(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(f".{path.name}.tmp")


def put_in_place(path: Path) -> None:
    """Give a file that was written under its temporary name its own name."""
    flush(temporary(path))
    os.replace(temporary(path), path)
    flush(path.parent)


@contextmanager
def explained(verb: str, path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Within, an OSError becomes "cannot VERB PATH: ...", and what is unfinished is removed."""
    try:
        yield
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise LabError(f"cannot {verb} {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with explained("write", path, temporary(path)):
        with create(temporary(path)) as file:
            file.write(content)
        put_in_place(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Tensors that share memory (tied weights) are each written."""
    with explained("write", path, temporary(path)):
        write_temporary_tensors(path, tensors)
        put_in_place(path)


def write_temporary_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """:func:`write_tensors`, without giving the file its own name yet."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        plain[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    target = temporary(path)
    create(target).close()
    mode = target.stat().st_mode
    try:
        save_file(plain, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    target.chmod(mode)  # save_file makes files that only their owner may read


# ------------------------------------------------------------------ folders


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, if it can be; of a symbolic link, the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def replaced(folder: Path) -> Path:
    """The name of a folder while :func:`replace_folder` puts another in its place."""
    return folder.with_name(f".{folder.name}.replaced")


def replace_folder(new: Path, folder: Path) -> None:
    """Give ``new`` the name ``folder``, and remove the folder that had it.

    For an instant the old one is only there under the name of :func:`replaced`.
    """
    old = replaced(folder)
    if folder.exists():
        remove_folder(old)
        os.replace(folder, old)
    os.replace(new, folder)
    flush(folder.parent)
    remove_folder(old)
