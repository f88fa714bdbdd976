"""Reading the files of a data set from a folder or an archive, compressed or not.

Archives are read in memory. Nothing is extracted to disk, so the path of a member cannot lead out
of a folder.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ..compressed import DAMAGED, open_compressed
from ..errors import DataError

_SUFFIXES = ("", ".gz", ".xz")


def _read_file(path: Path) -> bytes:
    with open_compressed(path) as file:
        try:
            return file.read()
        except DAMAGED as error:
            raise DataError(f"{path}: truncated or damaged compressed file ({error})") from error


def _read_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    contents = {}
    for name in names:
        paths = (folder / (name + suffix) for suffix in _SUFFIXES)
        if path := next((path for path in paths if path.is_file()), None):
            contents[name] = _read_file(path)
    return contents


def _read_archive(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    contents = {}
    with open_compressed(archive) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    content = tar.extractfile(member) if member.isfile() and name in names else None
                    if content is not None:
                        contents[name] = content.read()
                        if len(contents[name]) != member.size:
                            raise EOFError(f"{member.name} is cut off")
            while stream.read(1 << 20):  # to the end, for the sake of its checksum
                pass
        except (*DAMAGED, tarfile.TarError, ValueError, OverflowError) as error:
            raise DataError(f"{archive}: damaged, or not a tar archive ({error})") from error
    return contents


def read_files(root: Path, names: Collection[str]) -> dict[str, bytes]:
    """Those of the named files that are in a folder or an archive, decompressed, by name.

    In a folder a file may also end in .gz or .xz; in a tar archive the folders inside do not
    matter. ``root`` need not exist.
    """
    if root.is_dir():
        return _read_folder(root, names)
    return _read_archive(root, names) if root.is_file() else {}
