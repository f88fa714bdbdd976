"""Text files, read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..compressed import DAMAGED, open_compressed
from ..errors import DataError

_LONGEST_LINE = 1 << 24  # bytes


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, compressed or not, without their ends, one at a time."""
    number = 0
    try:
        with open_compressed(path) as file:
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise DataError(f"{path}:{number}: a line of more than {_LONGEST_LINE} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"{path}:{number}: byte {byte:#04x} is not UTF-8") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except DAMAGED as error:
        raise DataError(f"{path}: truncated or damaged after line {number} ({error})") from error
