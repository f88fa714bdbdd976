"""Random changes to the bytes of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

# What parsers have trouble with: limits of integers, floats that are none, nesting, odd text.
_INTERESTING = (
    *b"0 -1 1e999 NaN -Infinity null true [] {} [[[[[[[[ 99999999999999999999 2147483648".split(),
    *b"4294967295 -2147483649 18446744073709551616 1e-400 0.1.2 0x ../".split(),
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\t"),
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def _flip(data: bytearray, chance: Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _truncate(data: bytearray, chance: Random) -> None:
    del data[chance.randrange(len(data)) :]


def _delete(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.choice((1, 2, 4, 16, 64))]


def _repeat(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    part = data[start : start + chance.choice((1, 4, 16, 64))]
    data[start:start] = part * chance.choice((1, 2, 100))


def _insert(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data) + 1)
    data[start:start] = chance.choice(_INTERESTING)


def _overwrite(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    data[start : start + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))


def _number(data: bytearray, chance: Random) -> None:
    """Another number where one was written out."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _insert(data, chance)
    start, end = chance.choice(found).span()
    data[start:end] = chance.choice(_INTERESTING)


def _swap(data: bytearray, chance: Random) -> None:
    one, other = sorted(chance.randrange(len(data)) for _ in range(2))
    size = chance.choice((1, 8, 32))
    data[one : one + size], data[other : other + size] = (
        data[other : other + size],
        data[one : one + size],
    )


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    *(_flip, _flip, _truncate, _delete, _repeat),
    *(_insert, _overwrite, _number, _number, _swap),
)


def mutate(data: bytes, chance: Random) -> bytes:
    """The data with one to four random changes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if changed:
            chance.choice(_CHANGES)(changed, chance)
    return bytes(changed)
