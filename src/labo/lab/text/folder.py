"""Folders of prepared text: made whole or not at all, and verified when they are read.

A folder has Arrow files, one per split, a tokenizer and a manifest with the checksum of each file.
The manifest is written last, so a folder that has one is complete. All files are verified before
anything is mapped: each is hashed once and remembered, see :mod:`labo.lab.run.checksums`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, RootModel
from rich.console import Console

from ..errors import DataError, LabError, RequestError, printable
from ..run import checksums
from ..run.files import (
    Document,
    flush,
    read_json,
    remove_folder,
    replace_folder,
    replaced,
    seal_fits,
    sealed,
    sha256,
    write_json,
    write_text,
)
from ..run.lock import locked
from ..run.progress import ProgressBars
from .arrow import read_table
from .subwords import panics_refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""How often something occurs: fits into int64."""
MANIFEST = "prepared.json"
SPLITS = ("train", "valid", "test")


class Maker(NamedTuple):
    """A command that makes folders, and what their manifests say they are for; may be nothing."""

    command: str
    task: str | None


class FolderManifest(Document):
    """What ``prepared.json`` has for every kind of text: digests of itself and of each file."""

    format: int
    checksum: str
    sha256: dict[checksums.FileName, str]

    @property
    def content_fingerprint(self) -> str:
        """The name of a folder with these files: the SHA-256 of the list of checksums."""
        return _fingerprint(self.sha256)


_M = TypeVar("_M", bound=FolderManifest)
_S = TypeVar("_S")


class _Frequencies(RootModel[dict[str, list[Count]]]):
    """Vocabulary -> how often each of its types occurs in the training split."""


def _fingerprint(digests: Mapping[str, str]) -> str:
    listing = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(listing.encode()).hexdigest()


# ------------------------------------------------------------------ writing


