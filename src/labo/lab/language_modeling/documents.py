"""Documents of every kind, read one at a time.

A *text* is learned as a whole. An *example* for supervised fine-tuning has parts: what is given (a
prompt, the messages of a user) and what is learned (the completion, the messages of the assistant).

Inputs are text files, tables (JSON lines, CSV, Parquet, Arrow, a folder saved by ``datasets``), and
folders of such files. The rows of a table have a column ``text``; or ``prompt`` and ``completion``;
or ``messages``, a list of ``{"role": ..., "content": ...}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import DataError
from ..text.options import Unit
from ..text.records import is_table, read_lines, read_rows, table_files

Kind = Literal["text", "prompt", "chat"]
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""(messages, whether an answer follows) -> the text of a chat."""

LARGEST = 1 << 25  # characters of a document
_TEXT = (".txt", ".txt.gz", ".text", ".md", ".rst")


class Part(NamedTuple):
    """A stretch of a document, and whether the model is to learn to say it."""

    text: str
    learned: bool


@dataclass(frozen=True)
class RawDocument:
    """A document: where it is from ("manual.txt", or "manual.jsonl:17"), and its text in order."""

    name: str
    kind: Kind
    parts: tuple[Part, ...]

    @classmethod
    def of_text(cls, name: str, text: str) -> RawDocument:
        """A text, all of which is learned."""
        return cls(name, "text", (Part(text, True),))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def learned_bytes(self) -> int:
        """UTF-8 bytes of what is learned."""
        return sum(len(part.text.encode()) for part in self.parts if part.learned)


def find_inputs(names: Sequence[str]) -> list[Path]:
    """Files and tables, folders replaced by what is in them."""
    inputs: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_file() or is_table(path):
            inputs.append(path)
        elif path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            inside = [file for file in files if is_table(file) or file.name.lower().endswith(_TEXT)]
            if not inside:
                raise DataError(f"{path}: no files that end in {', '.join(_TEXT)}, .jsonl, ...")
            inputs += inside
        else:
            raise DataError(f"{path}: no such file or folder")
    return inputs


def input_files(path: Path) -> list[Path]:
    """The files that an input consists of."""
    return table_files(path) if is_table(path) else [path]


def read_documents(path: Path, unit: Unit, column: str, render: Render) -> Iterator[RawDocument]:
    """The documents of an input: rows of a table, or whole files, paragraphs or lines.

    ``column`` is the name of the column with text, ``render`` writes the text of a chat.
    """
    if is_table(path):
        for where, row in read_rows(path):
            yield _from_row(where, row, column, render)
        return
    for name, text in _TEXT_UNITS[unit](path):
        yield RawDocument.of_text(name, text)


# ------------------------------------------------------------------ text files


def _whole_file(path: Path) -> Iterator[tuple[str, str]]:
    yield path.name, "\n".join(_limited(path, read_lines(path)))


def _paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    numbered = enumerate(read_lines(path), 1)
    for has_text, rows in groupby(numbered, key=lambda row: bool(row[1].strip())):
        if has_text:
            first, line = next(rows)
            rest = (line for _, line in rows)
            yield f"{path.name}:{first}", "\n".join(_limited(path, chain([line], rest)))


def _single_lines(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), 1):
        yield f"{path.name}:{number}", line


_TEXT_UNITS = {"file": _whole_file, "paragraph": _paragraphs, "line": _single_lines}


def _limited(path: Path, lines: Iterable[str]) -> Iterator[str]:
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > LARGEST:
            raise DataError(
                f"{path}: a document of more than {LARGEST} characters; "
                "--documents paragraph or --documents line makes smaller ones"
            )
        yield line


# ------------------------------------------------------------------ rows


def _from_row(where: str, row: Mapping[str, Any], column: str, render: Render) -> RawDocument:
    name = Path(where).name
    if "messages" in row:
        return RawDocument(name, "chat", _chat(where, row["messages"], render))
    if "prompt" in row and "completion" in row:
        prompt, completion = _string(where, row, "prompt"), _string(where, row, "completion")
        return RawDocument(name, "prompt", (Part(prompt, False), Part(completion, True)))
    if column in row:
        return RawDocument.of_text(name, _string(where, row, column))
    raise DataError(
        f"{where}: no column {column!r}, nor prompt and completion, nor messages; "
        f"it has {', '.join(map(str, row)) or 'none'}"
    )


def _string(where: str, row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} must be a string, got {type(value).__name__}")
    if len(value) > LARGEST:
        raise DataError(f"{where}: {column} has more than {LARGEST} characters")
    return value


def _chat(where: str, messages: object, render: Render) -> tuple[Part, ...]:
    """The text of a chat, with what the assistant says to be learned."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of messages")
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise DataError(f"{where}: message {number} must have a {key} that is a string")
    parts: list[Part] = []
    done = ""
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        before = _rendered(where, render, messages[: number - 1], True)
        after = _rendered(where, render, messages[:number], False)
        if not before.startswith(done) or not after.startswith(before):
            raise DataError(
                f"{where}: the chat template changes earlier messages when message {number} "
                "follows, so that the answers cannot be told from the rest"
            )
        answer = after[len(before) :]
        said = answer.rstrip()
        parts += [Part(before[len(done) :], False), Part(said, True)]
        parts.append(Part(answer[len(said) :], False))
        done = after
    if not parts:
        raise DataError(f"{where}: no message of the assistant, so that nothing can be learned")
    return tuple(part for part in parts if part.text)


def _rendered(
    where: str, render: Render, messages: Sequence[Mapping[str, Any]], answer: bool
) -> str:
    try:
        return render(messages, answer)
    except Exception as error:  # templates raise errors of many kinds
        raise DataError(f"{where}: the chat template fails: {error}") from error
