"""Checksums of files, verified when the files are read.

Data can be large, so the digest of a data file is computed once and remembered in the user's cache
folder, together with the file's size, inode and times of change. A file for which all of these are
the same is not read again. This finds every change made through the file system. It does not find
a disk that changes bits by itself: ``--verify`` (or ``LABO_VERIFY=1``) reads every file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from ..errors import RequestError
from .files import (
    Document,
    create,
    put_in_place,
    read_json,
    sha256,
    write_bytes,
    write_json,
)

MANIFEST = "manifest.json"
FORCE = "LABO_VERIFY"

_Known = tuple[int, int, int, int, str]  # size, inode, times of modification and change, sha256
_SETTLED = 2_000_000_000  # ns; a file changed this recently may change again without a new time


class DamagedError(RequestError):
    """A file is missing, or its content is not what was written."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"names a file elsewhere: {name!r}")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
"""The name of a file in a manifest, relative to the folder of the manifest and inside of it."""


class Manifest(Document):
    """The checksums of a folder. While a file is replaced, its old and its new one are listed."""

    sha256: dict[FileName, list[str]]  # file -> its checksums
    model: str | None = None  # the checksum of the model that the files are about, for records


class _Remembered(Document):
    """What is known of the files of a folder, by their names."""

    files: dict[str, _Known]


def cache_folder() -> Path:
    """$LABO_CACHE, or labo in the user's cache folder."""
    if place := os.environ.get("LABO_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labo"


# ------------------------------------------------------------------ digests


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of data files, by their names relative to ``folder``; remembered."""
    memory = _memory_of(folder)
    known = {} if os.environ.get(FORCE) else _recall(memory)
    computed: dict[str, str] = {}
    learned = False
    for name in names:
        before = _stamp(folder / name)
        if name in known and known[name][:4] == before:
            computed[name] = known[name][4]
            continue
        computed[name] = sha256(folder / name)
        if _stamp(folder / name) == before and time.time_ns() - before[3] > _SETTLED:
            known[name] = (*before, computed[name])
            learned = True
    if learned:
        _remember(memory, folder, known)
    return computed


def _stamp(path: Path) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _memory_of(folder: Path) -> Path:
    key = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_folder() / "digests" / f"{key[:32]}.json"


def _recall(memory: Path) -> dict[str, _Known]:
    try:
        return dict(read_json(memory, _Remembered).files)
    except RequestError:
        return {}  # nothing yet, or damaged: everything is hashed again


def _remember(memory: Path, folder: Path, known: Mapping[str, _Known]) -> None:
    document = {"folder": str(folder), "files": known}
    unfinished = memory.with_name(f".{memory.name}.{os.getpid()}.tmp")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with create(unfinished) as file:
            file.write(json.dumps(document).encode())
        os.replace(unfinished, memory)
    except (OSError, UnicodeError):
        unfinished.unlink(missing_ok=True)  # no cache: the files are hashed again next time


# ------------------------------------------------------------------ folders with a manifest


def verify(
    folder: Path, expected: Mapping[str, str | Iterable[str]], *, remember: bool = False
) -> None:
    """Compare files of a folder with their checksums; of several for a file one must fit.

    ``remember`` uses and updates the remembered digests; it is for data.
    """
    try:
        if remember:
            actual = digests(folder, expected)
        else:
            actual = {name: sha256(folder / name) for name in expected}
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is missing") from error
    except OSError as error:
        raise DamagedError(f"{error.filename or folder}: {error.strerror or error}") from error
    for name, checksums in expected.items():
        accepted = [checksums] if isinstance(checksums, str) else list(checksums)
        if actual[name] not in accepted:
            raise DamagedError(f"{folder / name} is damaged (its checksum does not fit)")


def verify_folder(folder: Path, *, remember: bool = False) -> bool:
    """Compare a folder with its ``manifest.json`` as :func:`verify` does; whether it has one."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST, Manifest)
    except RequestError as error:
        raise DamagedError(str(error)) from error
    verify(folder, manifest.sha256, remember=remember)
    return True


def write_manifest(
    folder: Path, checksums: Mapping[str, Iterable[str]], model: str | None = None
) -> None:
    listed = {name: sorted(values) for name, values in sorted(checksums.items())}
    write_json(folder / MANIFEST, {"sha256": listed} | ({} if model is None else {"model": model}))


def manifest_of(folder: Path) -> Manifest:
    """The manifest of a folder; an empty one if it has none, or a damaged one."""
    try:
        return read_json(folder / MANIFEST, Manifest)
    except RequestError:
        return Manifest(sha256={})


def write_listed(
    folder: Path,
    contents: Mapping[str, bytes],
    prepared: Mapping[str, str] | None = None,
    *,
    kept: Mapping[str, list[str]] | None = None,
    model: str | None = None,
) -> None:
    """Write files of a folder, and their checksums into its manifest; remove all but those kept.

    While files are replaced the manifest lists both their checksums, so that the folder is whole
    whenever the process is killed. ``prepared`` has the checksums of files that are there under
    their temporary names. ``model`` is what the files are about.
    """
    new = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    new |= prepared or {}
    old, kept = manifest_of(folder).sha256, kept or {}
    both = {name: {*old.get(name, ()), checksum} for name, checksum in new.items()}
    write_manifest(folder, {**kept, **both}, model)
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, content)
    for name in prepared or ():
        put_in_place(folder / name)
    write_manifest(folder, {**kept, **{name: [value] for name, value in new.items()}}, model)
    _remove_listed(folder, old.keys() - kept.keys() - new.keys())


def _remove_listed(folder: Path, names: Iterable[str]) -> None:
    """Remove files that a manifest names, unless a link leads to them."""
    for name in names:
        if (folder / name).parent.resolve().is_relative_to(folder.resolve()):
            (folder / name).unlink(missing_ok=True)