def check_apart(out: str | Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to write a folder that is read, contains what is read, or is inside of it."""
    out = Path(out).expanduser().resolve()
    for given in inputs:
        path = Path(given).expanduser().resolve()
        if path.exists() and (out == path or out in path.parents or path in out.parents):
            where = "is" if out == path else "contains" if out in path.parents else "is inside"
            raise RequestError(f"{out} {where} the input {given}: choose another folder to write")


def check_splits(options: Any) -> None:
    """Refuse options of a command that give a split no data, or two kinds of them."""
    if not options.train:
        raise ValueError("--train: no training data")
    sources = (
        ("--valid", options.valid, "--holdout", options.holdout),
        ("--test", options.test, "--holdout-test", options.holdout_test),
    )
    for split, inputs, holdout, every in sources:
        if inputs and every:
            raise ValueError(f"{split} and {holdout} exclude each other")
        if not inputs and not every:
            raise ValueError(f"{split}: no such data; give {split} or {holdout}")


def check_free(out: Path, maker: Maker, force: bool) -> Path:
    """The absolute path of a folder that may be made; links are followed.

    ``force`` replaces a folder of the same maker, never another one.
    """
    out = out.expanduser().resolve()
    above = next(parent for parent in out.parents if parent.exists())
    if not above.is_dir():
        raise RequestError(f"cannot write {out}: {above} is a file, not a folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    if not (out / MANIFEST).is_file():
        raise RequestError(f"{out} exists and holds no prepared data: choose another folder")
    if not was_made_by(maker, out):
        raise RequestError(
            f"{out} exists and was not made by `{maker.command}`: choose another folder"
        )
    if not force:
        raise RequestError(f"{out} exists; --force replaces it")
    return out


def was_made_by(maker: Maker, folder: Path) -> bool:
    """Whether the manifest says so; the files may be damaged."""
    try:
        document = read_json(folder / MANIFEST, Document).model_dump()
    except RequestError:
        return False
    return "format" in document and document.get("task") == maker.task


@contextmanager
def building(out: Path, maker: Maker, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``out`` if nothing fails.

    A process that wants to build the same folder waits here. What a killed process left is removed.
    """
    folder, old = out.with_name(f".{out.name}.preparing"), replaced(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out.with_name(f".{out.name}.lock"), out, wait=True):
            _finish_replacement(out)
            check_free(out, maker, force)
            for leftover in (folder, old):
                remove_folder(leftover)
            folder.mkdir()
            try:
                yield folder
                replace_folder(folder, out)
            finally:
                remove_folder(folder)
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error


def _finish_replacement(folder: Path) -> None:
    """Put the old folder back if a replacement was killed between two renames."""
    if not folder.exists() and replaced(folder).is_dir():
        os.replace(replaced(folder), folder)


class Preparation:
    """The passes over one corpus, and the samples that they read and wrote, by split."""

    def __init__(self, folder: Path, bars: ProgressBars) -> None:
        self.folder, self.bars = folder, bars
        self.read: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def spill(self, split: str) -> Path:
        """The file of the text of a split, from the first pass to the last."""
        return self.folder / f"{split}.text"

    def refuse_empty(
        self, split: str, size: int, dropped: Mapping[str, int], hint: str = ""
    ) -> None:
        """Refuse a split of no size, and say why samples were dropped, or what helps."""
        if not size:
            why = ", ".join(f"{n} {reason}" for reason, n in dropped.items() if n)
            told = [f"the {split} split is empty", f"dropped {why}" if why else "", hint]
            raise DataError(": ".join(filter(None, told)))

    def save_frequencies(self, counts: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Write how often each type of each vocabulary occurs in the training split."""
        frequencies = {name: column.tolist() for name, column in counts.items()}
        write_text(self.folder / "frequencies.json", json.dumps(frequencies) + "\n")

    def save_tokenizer(self, tokenizer: Any, name: str, *, learned: bool) -> None:
        """Write a tokenizer that was learned, or one of a pre-trained model as it is."""
        tokenizer.save_pretrained(self.folder / name)
        if learned:
            # transformers 5 writes the name of a class that earlier ones do not have.
            path = self.folder / name / "tokenizer_config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
            config.pop("backend", None)
            write_json(path, config)


def print_ready(console: Console, folder: Path, recipe: str, *settings: str) -> None:
    """Say that a folder is there, and print the command that trains on it."""
    console.print(f"{printable(str(folder))} is ready; to train on it:", markup=False)
    path = f"data.path={shlex.quote(str(folder))}"
    console.print(" ".join(["labo train", recipe, path, *settings]), markup=False)


def cached_folder(name: str, key: object, prepare: Callable[[Path], object]) -> Path:
    """A folder of prepared text in the user's cache, made by ``prepare`` if it is not there.

    ``key`` is all that its content depends on.
    """
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder = checksums.cache_folder() / f"{name}-{digest}"
    if not (folder / MANIFEST).is_file():
        try:
            prepare(folder)
        except RequestError:
            # Another process may have done it while this one waited.
            if not (folder / MANIFEST).is_file():
                raise
    return folder


def seal(folder: Path, manifest: Mapping[str, Any], *, without: Sequence[str] = ()) -> None:
    """Write the manifest, with the format, the digests of all files and the fingerprint.

    Files whose names are in ``without`` are not part of the content.
    """
    every = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(path for path in every if path.name not in without)
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    for path in (*files, *{path.parent for path in files}):
        flush(path)
    further = {"sha256": digests, "fingerprint": _fingerprint(digests)}
    write_json(folder / MANIFEST, sealed({"format": FORMAT, **manifest, **further}))


# ------------------------------------------------------------------ reading


def read_manifest(folder: Path, model: type[_M], maker: Maker) -> _M:
    """The manifest of a folder, all of whose files are verified."""
    path = folder / MANIFEST
    command, task = maker
    again = f"run `{command}` again"
    _finish_replacement(folder)
    if not path.is_file():
        raise DataError(f"{folder}: no prepared data here; `{command}` makes it")
    try:
        document = read_json(path, Document).model_dump()
        if document.get("format") != FORMAT:
            raise DataError(f"{path}: not of format {FORMAT}, which this version reads")
        if document.get("task") != task:
            raise DataError(f"{folder}: not made by `{command}`")
        manifest = read_json(path, model)
    except DataError:
        raise
    except RequestError as error:
        raise DataError(f"{error}; {again}") from error
    if not seal_fits(document):
        raise DataError(f"{path} is damaged (its checksum does not fit); {again}")
    try:
        checksums.verify(folder, manifest.sha256, remember=True)
    except RequestError as error:
        raise DataError(f"{error}; {again}") from error
    return manifest


class PreparedFolder(ABC, Generic[_M, _S]):
    """What the folders of all kinds of text share.

    What is read is kept, and all that a training uses is read by :meth:`hold`. A folder that is
    replaced meanwhile (``--force``) does not mix with it.

    Attributes:
        checked: the content of prepared.json.
        manifest: likewise, as plain values.
        fingerprint: 64 hex digits, the same for the same content.
    """

    maker: ClassVar[Maker]
    Manifest: ClassVar[type[Any]]  # of prepared.json

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checked: _M = read_manifest(self.path, self.Manifest, self.maker)
        self.manifest: dict[str, Any] = self.checked.model_dump()
        self.fingerprint = self.checked.content_fingerprint
        self._splits: dict[str, _S] = {}

    def hold(self) -> None:
        """Read or map every file; refuse a folder that was replaced meanwhile."""
        for split in SPLITS:
            self.split(split)
        _ = self.tokenizer_files, self._counts
        if read_json(self.path / MANIFEST, FolderManifest).content_fingerprint != self.fingerprint:
            raise DataError(f"{self.path} was replaced while it was read: run the command again")

    def split(self, name: str) -> _S:
        """The training, validation or test split: "train", "valid" or "test"."""
        if name not in self._splits:
            path = self.path / f"{name}.arrow"
            table = read_table(path, self.schema(name))
            try:
                self._splits[name] = self.read_split(table)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
        return self._splits[name]

    @abstractmethod
    def schema(self, split: str) -> pa.Schema:
        """The columns of a split."""

    @abstractmethod
    def read_split(self, table: pa.Table) -> _S:
        """A split, whose ids are checked. The message of a DataError is for after the path."""

    @property
    @abstractmethod
    def types(self) -> dict[str, int]:
        """The size of each vocabulary, by its name in frequencies.json."""

    @cached_property
    def _counts(self) -> dict[str, list[int]]:
        try:
            return read_json(self.path / "frequencies.json", _Frequencies).root
        except RequestError as error:
            raise DataError(str(error)) from error

    def frequencies(self, vocabulary: str) -> npt.NDArray[np.int64]:
        """(V,), how often each type occurs in the training split; special tokens count too."""
        path, size = self.path / "frequencies.json", self.types[vocabulary]
        counts = self._counts.get(vocabulary, [])
        if len(counts) != size:
            raise DataError(f"{path}: {len(counts)} counts of {vocabulary} types, not {size}")
        return np.asarray(counts, dtype=np.int64)

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of the tokenizers; those of a second one have the name of its folder first."""
        return {
            prefix + path.name: path.read_bytes()
            for folder, prefix in (("tokenizer", ""), ("target_tokenizer", "target_tokenizer/"))
            for path in sorted((self.path / folder).glob("*"))
        }


def load_tokenizer(folder: Path, size: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, which must have ``size`` types if that is given."""
    from transformers import PreTrainedTokenizerFast

    try:
        with panics_refused(folder):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            types = len(tokenizer)
            tokenizer.decode(tokenizer.encode("a"))  # settings of a wrong type show here
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"{folder}: cannot be read ({error})") from error
    if size is not None and types != size:
        raise DataError(f"{folder}: {types} types, but {MANIFEST} says {size}")
    return tokenizer
