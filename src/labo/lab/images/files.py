"""Reading the files of a data set from a folder or an archive, compressed or not.

Archives are read in memory: nothing is extracted to disk, so a member's path cannot lead anywhere.
"""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ..errors import DataError

__all__ = ["read_files"]

_SUFFIXES = ("", ".gz", ".xz")
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def _decompress(data: bytes, path: Path) -> bytes:
    """The content of a file, whatever its name says: some browsers unpack .gz and keep the name."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
        if data.startswith(b"\xfd7zXZ\x00"):
            return lzma.decompress(data)
    except _DAMAGED as error:
        raise DataError(f"{path}: truncated or damaged compressed file ({error})") from error
    return data


def _read_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    found = {}
    for name in names:
        for path in (folder / (name + suffix) for suffix in _SUFFIXES):
            if path.is_file():
                found[name] = _decompress(path.read_bytes(), path)
                break
    return found


def _read_archive(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    found = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isfile() and name in names else None
                if content is not None:
                    found[name] = content.read()
    except _DAMAGED as error:
        raise DataError(f"{archive}: damaged, or not a tar archive") from error
    return found


def read_files(place: Path, names: Collection[str]) -> dict[str, bytes]:
    """Those of the named files that a place holds.

    Args:
        place: a folder, where a file may also end in .gz or .xz; or a tar archive, where the
            folders inside do not matter. It need not exist.
        names: plain file names.

    Returns:
        Their decompressed contents by name.
    """
    if place.is_dir():
        return _read_folder(place, names)
    return _read_archive(place, names) if place.is_file() else {}
