"""Text files, read line by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

__all__ = ["read_lines"]


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, gzipped or not, without their ends, one at a time.

    Raises:
        DataError: it cannot be read, is damaged, or a line is not UTF-8.
    """
    number = 0
    try:
        with gzip.open(path) if _is_gzipped(path) else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"{path}:{number}: byte {byte:#04x} is not UTF-8") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged after line {number} ({error})") from error


def _is_gzipped(path: Path) -> bool:
    """Whatever its name says: some browsers unpack .gz and keep the name."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"
