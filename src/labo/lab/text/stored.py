"""Stored predictions of a teacher: its k most probable classes for every target of the training.

A folder has Arrow files with a row per sample (a document), in the order of the training split:
``indices`` and ``log_probabilities``, each a list of k numbers per target. They are compressed, in
record batches that are small enough to be read one at a time. The manifest ties them to the data
and to the vocabulary. A folder that is being written is kept beside its final place with a list of
the parts that are complete, so that the work can go on after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataError, RequestError
from ..run.checksums import DamagedError, verify
from ..run.files import (
    Document,
    put_in_place,
    read_json,
    remove_folder,
    replace_folder,
    sha256,
    temporary,
    write_json,
)
from ..run.lock import locked
from ..run.progress import notice
from .folder import MANIFEST, FolderManifest, Maker, check_free, read_manifest, seal
from .options import Precision

TASK = "stored_teacher"
MAKER = Maker("labo teacher", TASK)
_PROGRESS = "progress.json"
_BATCH_TARGETS = 256  # of a record batch, at most; a sample is never divided
_BYTES_IN_MEMORY = 128 << 20  # of record batches that were read
_FILES_OPEN = 32

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class StoredSettings(Document):
    """What a folder was made from.

    Attributes:
        data: fingerprint of the prepared data.
        vocabulary, model: digests of the vocabulary and of the teacher's folder.
        top_k: classes that are stored for a target.
        block: the most tokens that the teacher saw at once.
        selection: which classes are stored, see :class:`labo.lab.text.teacher.ClassSelection`.
    """

    data: str
    vocabulary: str
    model: str
    top_k: int
    block: int
    precision: Precision
    selection: str = "top"


class _Manifest(FolderManifest, StoredSettings):
    """``parts`` has the samples of each record batch of each part."""

    targets: int
    parts: list[list[int]]


class _Part(Document):
    """A part that is complete: its targets, the samples of its record batches, its checksum."""

    targets: int
    batches: list[int]
    sha256: str


class _Progress(Document):
    settings: StoredSettings
    parts: list[_Part]


# ------------------------------------------------------------------ writing


class StoredWriter:
    """A folder of stored predictions, written part by part.

    A folder that was begun with other settings is begun again; ``force`` replaces a finished one.
    """

    def __init__(self, out: Path, settings: StoredSettings, *, force: bool = False) -> None:
        self.out = check_free(out, MAKER, force)
        self.settings = settings
        self.folder = self.out.with_name(f".{self.out.name}.unfinished")
        self._force = force
        self._stack = ExitStack()
        self._parts: list[_Part] = []

    @property
    def samples(self) -> int:
        return sum(sum(part.batches) for part in self._parts)

    def __enter__(self) -> StoredWriter:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        lock = self.out.with_name(f".{self.out.name}.lock")
        self._stack.enter_context(locked(lock, self.out, wait=True))
        check_free(self.out, MAKER, self._force)
        self._parts = [] if self.folder.is_symlink() else self._complete()
        if not self._parts:
            remove_folder(self.folder)
        self.folder.mkdir(exist_ok=True)
        kept = {_PROGRESS, *map(_part, range(len(self._parts)))}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        self._save()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _complete(self) -> list[_Part]:
        """The parts of the same work that are complete, up to the first that is damaged."""
        try:
            progress = read_json(self.folder / _PROGRESS, _Progress)
        except RequestError:
            return []
        intact: list[_Part] = []
        try:
            for part in progress.parts if progress.settings == self.settings else []:
                verify(self.folder, {_part(len(intact)): part.sha256})
                intact.append(part)
        except DamagedError as error:
            notice(f"{error}; it and all after it are made again")
        return intact

    def _save(self) -> None:
        progress = _Progress(settings=self.settings, parts=self._parts)
        write_json(self.folder / _PROGRESS, progress.model_dump())

    def add(self, samples: Iterable[Rows]) -> None:
        """Write the next part: for each sample (n, k) indices and log-probabilities."""
        path = self.folder / _part(len(self._parts))
        kind = pa.float16() if self.settings.precision == "float16" else pa.float32()
        columns = [("indices", pa.list_(pa.int32())), ("log_probabilities", pa.list_(kind))]
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        batches: list[int] = []
        targets = 0
        with (
            pa.OSFile(str(temporary(path)), "wb") as file,
            pa.ipc.new_file(file, pa.schema(columns), options=options) as writer,
        ):
            for rows in _grouped(samples):
                lists = [
                    _lists([row[column] for row in rows], kind)
                    for column, (_, kind) in enumerate(columns)
                ]
                writer.write_batch(pa.record_batch(lists, schema=pa.schema(columns)))
                batches.append(len(rows))
                targets += sum(len(indices) for indices, _ in rows)
        put_in_place(path)
        self._parts.append(_Part(targets=targets, batches=batches, sha256=sha256(path)))
        self._save()

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the manifest and put the folder in its place."""
        counts = {
            "targets": sum(part.targets for part in self._parts),
            "parts": [part.batches for part in self._parts],
        }
        manifest = {"task": TASK, **self.settings.model_dump(), **counts, **about}
        seal(self.folder, manifest, without=[_PROGRESS])
        (self.folder / _PROGRESS).unlink()  # last: hashing large files may be interrupted too
        replace_folder(self.folder, self.out)
        remove_folder(self.folder)


