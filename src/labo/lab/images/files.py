"""Reading the files of a data set from a folder or an archive, compressed or not.

Archives are read in memory. Nothing is extracted to disk, so the path of a member cannot lead out
of a folder.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ..compressed import DAMAGED, open_compressed, read_compressed, read_to_the_end
from ..errors import DataError

_SUFFIXES = ("", ".gz", ".xz")


def _read_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    found = {}
    for name in names:
        for path in (folder / (name + suffix) for suffix in _SUFFIXES):
            if path.is_file():
                found[name] = read_compressed(path)
                break
    return found


def _read_archive(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    found = {}
    with open_compressed(archive) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    content = tar.extractfile(member) if member.isfile() and name in names else None
                    if content is not None:
                        found[name] = content.read()
                        if len(found[name]) != member.size:
                            raise EOFError(f"{member.name} is cut off")
            read_to_the_end(stream)
        except (*DAMAGED, tarfile.TarError, ValueError, OverflowError) as error:
            raise DataError(f"{archive}: damaged, or not a tar archive ({error})") from error
    return found


def read_files(root: Path, names: Collection[str]) -> dict[str, bytes]:
    """Those of the named files that are in a folder or an archive, decompressed, by name.

    In a folder a file may also end in .gz or .xz; in a tar archive the folders inside do not
    matter. ``root`` need not exist.
    """
    if root.is_dir():
        return _read_folder(root, names)
    return _read_archive(root, names) if root.is_file() else {}
