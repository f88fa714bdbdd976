"""Built-in text: the reference manual of Python, as ``help()`` shows it. No download needed.

``pydoc_data.topics`` comes with every Python. A document is a section of it. Sections repeat each
other, so a paragraph that occurred before is left out: nothing held out was seen in training.
"""

from __future__ import annotations

import itertools
import platform
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from ..errors import DataError
from ..run.seeds import mix
from ..text.folder import FORMAT, cached_folder
from .documents import RawDocument
from .options import Tokenization
from .prepare import prepare_documents
from .prepared import PreparedDocuments

_EDITION = 1  # of the sections; another one makes other caches
_SHORTEST = 200  # characters of a section
_HEADING = re.compile(r"^(?=\S.*\n([*=\-~])\1{2,}$)", re.MULTILINE)
_BLANK = re.compile(r"\n\s*\n")
_HELD_OUT = 10  # one section in so many is for validation, and as many for the test


def manual_sections() -> list[RawDocument]:
    """The sections of the manual, in alphabetical order of their topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python comes without pydoc_data, its manual") from error
    seen: set[str] = set()
    sections = []
    for name in sorted(topics):
        for number, section in enumerate(_sections(topics[name]), 1):
            fresh = []
            for paragraph in _BLANK.split(section):
                key = " ".join(paragraph.split())
                if key and key not in seen:
                    seen.add(key)
                    fresh.append(paragraph.strip("\n"))
            text = "\n\n".join(fresh)
            if len(text) >= _SHORTEST:
                sections.append(RawDocument.of_text(f"{name}, section {number}", text))
    return sections


def _sections(text: str) -> Iterator[str]:
    starts = [0, *(match.start() for match in _HEADING.finditer(text)), len(text)]
    for start, stop in itertools.pairwise(starts):
        yield text[start:stop]


def manual_data(*, vocabulary: int = 2000, seed: int = 0) -> PreparedDocuments:
    """The manual, prepared; kept in $LABO_CACHE or the user's cache folder for the next time."""
    made_by = [platform.python_version(), version("tokenizers")]

    def prepare(folder: Path) -> None:
        sections = manual_sections()
        random.Random(mix(seed, "manual")).shuffle(sections)
        held_out = len(sections) // _HELD_OUT
        splits = {
            "valid": sections[:held_out],
            "test": sections[held_out : 2 * held_out],
            "train": sections[2 * held_out :],
        }
        prepare_documents(folder, splits, Tokenization(vocabulary=vocabulary))

    key = (_EDITION, FORMAT, made_by, vocabulary, seed)
    return PreparedDocuments(cached_folder("manual", key, prepare))
