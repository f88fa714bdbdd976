"""Sixty sentence pairs in German and English, and their preparation."""

from __future__ import annotations

import gzip
import hashlib
from contextlib import contextmanager
from pathlib import Path

import pytest

from labo.cli import main
from labo.lab.errors import DataError
from labo.lab.translation import prepare
from labo.lab.translation.options import choose
from labo.lab.translation.prepared import Prepared

NOUNS = {"Hund": "dog", "Katze": "cat", "Straße": "street", "Kind": "child", "Baum": "tree"}


VERBS = {"sieht": "sees", "kennt": "knows", "sucht": "looks for"}


PAIRS = [
    (f"Das {one} {verb} „{other}“.", f"The {NOUNS[one]} {VERBS[verb]} the “{NOUNS[other]}”.")
    for one in NOUNS
    for verb in VERBS
    for other in NOUNS
    if one != other
]  # 60


SPLITS = {"train": PAIRS[:44], "valid": PAIRS[44:52], "test": PAIRS[52:]}


@contextmanager
def refused(message: str, kind: type[Exception] = DataError):
    """The request is refused, in one line that matches."""
    with pytest.raises(kind, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def write(path: Path, text: str | bytes, compress: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def lines(texts) -> str:
    return "".join(f"{text}\n" for text in texts)


def write_corpus(folder: Path, splits=SPLITS) -> Path:
    for split, pairs in splits.items():
        for language, side in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            write(folder / f"{split}.{language}", lines(side))
    return folder


def ask(folder: Path, preset: str | None = None, text=(), **settings):
    """Options for the corpus in a folder."""
    files = {split: [str(folder / split)] for split in SPLITS}
    return choose(preset, {"pair": ["de-en"], "vocabulary": 300} | files | dict(text) | settings)


def run(folder: Path, out: str = "out", preset: str | None = None, text=(), **settings) -> Prepared:
    return prepare.prepare(ask(folder, preset, text, **settings), folder / out)


def counted(folder: Path, pairs, **settings) -> Prepared:
    return run(write_corpus(folder, SPLITS | {"train": pairs}), **settings)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def labo(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0
