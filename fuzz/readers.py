"""Every reader of files under mutated files.

A reader may give a result or raise a ``LabError`` with one line. Any other exception, a message of
several lines, a case that takes longer than ``SECONDS``, and the death of the process are failures.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import struct
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from labo.lab.analysis.reading import read_conditions
from labo.lab.command_options import validated
from labo.lab.config import find_recipe, read_document
from labo.lab.errors import DataError, LabError
from labo.lab.images.sources import load_images
from labo.lab.language_modeling.documents import read_documents
from labo.lab.language_modeling.options import DocumentOptions
from labo.lab.language_modeling.prepare import prepare as prepare_documents
from labo.lab.language_modeling.prepared import PreparedDocuments
from labo.lab.language_modeling.tokenizers import chat_renderer
from labo.lab.recipes import build_recipe, load_recipe
from labo.lab.run import checkpoint, checksums
from labo.lab.run import files as atomic
from labo.lab.run.directory import RunDirectory, write_model
from labo.lab.run.distributed import make_accelerator
from labo.lab.run.lock import held
from labo.lab.text.sentencepiece import make_piece_tokenizer, read_sentencepiece
from labo.lab.text.subwords import Merges, encode, make_tokenizer, read_codes
from labo.lab.translation.options import choose
from labo.lab.translation.parallel import find_parallel_text
from labo.lab.translation.prepare import prepare
from labo.lab.translation.prepared import Prepared
from labo.lab.translation.translate import ModelFolder

from .mutations import mutate

SECONDS = 20


@dataclass(frozen=True)
class Reader:
    """A reader and the files it reads.

    Attributes:
        make: write valid files into a folder; returns those to damage.
        read: read them.
        seal: make checksums fit damaged files, so that what is behind them is reached.
    """

    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    seal: Callable[[Path], None] | None = None


# ------------------------------------------------------------------ images

_PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)


def _idx(folder: Path) -> list[Path]:
    for prefix in ("train", "t10k"):
        for name, array in (
            ("images-idx3", _PIXELS[:, :784].reshape(12, 28, 28)),
            ("labels-idx1", np.arange(12, dtype=np.uint8) % 10),
        ):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())
    return sorted(folder.iterdir())


def _idx_gz(folder: Path) -> list[Path]:
    for path in _idx(folder):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return sorted(folder.iterdir())


def _cifar_files() -> dict[str, bytes]:
    records = b"".join(bytes([i % 10]) + row.tobytes() for i, row in enumerate(_PIXELS))
    return {"data_batch_1.bin": records, "test_batch.bin": records}


def _cifar(folder: Path) -> list[Path]:
    for name, data in _cifar_files().items():
        (folder / name).write_bytes(data)
    return sorted(folder.iterdir())


def _cifar_archive(folder: Path) -> list[Path]:
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in _cifar_files().items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return [path]


def _cifar_tar(folder: Path) -> list[Path]:
    (path,) = _cifar_archive(folder)
    plain = folder / "cifar.tar"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    return [plain]


def _cifar_pickle(folder: Path) -> list[Path]:
    content = {"data": _PIXELS, "labels": [i % 10 for i in range(12)]}
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps(content, 2))
    names = pickle.dumps({"label_names": list("abcdefghij")}, 4)
    (folder / "batches.meta").write_bytes(names)
    return sorted(folder.iterdir())


def _pictures(folder: Path) -> list[Path]:
    for number, suffix in enumerate(("png", "jpg", "jpeg")):
        for part in ("train", "val"):
            (folder / part / "cat").mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(_PIXELS[number].reshape(32, 32, 3))
            image.save(folder / part / "cat" / f"{number}.{suffix}")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _look(folder: Path) -> None:
    data = load_images("folder", folder, holdout=0.4)
    for split in (data.train, data.valid, data.test):
        for index in range(len(split)):
            _ = split.images[index]


# ------------------------------------------------------------------ text

_LINES = ["Das Haus.", "Ein „Hund“ &amp; Katze", "", "drei\u2028vier", "<b>x</b>"] * 3


def _write_sides(folder: Path, suffix: str, text: Callable[[str, int], str]) -> list[Path]:
    for side in ("de", "en"):
        lines = "".join(text(line, number) for number, line in enumerate(_LINES))
        (folder / f"t.{side}{suffix}").write_text(lines, encoding="utf-8")
    return sorted(folder.iterdir())


def _xml(folder: Path) -> list[Path]:
    def text(line: str, number: int) -> str:
        return f'<doc docid="d{number // 4}">\n<seg id="{number}"> {line} </seg>\n</doc>\n'

    return _write_sides(folder, ".xml", text)


def _plain(folder: Path) -> list[Path]:
    return _write_sides(folder, "", lambda line, number: line + "\n")


def _plain_gz(folder: Path) -> list[Path]:
    for path in _plain(folder):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return sorted(folder.iterdir())


def _tsv(folder: Path) -> list[Path]:
    path = folder / "t.tsv"
    path.write_text("".join(f"{line}\t{line}\n" for line in _LINES), encoding="utf-8")
    return [path]


def _codes(folder: Path) -> list[Path]:
    path = folder / "codes"
    path.write_text("#version: 0.2\ne s\nes t</w>\nl o\nlo w</w>\nn e\n", encoding="utf-8")
    return [path]


def _read_codes(folder: Path) -> None:
    merges = read_codes(folder / "codes", lambda: ["the lowest new", "es <s> </s>"])
    list(encode(make_tokenizer(merges, ["<de>"]), ["the lowest", "<de> new"]))


def _pieces(folder: Path) -> list[Path]:
    def part(field: int, content: bytes) -> bytes:
        return bytes([field << 3 | 2, len(content)]) + content

    def piece(text: str, score: float) -> bytes:
        scored = part(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score)
        return part(1, scored + bytes([3 << 3, 1]))

    scores = {"\u2581": -2.0, "\u2581a": -1.0, "b": -3.0, "ab": -2.5, "a": -3.5, "\u2581ab": -1.5}
    content = b"".join(piece(text, score) for text, score in scores.items())
    for name, kind in (("unigram", 1), ("bpe", 2)):
        options = part(2, bytes([3 << 3, kind])) + part(3, bytes([3 << 3, 1, 4 << 3, 1]))
        (folder / f"{name}.model").write_bytes(content + options)
    return sorted(folder.iterdir())


def _read_pieces(folder: Path) -> None:
    for path in sorted(folder.glob("*.model")):
        with suppress(DataError):
            tokenizer = make_piece_tokenizer(read_sentencepiece(path), ["<de>"])
            list(encode(tokenizer, ["ab a b", "", "<de> x", "</s>"]))


# ------------------------------------------------------------------ documents

_ROWS: list[dict[str, object]] = [
    {"text": "Das Haus. " * 3},
    {"prompt": "2 + 2 =", "completion": " 4"},
    {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Ja \u2028."},
        ]
    },
] * 3


def _jsonl(folder: Path) -> list[Path]:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding="utf-8")
    return [path]


def _csv(folder: Path) -> list[Path]:
    path = folder / "t.csv"
    lines = ["id,text\n", *(f'{number},"{line}, ""x"""\n' for number, line in enumerate(_LINES))]
    path.write_text("".join(lines), encoding="utf-8")
    return [path]


