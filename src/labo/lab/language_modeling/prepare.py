"""Documents to prepared data: ``labo prepare-text``.

Three passes, none of which holds the corpus in memory. The first reads the documents and separates
the held-out splits from the training split. The second learns a tokenizer from the training split,
unless one is given. The third writes token ids and counts them. All of it happens in a hidden
folder beside the result, which is renamed at the very end: a folder that is there is complete.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from ..config import RECIPES, read_document
from ..errors import DataError, RequestError
from ..pretrained import load_config
from ..run.files import sha256
from ..run.progress import ProgressBars, notice
from ..text.arrow import IGNORED, ArrowFile, read_batches
from ..text.folder import SPLITS, Preparation, building, check_apart, check_free, print_ready, seal
from ..text.pretrained_tokenizer import pretrained_tokenizer
from ..text.records import is_table
from .documents import Kind, Part, RawDocument, find_inputs, input_files, read_documents
from .options import DEFAULT_VOCABULARY, DocumentOptions, Tokenization
from .prepared import MAKER, TASK, PreparedDocuments, schema
from .tokenizers import begin_token, chat_renderer, encode, learn_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROWS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 22
_LARGE = 300_000_000  # bytes of text for which the large recipe is the right one
_SPILL = pa.schema(
    [
        ("name", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("learned", pa.list_(pa.bool_())),
    ]
)


def prepare(options: DocumentOptions, out: str | Path, *, force: bool = False) -> PreparedDocuments:
    """Prepare files of documents; ``force`` replaces the prepared data that is in ``out``."""
    given = [*options.train, *options.valid, *options.test]
    check_apart(out, [*given, *filter(None, [options.tokenizer])])
    check_free(Path(out), MAKER, force)
    inputs = {
        split: find_inputs(getattr(options, split)) for split in SPLITS if getattr(options, split)
    }
    tokenizer = None if options.tokenizer is None else pretrained_tokenizer(options.tokenizer)
    render = chat_renderer(tokenizer)

    def documents(split: str) -> Iterator[RawDocument]:
        for path in inputs[split]:
            yield from read_documents(path, options.documents, options.column, render)

    whole_files = options.documents == "file" and not any(map(is_table, inputs["train"]))
    files = dict.fromkeys(
        file for paths in inputs.values() for path in paths for file in input_files(path)
    )
    return prepare_documents(
        out,
        {split: documents(split) for split in inputs},
        options,
        tokenizer=tokenizer,
        inputs=[{"file": file.name, "sha256": sha256(file)} for file in files],
        few="a file is one document: --documents line or paragraph divides it" * whole_files,
        force=force,
    )


def prepare_documents(
    out: str | Path,
    splits: Mapping[str, Iterable[RawDocument]],
    options: Tokenization,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    inputs: Sequence[Mapping[str, str]] = (),
    few: str = "",
    force: bool = False,
) -> PreparedDocuments:
    """Prepare documents that come from anywhere.

    ``splits`` has those of "train" and, unless they are held out, of "valid" and "test". Without a
    tokenizer one is learned. ``inputs`` is what the manifest says of where they come from, ``few``
    what to do if there are too few to hold out.
    """
    out = check_free(Path(out), MAKER, force)
    with building(out, MAKER, force) as folder, ProgressBars() as bars:
        work = _Preparation(folder, bars, options)
        work.split(splits, few)
        work.write_splits(tokenizer or work.learn_tokenizer(), learned=tokenizer is None)
        work.write_manifest(inputs)
    return PreparedDocuments(out)


class _Preparation(Preparation):
    """The three passes over one corpus, and what they counted."""

    def __init__(self, folder: Path, bars: ProgressBars, options: Tokenization) -> None:
        super().__init__(folder, bars)
        self.options = options
        self.kind: Kind | None = None
        # Of each split: documents without text, which are dropped; tokens, those that are learned,
        # and UTF-8 bytes of these.
        self.empty, self.tokens, self.learned_tokens, self.bytes = (
            Counter(dict.fromkeys(SPLITS, 0)) for _ in range(4)
        )
        self.held_out: set[bytes] = set()  # digests of the documents held out
        self.repeated = 0  # training documents that are held out too
        self.tokenizer: dict[str, object] = {}

    # -------------------------------------------------------------- pass 1: documents

    def split(self, splits: Mapping[str, Iterable[RawDocument]], few: str) -> None:
        """Write the documents of each split to a file of their own."""
        with ExitStack() as stack:
            files = {
                split: stack.enter_context(ArrowFile(self.spill(split), _SPILL)) for split in SPLITS
            }
            for split, documents in splits.items():
                advance = stack.enter_context(self.bars.bar(f"reading {split}", None))
                for chunk in _chunks(documents):
                    parts: dict[str, list[RawDocument]] = {name: [] for name in SPLITS}
                    for document in chunk:
                        self._check_kind(document)
                        if (chosen := self._split_of(split, document)) is not None:
                            parts[chosen].append(document)
                    for name, part in parts.items():
                        names = [document.name for document in part]
                        texts = [[piece.text for piece in document.parts] for document in part]
                        learned = [[piece.learned for piece in document.parts] for document in part]
                        files[name].add([names, texts, learned])
                    advance(len(chunk))
        for split in SPLITS:
            self.sizes[split] = files[split].rows
            hint = "" if split in splits else few
            self.refuse_empty(split, self.sizes[split], {"empty": self.empty[split]}, hint)

    def _check_kind(self, document: RawDocument) -> None:
        self.kind = self.kind or document.kind
        if document.kind != self.kind:
            raise DataError(
                f"{document.name}: {_KINDS[document.kind]}, but the documents before it are "
                f"{_KINDS[self.kind]}; prepare them apart"
            )

    def _split_of(self, split: str, document: RawDocument) -> str | None:
        """The split that a document goes to, or None if it is dropped."""
        self.read[split] += 1
        if not any(part.learned and part.text for part in document.parts):
            self.empty[split] += 1
            return None
        if split == "train":
            every, every_test = self.options.holdout, self.options.holdout_test
            kept = self.read[split] - self.empty[split]
            rest = kept - kept // every if every else kept  # not held out for validation
            if every and kept % every == 0:
                split = "valid"
            elif every_test and rest % every_test == 0:
                split = "test"
        if split != "train":
            self.held_out.add(_digest(document))
        return split

    def _documents(self, split: str) -> Iterator[RawDocument]:
        assert self.kind is not None
        for batch in read_batches(self.spill(split), _ROWS_AT_ONCE):
            for row in batch.to_pylist():
                parts = zip(row["texts"], row["learned"], strict=True)
                yield RawDocument(row["name"], self.kind, tuple(Part(*part) for part in parts))

    # -------------------------------------------------------------- pass 2: tokenizer

    def learn_tokenizer(self) -> PreTrainedTokenizerFast:
        size = self.options.vocabulary or DEFAULT_VOCABULARY

        def lines() -> Iterator[str]:
            for document in self._documents("train"):
                yield from document.text.splitlines(keepends=True)

        with self.bars.bar("learning subwords", None):
            return learn_tokenizer(lines, size, chat=self.kind == "chat")

    # -------------------------------------------------------------- pass 3: token ids

    def write_splits(self, tokenizer: PreTrainedTokenizerFast, *, learned: bool) -> None:
        """Write token ids, the tokenizer and the counts of the training split."""
        end = int(tokenizer.eos_token_id)
        for split in SPLITS:
            counts, last = self._write_split(split, tokenizer)
            self.spill(split).unlink()
            if split == "train":
                end = last
                self.save_frequencies({"tokens": counts})
        self.save_tokenizer(tokenizer, "tokenizer", learned=learned)
        self.tokenizer = {
            "vocabulary": len(tokenizer),
            "learned": learned,
            "begin": None if self.kind == "chat" else begin_token(tokenizer),
            "end": end,
        }

    def _write_split(
        self, split: str, tokenizer: PreTrainedTokenizerFast
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Write the ids of a split; how often each type occurs, and what its answers end with."""
        assert self.kind is not None
        counts = np.zeros(len(tokenizer), dtype=np.int64)
        ends: Counter[int] = Counter()
        with (
            ArrowFile(self.folder / f"{split}.arrow", schema(self.kind, split)) as file,
            self.bars.bar(f"writing {split}", self.sizes[split]) as advance,
        ):
            for chunk in _chunks(self._documents(split)):
                encoded = list(encode(tokenizer, chunk))
                sizes = [document.learned_bytes for document in chunk]
                ids = [ids for ids, _ in encoded]
                columns: list[object] = [ids, sizes, [document.name for document in chunk]]
                if self.kind != "text":
                    columns.insert(1, [labels for _, labels in encoded])
                file.add(columns)
                for _, labels in encoded:
                    learned = [label for label in labels[1:] if label != IGNORED]
                    self.learned_tokens[split] += len(learned)
                    ends.update(learned[-1:])
                counts += np.bincount(np.concatenate(ids), minlength=len(counts))
                self.bytes[split] += sum(sizes)
                if split == "train":
                    self.repeated += sum(_digest(document) in self.held_out for document in chunk)
                advance(len(chunk))
        self.tokens[split] = int(counts.sum())
        return counts, ends.most_common(1)[0][0]

    # -------------------------------------------------------------- the end

    def write_manifest(self, inputs: Sequence[Mapping[str, str]]) -> None:
        """Say what the folder holds; written last."""
        seal(
            self.folder,
            {
                "task": TASK,
                "kind": self.kind,
                **self.tokenizer,
                "holdout": {"valid": self.options.holdout, "test": self.options.holdout_test},
                "read": dict(self.read),
                "empty": dict(self.empty),
                "sizes": dict(self.sizes),
                "tokens": dict(self.tokens),
                "learned_tokens": dict(self.learned_tokens),
                "bytes": dict(self.bytes),
                "repeated": self.repeated,
                "inputs": list(inputs),
            },
        )