def _part(number: int) -> str:
    return f"part-{number:05d}.arrow"


def _grouped(samples: Iterable[Rows]) -> Iterable[list[Rows]]:
    """Samples of a record batch."""
    waiting: list[Rows] = []
    targets = 0
    for sample in samples:
        if waiting and targets + len(sample[0]) > _BATCH_TARGETS:
            yield waiting
            waiting, targets = [], 0
        waiting.append(sample)
        targets += len(sample[0])
    if waiting:
        yield waiting


def _lists(rows: list[npt.NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    offsets = np.cumsum([0, *(row.size for row in rows)], dtype=np.int32)
    values = np.concatenate([row.reshape(-1) for row in rows])
    dtype = kind.value_type.to_pandas_dtype()
    return pa.ListArray.from_arrays(offsets, pa.array(values.astype(dtype), kind.value_type))


# ------------------------------------------------------------------ reading


class StoredTeacher:
    """A folder that ``labo teacher`` made."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.about = read_manifest(self.path, _Manifest, MAKER)
        counts = [(p, b, n) for p, part in enumerate(self.about.parts) for b, n in enumerate(part)]
        self._batches = [(part, batch) for part, batch, _ in counts]
        self._starts = np.cumsum([0, *(number for _, _, number in counts)])
        size = 8 * self.top_k * self.about.targets // max(1, len(counts))  # of a record batch
        self._read = lru_cache(maxsize=max(1, _BYTES_IN_MEMORY // max(1, size)))(self._record_batch)
        self._open = lru_cache(maxsize=_FILES_OPEN)(self._reader)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def top_k(self) -> int:
        return self.about.top_k

    def check(self, *, data: str, vocabulary: str, samples: int) -> None:
        """Refuse a folder that was made for other data."""
        if (self.about.data, len(self)) != (data, samples):
            raise RequestError(
                f"method.stored: {self.path} was made for other data: run "
                f"`{MAKER.command}` with the prepared data of this training"
            )
        if self.about.vocabulary != vocabulary:
            raise RequestError(f"method.stored: {self.path} was made with a different vocabulary")

    def sample(self, index: int) -> Rows:
        """The classes and log-probabilities of all targets of a sample, each (n, k)."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        indices, log_p, offsets = self._read(number)
        row = index - int(self._starts[number])
        here = slice(int(offsets[row]), int(offsets[row + 1]))
        return indices[here].reshape(-1, self.top_k), log_p[here].reshape(-1, self.top_k)

    def _reader(self, part: int) -> pa.ipc.RecordBatchFileReader:
        now = read_json(self.path / MANIFEST, FolderManifest)
        if now.content_fingerprint != self.about.content_fingerprint:
            raise DataError(f"{self.path} was replaced while it was read: run the command again")
        return pa.ipc.open_file(pa.memory_map(os.fspath(self.path / _part(part))))

    def _record_batch(self, number: int) -> tuple[npt.NDArray[Any], ...]:
        part, batch = self._batches[number]
        try:
            columns = self._open(part).get_batch(batch)
        except (OSError, pa.ArrowInvalid) as error:
            path = self.path / _part(part)
            raise DataError(f"{path}: cannot be read ({error})") from error
        indices, log_p = columns.columns
        values = (indices.flatten().to_numpy(), log_p.flatten().to_numpy(zero_copy_only=False))
        return values[0], values[1].astype(np.float32), indices.offsets.to_numpy()
