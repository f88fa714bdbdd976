"""Parallel text as it is published, read as a stream of pairs.

An input is named in one of four ways, in which {pair}, {source} and {target} stand for the
languages:

- ``PREFIX``: the files PREFIX.de and PREFIX.en, or PREFIX.de.xml and PREFIX.en.xml;
- ``FILE,FILE``: the file of the source and the file of the target;
- ``FILE.csv``, ``FILE.jsonl``, ``FILE.parquet`` or a folder of ``datasets``: named columns;
- any other ``FILE``: both languages in one file, in columns separated by tabs.

Any text file may be gzipped. A file with ``.tags.`` in its name is in the tagged format of TED
talks, one that ends in ``.xml`` or ``.sgm`` holds <seg> elements, any other has a sentence per
line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..text.records import is_table, read_lines, read_rows, table_files

_SUFFIXES = ("", ".gz", ".xml", ".xml.gz", ".sgm", ".sgm.gz")
_MARKED_UP = re.compile(r"\.(xml|sgm)(\.gz)?$")
_TAG = re.compile(r"<(/?)(seg|doc)\b([^<>]*)>", re.IGNORECASE)
_TAG_START = re.compile(r"<seg\b", re.IGNORECASE)
_ID = re.compile(r'\bid="?([^">]*)"?', re.IGNORECASE)
_DOCUMENT = re.compile(r'\bdocid="([^"]*)"', re.IGNORECASE)
_METADATA = re.compile(r"</?(url|talkid|keywords|speaker|reviewer|translator|doc)\b[^>]*>")
_KEPT_TAGS = re.compile(r"</?(title|description)>")
_NESTED = "translation"  # the column in which ``datasets`` keeps a sentence by language


# ------------------------------------------------------------------ one file


def _tagged_lines(path: Path) -> Iterator[str]:
    """The sentences, titles and descriptions of a file in the tagged format of TED talks."""
    for line in read_lines(path):
        if not _METADATA.match(line.lstrip()):
            yield _KEPT_TAGS.sub("", line).strip()


def _segments(path: Path) -> Iterator[tuple[str, str]]:
    """The <seg> elements of a file: the document and id of each, and its text.

    They are found by their tags, because the files are not always well-formed XML.
    """
    document, key, begun = "", "", 0
    text: list[str] | None = None  # of the open segment
    for number, line in enumerate(read_lines(path), 1):
        position, opened = 0, 0
        for tag in _TAG.finditer(line):
            closes, name, attributes = bool(tag[1]), tag[2].lower(), tag[3]
            if name == "doc":
                if not closes and (match := _DOCUMENT.search(attributes)):
                    document = match[1]
            elif not closes:
                if text is not None:
                    raise DataError(f"{path}:{begun}: a <seg> without its end")
                match = _ID.search(attributes)
                key, begun, text = match[1] if match else "", number, []
                position, opened = tag.end(), opened + 1
            elif text is not None:
                text.append(line[position : tag.start()])
                yield f"{document} {key}", html.unescape(" ".join(text)).strip()
                text = None
        if opened < len(_TAG_START.findall(line)):
            raise DataError(f"{path}:{number}: a <seg> tag that does not end on its line")
        if text is not None:
            text.append(line[position:])
    if text is not None:
        raise DataError(f"{path}:{begun}: a <seg> without its end")


# ------------------------------------------------------------------ two sides


@dataclass(frozen=True)
class ParallelText:
    """Files of sentence pairs. Iterating reads them, any number of times."""

    files: tuple[Path, ...]
    read: Callable[[], Iterator[tuple[str, str]]]
    two_sided: bool = False  # a file for the source and one for the target

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self.read()


def _two_files(source: Path, target: Path) -> ParallelText:
    marked_up = {bool(_MARKED_UP.search(path.name)) for path in (source, target)}
    if len(marked_up) == 2:
        raise DataError(f"{source} and {target}: one has <seg> elements, the other has not")
    read = _pair_segments if marked_up == {True} else _pair_lines
    return ParallelText((source, target), partial(read, source, target), two_sided=True)


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


def _read_tables(
    paths: Sequence[Path], source: Sequence[str], target: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The pairs of files, from the first of the named columns that each file has."""
    for path in paths:
        chosen: tuple[str, str] | None = None
        for where, row in read_rows(path):
            if isinstance(row.get(_NESTED), Mapping):
                row = row[_NESTED]
            if chosen is None:
                chosen = _named_column(path, row, source), _named_column(path, row, target)
            yield _cell(where, row, chosen[0]), _cell(where, row, chosen[1])


def _named_column(path: Path, row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in row:
            return name
    raise DataError(
        f"{path}: no column {' or '.join(names)}, only {', '.join(map(str, row))}; name it with "
        "--columns source=NAME,target=NAME"
    )


def _cell(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""  # an empty side: dropped and counted
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is not text but {value!r:.40}")
    return " ".join(value.splitlines()) if "\n" in value or "\r" in value else value


# ------------------------------------------------------------------ finding the files


def find_parallel_text(
    name: str, source: str, target: str, columns: Sequence[str] = ("source", "target")
) -> ParallelText:
    """The files of an input, which is named as described at the top of this module.

    ``columns`` says what the columns of a tab-separated file hold: "source", "target" or a
    language; any other word, such as "-", for a column that is not used. For named columns it has
    "source=NAME", "target=NAME" or "LANGUAGE=NAME".
    """
    languages = {"pair": f"{source}-{target}", "source": source, "target": target}
    if set(re.findall(r"{(\w*)}|[{}]", name)) - {"pair", "source", "target"}:
        raise DataError(f"{name}: only {{pair}}, {{source}} and {{target}} are filled in")
    name = re.sub(r"{(\w+)}", lambda match: languages[match[1]], name)
    if "," in name:
        files = tuple(Path(part).expanduser() for part in name.split(","))
        if len(files) != 2:
            raise DataError(f"{name}: two files are FILE,FILE, first the source's")
        for path in files:
            if not path.is_file():
                raise DataError(f"{path}: no such file")
        return _two_files(*files)
    prefix = Path(name).expanduser()
    sides = ("source", source), ("target", target)
    if files := _table_files(prefix):
        names = [_names(columns, *side) for side in sides]
        return ParallelText(files, partial(_read_tables, files, *names))
    if prefix.is_file():
        indices = [_column(columns, *side) for side in sides]
        return ParallelText((prefix,), partial(_read_columns, prefix, *indices))
    return _two_files(_language_file(prefix, source), _language_file(prefix, target))


def _table_files(path: Path) -> tuple[Path, ...]:
    """The files of a table with named columns; none for another input."""
    if is_table(path) and path.exists():
        return tuple(table_files(path))
    if path.suffix.lower() == ".json" and path.is_file():
        return (path,)
    return tuple(sorted(path.glob("*.parquet"))) if path.is_dir() else ()


def _names(columns: Sequence[str], side: str, language: str) -> tuple[str, ...]:
    """The names that the column of a side may have."""
    given = dict(column.split("=", 1) for column in columns if "=" in column)
    for key in (side, language):
        if key in given:
            return (given[key],)
    return language, side


def _column(columns: Sequence[str], side: str, language: str) -> int:
    for index, name in enumerate(columns):
        if name in (side, language):
            return index
    raise DataError(f"columns {','.join(columns)}: none is {side} or {language}")


def _language_file(prefix: Path, language: str) -> Path:
    for suffix in _SUFFIXES:
        path = prefix.with_name(f"{prefix.name}.{language}{suffix}")
        if path.is_file():
            return path
    raise DataError(f"{prefix}.{language}: no such file, nor with .gz, .xml or .sgm at its end")