_KINDS: dict[Kind, str] = {
    "text": "a text",
    "prompt": "a prompt with its completion",
    "chat": "a chat",
}


def _digest(document: RawDocument) -> bytes:
    return hashlib.blake2b(document.text.encode(), digest_size=16).digest()


def _chunks(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """A few documents at a time: not too many, and not too long."""
    chunk: list[RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += sum(len(part.text) for part in document.parts)
        if len(chunk) == _ROWS_AT_ONCE or size > _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def summarize(prepared: PreparedDocuments, tokenizer: str | None = None) -> None:
    """Print what became of the documents, where they are, and the command that trains on them.

    With a ``tokenizer`` of a folder that also holds a model, that model is the one to train.
    """
    manifest, console = prepared.manifest, Console(highlight=False, soft_wrap=True)
    table = Table("split", "read", "empty", "documents", "tokens", "learned", "bytes", box=None)
    for split in SPLITS:
        table.add_row(
            split,
            str(manifest["read"].get(split, "held out")),
            *(
                str(manifest[column][split])
                for column in ("empty", "sizes", "tokens", "learned_tokens", "bytes")
            ),
        )
    console.print(table)
    made = "learned" if manifest["learned"] else "as given"
    rate = manifest["bytes"]["train"] / manifest["learned_tokens"]["train"]
    console.print(f"vocabulary: {manifest['vocabulary']} types, {made}; {rate:.2f} bytes per token")
    if manifest["repeated"]:
        notice(
            f"warning: {manifest['repeated']} training documents are also in the held-out splits"
        )
    print_ready(console, prepared.path, *_fitting_recipe(manifest, tokenizer))


def _fitting_recipe(manifest: Mapping[str, Any], tokenizer: str | None) -> list[str]:
    """The name of the recipe to train with, and the settings that it needs for the documents."""
    if tokenizer is not None:
        with suppress(RequestError):  # a tokenizer without a model is for a new one
            block = read_document(RECIPES / "lm-sft.yaml")["data"]["block"]
            positions = getattr(load_config(tokenizer), "max_position_embeddings", block)
            model = ["lm-sft", f"model.pretrained={shlex.quote(tokenizer)}"]
            return model if positions >= block else [*model, f"data.block={positions}"]
    if manifest["bytes"]["train"] >= _LARGE:
        return ["lm-124m"]
    recipe = read_document(RECIPES / "lm-text.yaml")
    train, warmup = recipe["train"], recipe["method"]["warmup_steps"]
    steps = train["epochs"] * manifest["tokens"]["train"] // train["batch_tokens"]
    if warmup <= steps // 2:
        return ["lm-text"]
    return ["lm-text", f"method.warmup_steps={steps // 4}"]  # or most of the run would be warm-up
