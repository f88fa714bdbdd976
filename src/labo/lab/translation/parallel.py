"""Parallel text as it is published, read as a stream of pairs.

An input is named in one of three ways, in which {pair}, {source} and {target} stand for the
languages:

- ``PREFIX``: the files PREFIX.de and PREFIX.en, or PREFIX.de.xml and PREFIX.en.xml;
- ``FILE,FILE``: the file of the source and the file of the target;
- ``FILE``: both languages in one file, in columns separated by tabs.

Any file may be gzipped. A file with ``.tags.`` in its name is in the tagged format of TED talks,
one that ends in ``.xml`` or ``.sgm`` holds <seg> elements, any other has a sentence per line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ..errors import DataError
from ..text.lines import read_lines

__all__ = ["ParallelText", "find_parallel_text"]

_SUFFIXES = ("", ".gz", ".xml", ".xml.gz", ".sgm", ".sgm.gz")
_MARKED_UP = re.compile(r"\.(xml|sgm)(\.gz)?$")
_SEGMENT = re.compile(r'<seg id="?([^">]*)"?>(.*?)</seg>', re.DOTALL | re.IGNORECASE)
_METADATA = re.compile(r"</?(url|talkid|keywords|speaker|reviewer|translator|doc)\b[^>]*>")
_KEPT_TAGS = re.compile(r"</?(title|description)>")


# ------------------------------------------------------------------ one file


def _tagged_lines(path: Path) -> Iterator[str]:
    """The sentences, titles and descriptions of a file in the tagged format of the TED talks."""
    for line in read_lines(path):
        if not _METADATA.match(line.lstrip()):
            yield _KEPT_TAGS.sub("", line).strip()


def _segments(path: Path) -> Iterator[tuple[str, str]]:
    """The <seg> elements of a file: where each stands, and its text.

    They are found by their tags, for the files are not always well-formed XML.
    """
    document, held, begun = "", "", 0
    for number, line in enumerate(read_lines(path), 1):
        if found := re.search(r'<doc\b[^>]*\bdocid="([^"]*)"', line, re.IGNORECASE):
            document = found[1]
        if not held and "<seg" not in line.lower():
            continue
        begun = begun if held else number
        held = f"{held} {line}" if held else line
        end = 0
        for match in _SEGMENT.finditer(held):
            yield f"{document} {match[1]}", html.unescape(match[2]).strip()
            end = match.end()
        rest = held[end:]
        held = rest if "<seg" in rest.lower() else ""
    if held:
        raise DataError(f"{path}:{begun}: a <seg> without its end")


# ------------------------------------------------------------------ two sides


@dataclass(frozen=True)
class ParallelText:
    """Files that hold sentence pairs; iterating reads them, as often as wanted.

    Attributes:
        files: the file of the source and that of the target, or one file with columns.
        columns: of such a file, the places of source and target.
    """

    files: tuple[Path, ...]
    columns: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.columns is not None:
            return _read_columns(self.files[0], *self.columns)
        source, target = self.files
        marked_up = [bool(_MARKED_UP.search(path.name)) for path in self.files]
        if all(marked_up):
            return _pair_segments(source, target)
        if any(marked_up):
            raise DataError(f"{source} and {target}: one has <seg> elements, the other has not")
        return _pair_lines(source, target)


def _pair_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    readers = [_tagged_lines if ".tags." in path.name else read_lines for path in (source, target)]
    left, right = readers[0](source), readers[1](target)
    for number, (one, other) in enumerate(zip_longest(left, right), 1):
        if one is None or other is None:
            counts = [number - 1, number + sum(1 for _ in (right if one is None else left))]
            if other is None:
                counts.reverse()
            raise DataError(
                f"{source} has {counts[0]} lines, {target} has {counts[1]}: not aligned"
            )
        yield one, other


def _pair_segments(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    missing = (None, "")
    for number, (one, other) in enumerate(
        zip_longest(_segments(source), _segments(target), fillvalue=missing), 1
    ):
        if one[0] != other[0]:
            names = ["missing" if key is None else repr(key.strip()) for key, _ in (one, other)]
            raise DataError(
                f"segment {number} is {names[0]} in {source}, {names[1]} in {target}: not aligned"
            )
        yield one[1], other[1]


def _read_columns(path: Path, source: int, target: int) -> Iterator[tuple[str, str]]:
    width = 0
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(f"{path}:{number}: {len(cells)} columns, but line 1 has {width}")
        if width <= max(source, target):
            raise DataError(
                f"{path}:{number}: {width} columns separated by tabs, but source and target need "
                f"{max(source, target) + 1}; for a file per language give PREFIX or FILE,FILE"
            )
        yield cells[source], cells[target]


# ------------------------------------------------------------------ finding the files


def find_parallel_text(
    name: str, source: str, target: str, columns: Sequence[str] = ("source", "target")
) -> ParallelText:
    """The files of an input.

    Args:
        name: as described at the head of this module.
        source: the language of the source, such as "de".
        target: the language of the target.
        columns: what the columns of a single file hold: "source", "target" or a language; any
            other word, such as "-", for a column that is not used.

    Raises:
        DataError: no such files.
    """
    try:
        name = name.format(pair=f"{source}-{target}", source=source, target=target)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"{name}: only {{pair}}, {{source}} and {{target}} are filled in"
        ) from error
    if "," in name:
        files = tuple(Path(part).expanduser() for part in name.split(","))
        if len(files) != 2:
            raise DataError(f"{name}: two files are FILE,FILE, first the source's")
        for path in files:
            if not path.is_file():
                raise DataError(f"{path}: no such file")
        return ParallelText(files)
    prefix = Path(name).expanduser()
    if prefix.is_file():
        return ParallelText(
            (prefix,), (_column(columns, "source", source), _column(columns, "target", target))
        )
    return ParallelText((_language_file(prefix, source), _language_file(prefix, target)))


def _column(columns: Sequence[str], side: str, language: str) -> int:
    for place, name in enumerate(columns):
        if name in (side, language):
            return place
    raise DataError(f"columns {','.join(columns)}: none is {side} or {language}")


def _language_file(prefix: Path, language: str) -> Path:
    for suffix in _SUFFIXES:
        path = prefix.with_name(f"{prefix.name}.{language}{suffix}")
        if path.is_file():
            return path
    raise DataError(f"{prefix}.{language}: no such file, nor with .gz, .xml or .sgm at its end")