def _columns() -> pa.Table:
    return pa.table({"text": _LINES, "id": list(range(len(_LINES)))})


def _parquet(folder: Path) -> list[Path]:
    pq.write_table(_columns(), folder / "t.parquet")
    return [folder / "t.parquet"]


def _saved_by_datasets(folder: Path) -> list[Path]:
    table = _columns()
    saved = folder / "t"
    saved.mkdir()
    with (
        pa.OSFile(str(saved / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return sorted(saved.iterdir())


def _read_documents(folder: Path, name: str) -> None:
    for document in read_documents(folder / name, "line", "text", chat_renderer(None)):
        assert isinstance(document.text, str)


def _documents(kind: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        corpus = folder / "corpus.jsonl"
        rows = [row for row in _ROWS if kind in row]
        numbered = [row | {kind: f"{row[kind]} {number}"} for number, row in enumerate(rows * 4)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in numbered))
        settings = {"train": [str(corpus)], "holdout": 2, "holdout_test": 2, "vocabulary": 270}
        prepare_documents(validated(DocumentOptions, settings), folder / "data")
        return sorted(path for path in (folder / "data").rglob("*") if path.is_file())

    return make


def _read_prepared_documents(folder: Path) -> None:
    data = PreparedDocuments(folder / "data")
    for name in ("train", "valid", "test"):
        split = data.split(name)
        for index in range(len(split)):
            split.tokens(index), split.labels(index)
            if name != "train":
                split.name(index)
    data.frequencies("tokens")
    data.tokenizer.decode(data.tokenizer.encode("a"))


# ------------------------------------------------------------------ recipes and runs


def _recipe(folder: Path) -> list[Path]:
    path = folder / "recipe.yaml"
    merged = "more: &more {padding: 1}\nand: {<<: *more, flip: true}\n"
    path.write_text(find_recipe("digits").read_text() + merged, encoding="utf-8")
    return [path]


def _read_recipe(folder: Path) -> None:
    document = read_document(folder / "recipe.yaml")
    for name in ("more", "and"):
        document.pop(name, None)
    build_recipe(document)


def _run(folder: Path) -> list[Path]:
    run = RunDirectory(folder)
    run.start(load_recipe("digits"), "digits@0")
    write_model(
        run.best, {"a": torch.ones(4, 4)}, {"config.json": '{"task": "x", "num_classes": 3}'}
    )
    run.finish({"valid": {"accuracy": 0.5}, "steps": 3, "seconds": 1.5, "signature": "a|data:b|c"})
    for step in range(4):
        run.log({"step": step, "loss": 0.5})
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    state = checkpoint.RunState(module, optimizer, module, module, make_accelerator("no"))
    state.counters.step = 2
    checkpoints = checkpoint.Checkpoints(run.checkpoints, "digest")
    checkpoints.save(state)
    assert checkpoints.newest is not None
    _add_shards(checkpoints.newest)
    run.write_records("test.jsonl", ['{"index": 0}\n'])
    (folder / "conditions.json").write_text('{"base-s0": [{"jobs": 1, "threads": 2}]}')
    with held(folder):
        pass
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _add_shards(saved: Path) -> None:
    """Give a checkpoint a tensor that two processes wrote."""
    manifest = json.loads((saved / "manifest.json").read_text())
    for number in range(2):
        name = f"{checkpoint.SHARDS}/shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        (saved / name).parent.mkdir(exist_ok=True)
        about = {"ema/a": {"saved_offsets": [2 * number, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(about), "DCP_VERSION": "1.0", "format": "pt"}
        save_file({"ema/a": torch.full((2, 3), float(number))}, saved / name, metadata)
        manifest["sha256"][name] = atomic.sha256(saved / name)
    (saved / "manifest.json").write_text(json.dumps(manifest))


def _read_checkpoint(run: RunDirectory) -> None:
    for saved in checkpoint.Checkpoints(run.checkpoints, "digest").usable(print):
        saved.group("ema")


def _read_run(folder: Path) -> None:
    run = RunDirectory(folder)
    for read in (
        lambda: run.check(load_recipe("digits")),
        run.results,
        run.changes_since_start,
        run.facts,
        run.verify_best,
        lambda: run.complete({"test": {"accuracy": 0.5}}),
        lambda: checksums.verify_folder(run.records),
        lambda: run.forget_after(2, print),
        lambda: _read_checkpoint(run),
        lambda: read_conditions(folder / "base-s0"),
        lambda: atomic.read_tensors(folder / "best" / "model.safetensors"),
        RunDirectory(folder).facts,
        lambda: held(folder).__enter__(),
    ):
        with suppress(LabError):
            read()


def _seal_run(folder: Path) -> None:
    """Checksums of checkpoints and of ``best`` that fit what is there now."""
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        reseal(path)
    reseal(folder / "best" / "manifest.json", several=True)


def reseal(path: Path, *, several: bool = False) -> None:
    """Make the checksums in a manifest fit the files beside it, if it still is one."""
    with suppress(ValueError, OSError, KeyError, TypeError, AttributeError):
        document = json.loads(path.read_text())
        found = {name: atomic.sha256(path.parent / name) for name in document["sha256"]}
        document["sha256"] = {name: [value] for name, value in found.items()} if several else found
        path.write_text(json.dumps(document))


# ------------------------------------------------------------------ prepared data and models


def make_prepared(folder: Path) -> list[Path]:
    corpus = folder / "corpus"
    corpus.mkdir()
    for side in ("de", "en"):
        (corpus / f"t.{side}").write_text("".join(f"{line} x\n" for line in _LINES))
    files = {split: [str(corpus / "t")] for split in ("train", "valid", "test")}
    options = choose(None, {"pair": ["de-en"], "vocabulary": 280, **files})
    prepare(options, folder / "data")
    return sorted(path for path in (folder / "data").rglob("*") if path.is_file())


def _read_prepared(folder: Path) -> None:
    data = Prepared(folder / "data")
    for name in ("train", "valid", "test"):
        split = data.split(name)
        for index in range(len(split)):
            split.source(index), split.target(index)
            if name != "train":
                split.source_text(index), split.target_text(index)
    data.frequencies("source"), data.frequencies("target")
    _ = len(data.tokenizer), len(data.target_tokenizer)


def seal_prepared(folder: Path) -> None:
    data = folder / "data"
    reseal(data / "prepared.json")
    with suppress(ValueError, OSError, TypeError, AttributeError):
        document = json.loads((data / "prepared.json").read_text())
        (data / "prepared.json").write_text(json.dumps(atomic.sealed(document)))


def make_model(folder: Path) -> list[Path]:
    from labo.lab.translation.model import fresh_translator, marian_config
    from labo.lab.translation.options import Decode

    tokenizer = make_tokenizer(Merges(True, ("a", "b", "a</w>", "b</w>"), (("a", "b"),)), [])
    size = len(tokenizer)
    shape = marian_config(
        (size, size),
        width=8,
        ffn=8,
        heads=2,
        encoder_layers=1,
        decoder_layers=1,
        positions=16,
    )
    model = fresh_translator(shape).marian
    facts = {
        "task": "translation",
        "num_classes": size,
        "pairs": [{"source": "de", "target": "en", "tag": None}],
        "text": {},
        "decode": Decode().model_dump(mode="json"),
    }
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"labo": facts}
    (folder / "config.json").write_text(json.dumps(config))
    plain = fresh_translator(model.config)
    atomic.write_tensors(folder / "model.safetensors", plain.plain_weights())
    tokenizer.save_pretrained(folder)
    return sorted(folder.iterdir())


def _read_model(folder: Path) -> None:
    found = ModelFolder(folder)
    found.tokenizers()
    found.load()


def _lines(folder: Path, name: str) -> None:
    for one, other in find_parallel_text(str(folder / name), "de", "en"):
        assert isinstance(one, str)
        assert isinstance(other, str)


READERS: dict[str, Reader] = {
    "idx": Reader(_idx, lambda folder: load_images("mnist", folder)),
    "idx.gz": Reader(_idx_gz, lambda folder: load_images("mnist", folder)),
    "CIFAR": Reader(_cifar, lambda folder: load_images("cifar10", folder)),
    "CIFAR archive": Reader(_cifar_archive, lambda folder: load_images("cifar10", folder)),
    "CIFAR tar": Reader(_cifar_tar, lambda folder: load_images("cifar10", folder / "cifar.tar")),
    "CIFAR pickle": Reader(_cifar_pickle, lambda folder: load_images("cifar10", folder)),
    "image folders": Reader(_pictures, _look),
    "XML": Reader(_xml, lambda folder: _lines(folder, "t")),
    "lines": Reader(_plain, lambda folder: _lines(folder, "t")),
    "lines.gz": Reader(_plain_gz, lambda folder: _lines(folder, "t")),
    "TSV": Reader(_tsv, lambda folder: _lines(folder, "t.tsv")),
    "JSONL": Reader(_jsonl, lambda folder: _read_documents(folder, "t.jsonl")),
    "CSV": Reader(_csv, lambda folder: _read_documents(folder, "t.csv")),
    "Parquet": Reader(_parquet, lambda folder: _read_documents(folder, "t.parquet")),
    "datasets folder": Reader(_saved_by_datasets, lambda folder: _read_documents(folder, "t")),
    "BPE codes": Reader(_codes, _read_codes),
    "SentencePiece model": Reader(_pieces, _read_pieces),
    "YAML recipe": Reader(_recipe, _read_recipe),
    "run directory": Reader(_run, _read_run),
    "run directory, resealed": Reader(_run, _read_run, _seal_run),
    "prepared data": Reader(make_prepared, _read_prepared),
    "prepared data, resealed": Reader(make_prepared, _read_prepared, seal_prepared),
    "prepared documents": Reader(_documents("text"), _read_prepared_documents),
    "prepared documents, resealed": Reader(
        _documents("text"), _read_prepared_documents, seal_prepared
    ),
    "prepared examples, resealed": Reader(
        _documents("prompt"), _read_prepared_documents, seal_prepared
    ),
    "translation model": Reader(make_model, _read_model),
}


# ------------------------------------------------------------------ the loop


class TooSlowError(Exception):
    """A case took longer than ``SECONDS``."""


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlowError(f"longer than {SECONDS} s")


def fuzz_reader(name: str, cases: int, folder: Path, seed: int = 0) -> list[str]:
    """Run a reader on so many damaged folders.

    Args:
        name: one of ``READERS``.
        cases: how many.
        folder: an empty folder to work in; keeps the last damaged files.
        seed: with the number of a case, determines its damage.

    Returns:
        One line for each failure.
    """
    reader = READERS[name]
    targets = {path: path.read_bytes() for path in reader.make(folder)}
    _read(reader, folder)  # undamaged, it is read
    everything = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    failures = []
    before = signal.signal(signal.SIGALRM, _too_slow)
    try:
        for number in range(cases):
            chance = Random(f"{name} {seed} {number}")
            path = chance.choice(sorted(targets))
            path.write_bytes(mutate(targets[path], chance))
            if reader.seal is not None:
                reader.seal(folder)
            (folder / ".case").write_text(f"{name}: seed {seed}, case {number}, {path.name}")
            if problem := _outcome(reader, folder):
                failures.append(f"{name}: seed {seed}, case {number}, {path.name}: {problem}")
            for file, content in everything.items():
                if not file.is_file() or file.read_bytes() != content:
                    file.write_bytes(content)
    finally:
        signal.signal(signal.SIGALRM, before)
    return failures


def _outcome(reader: Reader, folder: Path) -> str | None:
    signal.alarm(SECONDS)
    try:
        _read(reader, folder)
    except LabError as error:
        if isinstance(error, DataError) and "\n" in str(error):
            return f"a message of several lines: {error}"
        return None
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return None


def _read(reader: Reader, folder: Path) -> None:
    with open(os.devnull, "w") as nowhere, _quiet(nowhere):
        reader.read(folder)


class _quiet:
    """Within, standard output and error are thrown away."""

    def __init__(self, nowhere: io.TextIOWrapper) -> None:
        self.nowhere = nowhere.fileno()

    def __enter__(self) -> None:
        self.kept = [os.dup(1), os.dup(2)]
        os.dup2(self.nowhere, 1)
        os.dup2(self.nowhere, 2)

    def __exit__(self, *_: object) -> None:
        for number, kept in zip((1, 2), self.kept, strict=True):
            os.dup2(kept, number)
            os.close(kept)
