"""Parallel text to prepared data: ``labo prepare``.

There are three passes, none of which holds the corpus in memory. The first cleans the text and
separates the held-out splits from the training split. The second learns the subwords from the
training split. The third writes token ids and counts them. All of it happens in a hidden folder
beside the result, which is renamed at the end: a folder under its own name is complete.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from ..errors import DataError, LabError
from ..run.files import sha256, write_text
from ..run.progress import ProgressBars
from ..text.arrow import ArrowFile, read_batches
from ..text.folder import SPLITS, building, check_free, save_tokenizer, seal
from ..text.subwords import (
    SPECIAL_TOKENS,
    Lines,
    Merges,
    encode,
    learn_merges,
    make_tokenizer,
    read_codes,
    restrict,
)
from .cleaning import CleanPair, RawPair, chunks, clean_pairs, map_in_order, pipeline_for
from .options import PrepareOptions, Processing, parse_pairs
from .parallel import ParallelText, find_parallel_text
from .prepared import Pair, Prepared, schema
from .text import languages_without_moses_rules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["prepare", "prepare_pairs", "summarize"]

_CHUNK = 5_000  # pairs worked on at a time
_MANY = 200_000  # pairs for which it pays to start processes
_UNKNOWN = SPECIAL_TOKENS.index("<unk>")
_TEXT = pa.schema([(name, pa.string()) for name in ("source", "target")] + [("pair", pa.int8())])


def prepare(
    options: PrepareOptions, out: str | Path, *, workers: int | None = 1, force: bool = False
) -> Prepared:
    """Prepare files of parallel text.

    Args:
        options: which files, and how they are processed.
        out: the folder to make.
        workers: processes that clean text; None for as many as there are processors, if it pays.
            The result does not depend on it.
        force: replace prepared data that are in ``out``.

    Returns:
        The prepared data.

    Raises:
        DataError: the files are missing, damaged or not aligned, or nothing of them is left.
        RequestError: ``out`` exists, and is something else or ``force`` is False.
    """
    out = check_free(Path(out), force)
    pairs = parse_pairs(options.pair, options.tag)
    texts = {
        split: [
            [find_parallel_text(n, p.source, p.target, options.columns) for n in names]
            for p in pairs
        ]
        for split, names in (
            ("train", options.train),
            ("valid", options.valid),
            ("test", options.test),
        )
        if names
    }
    # Everything is read once before any work, so that errors are found at once.
    with ProgressBars() as bars:
        sizes, inputs = _survey(texts, bars)
    if workers is None:
        pays = options.text.moses and sizes["train"] >= _MANY
        workers = os.cpu_count() or 1 if pays else 1
    return prepare_pairs(
        out,
        pairs,
        {split: _rows(by_pair) for split, by_pair in texts.items()},
        options,
        sizes=sizes,
        inputs=inputs,
        workers=workers,
        force=force,
    )


def _rows(texts: Sequence[Sequence[ParallelText]]) -> Iterator[RawPair]:
    for number, parts in enumerate(texts):
        for source, target in chain.from_iterable(parts):
            yield number, source, target


def _survey(
    texts: Mapping[str, Sequence[Sequence[ParallelText]]], bars: ProgressBars
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How many pairs each split has, and the digests of all files."""
    sizes: dict[str, int] = {}
    digests: dict[Path, str] = {}
    for split, by_pair in texts.items():
        parts = list(chain.from_iterable(by_pair))
        with bars.bar(f"reading {split}", None) as advance:
            sizes[split] = 0
            for chunk in chunks(chain.from_iterable(parts), _CHUNK):
                sizes[split] += len(chunk)
                advance(len(chunk))
        digests |= {path: sha256(path) for part in parts for path in part.files}
    return sizes, [{"file": path.name, "sha256": digest} for path, digest in digests.items()]


def prepare_pairs(
    out: str | Path,
    pairs: Sequence[Pair],
    splits: Mapping[str, Iterable[RawPair]],
    processing: Processing,
    *,
    sizes: Mapping[str, int] | None = None,
    inputs: Sequence[Mapping[str, str]] = (),
    workers: int = 1,
    force: bool = False,
) -> Prepared:
    """Prepare sentence pairs from any source.

    Args:
        out: the folder to make.
        pairs: the directions of translation.
        splits: for "train" and, unless they are held out, "valid" and "test": the number of the
            language pair, the source line and the target line of each sentence pair.
        processing: how they are processed.
        sizes: how many each split has, for the progress bars.
        inputs: the origin of the pairs, for the manifest.
        workers: processes that clean text; the result does not depend on it.
        force: replace prepared data that are in ``out``.

    Returns:
        The prepared data.
    """
    out = check_free(Path(out), force)
    if processing.codes is not None:
        read_codes(Path(processing.codes).expanduser(), list)  # refuse a wrong file at once
    try:
        with building(out, force) as folder, ProgressBars() as bars:
            work = _Work(folder, list(pairs), processing, bars)
            work.clean(splits, sizes or {}, workers)
            work.write_splits(*work.learn_subwords())
            work.write_manifest(inputs)
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error
    return Prepared(out)


@dataclass
class _Work:
    """The three passes over one corpus, and their counts."""

    folder: Path
    pairs: list[Pair]
    processing: Processing
    bars: ProgressBars
    read: Counter[str] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)  # by language pair
    remaining: Counter[int] = field(default_factory=Counter)  # of these, not held out for valid
    cleaned: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(
        default_factory=lambda: {split: Counter() for split in SPLITS}
    )
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: dict[str, dict[str, int]] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)

    @property
    def tags(self) -> list[str]:
        return list(dict.fromkeys(pair.tag for pair in self.pairs if pair.tag))

    # -------------------------------------------------------------- pass 1: clean text

    def clean(
        self, splits: Mapping[str, Iterable[RawPair]], sizes: Mapping[str, int], workers: int
    ) -> None:
        """Write the cleaned lines of each split to a file of their own."""
        options = self.processing
        with ExitStack() as stack:
            files = {
                split: stack.enter_context(ArrowFile(self._spill(split), _text_schema(split)))
                for split in SPLITS
            }
            for split, rows in splits.items():
                text = options.training_text if split == "train" else options.text
                run = partial(clean_pairs, text, self.pairs)
                advance = stack.enter_context(self.bars.bar(f"cleaning {split}", sizes.get(split)))
                wanted = self._short_enough(split, rows)
                for chunk in map_in_order(run, chunks(wanted, _CHUNK), workers):
                    parts: dict[str, list[CleanPair]] = {name: [] for name in SPLITS}
                    for row in chunk:
                        chosen = self._split_of(split, row)
                        if chosen is not None:
                            parts[chosen].append(self._shown(row) if chosen != "train" else row)
                    for chosen, part in parts.items():
                        files[chosen].add(zip(*part, strict=True))
                    advance(len(chunk))
        for split in SPLITS:
            self.cleaned[split] = files[split].rows
            self._refuse_empty(split, self.cleaned[split])

    def _short_enough(self, split: str, rows: Iterable[RawPair]) -> Iterator[RawPair]:
        """The pairs that are short enough to be cleaned, whatever characters they are made of."""
        limit = self.processing.max_characters
        for row in rows:
            self.read[split] += 1
            longest = max(len(row[1]), len(row[2]))
            if not limit or longest <= limit:
                yield row
            elif split == "train":
                self.dropped[split]["too many characters"] += 1
            else:  # what is scored is never dropped
                raise DataError(
                    f"line {self.read[split]} of the {split} split has {longest} characters; the "
                    f"limit of {limit} is set by --max-characters"
                )

    def _split_of(self, split: str, row: CleanPair) -> str | None:
        """The split that a pair goes to, or None if it is dropped."""
        options = self.processing
        reason = None if row.source and row.target else "empty"
        if split == "train" and not reason and (options.max_tokens or options.max_ratio):
            lengths = len(row.source.split()), len(row.target.split())
            reason = _objection(lengths, options.max_tokens, options.max_ratio)
        if reason:
            self.dropped[split][reason] += 1
            return None
        if split != "train":
            return split
        self.kept[row.pair] += 1
        if _is_nth(self.kept[row.pair], options.holdout):
            return "valid"
        self.remaining[row.pair] += 1
        return "test" if _is_nth(self.remaining[row.pair], options.holdout_test) else "train"

    def _shown(self, row: CleanPair) -> CleanPair:
        """The pair with detokenized lines, if the text was published in tokens."""
        if not self.processing.text.tokenized:
            return row
        pair = self.pairs[row.pair]
        pipeline = pipeline_for(self.processing.text, pair.source, pair.target)
        return row._replace(
            source_text=pipeline.restore_source(row.source_text),
            target_text=pipeline.restore(row.target_text),
        )

    def _refuse_empty(self, split: str, size: int) -> None:
        if not size:
            why = ", ".join(f"{n} {reason}" for reason, n in self.dropped[split].items())
            raise DataError(f"the {split} split is empty{f': dropped {why}' if why else ''}")

    def _spill(self, split: str) -> Path:
        return self.folder / f"{split}.text"

    # -------------------------------------------------------------- pass 2: subwords

    def learn_subwords(self) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
        """The tokenizers of source and target; the same object if they share everything."""
        options = self.processing
        if options.share == "nothing":
            source, target = (self._merges(partial(self._lines, s)) for s in ("source", "target"))
            return make_tokenizer(source, self.tags), make_tokenizer(target, self.tags)
        merges = self._merges(lambda: chain(self._lines("source"), self._lines("target")))
        joint = make_tokenizer(merges, self.tags)
        if options.share == "all":
            return joint, joint
        source, target = (
            restrict(merges, self._used(joint, side)) for side in ("source", "target")
        )
        return make_tokenizer(source, self.tags), make_tokenizer(target, self.tags)

    def _merges(self, lines: Lines) -> Merges:
        options = self.processing
        with self.bars.bar("learning subwords", None):
            if options.codes is not None:
                return read_codes(Path(options.codes).expanduser(), lines)
            reserved = len(SPECIAL_TOKENS) + len(self.tags)
            words = options.text.spaced
            return learn_merges(lines, words=words, size=options.size, reserved=reserved)

    def _lines(self, side: str) -> Iterator[str]:
        for batch in read_batches(self._spill("train"), _CHUNK):
            yield from batch[side].to_pylist()

    def _used(self, tokenizer: PreTrainedTokenizerFast, side: str) -> set[str]:
        """The types that occur in the training text of a side."""
        used = np.zeros(len(tokenizer), dtype=bool)
        with self.bars.bar(f"counting {side}", self.cleaned["train"]) as advance:
            for lines in chunks(self._lines(side), _CHUNK):
                used[np.concatenate(list(encode(tokenizer, lines)))] = True
                advance(len(lines))
        return set(tokenizer.convert_ids_to_tokens(np.flatnonzero(used).tolist()))

    # -------------------------------------------------------------- pass 3: token ids

    def write_splits(
        self, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast
    ) -> None:
        """Write token ids, tokenizers and the counts of the training split."""
        for split in SPLITS:
            counts = self._write_split(split, source, target)
            self._refuse_empty(split, self.sizes[split])
            self._spill(split).unlink()
            self.tokens[split] = {side: int(c.sum()) for side, c in counts.items()}
            self.unknown[split] = {side: int(c[_UNKNOWN]) for side, c in counts.items()}
            if split == "train":
                frequencies = {side: c.tolist() for side, c in counts.items()}
                write_text(self.folder / "frequencies.json", json.dumps(frequencies) + "\n")
        save_tokenizer(source, self.folder / "tokenizer")
        if target is not source:
            save_tokenizer(target, self.folder / "target_tokenizer")
        self.vocabulary = {
            "kind": "joint" if target is source else "separate",
            "source": len(source),
            "target": len(target),
        }

    def _write_split(
        self, split: str, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Write the token ids of a split; returns how often each type occurs in it."""
        options = self.processing
        held_out = bool({"valid": options.holdout, "test": options.holdout_test}.get(split))
        limits = (0, 0.0)
        if split == "train" or held_out:
            limits = options.max_pieces, options.max_piece_ratio
        starts = [source.convert_tokens_to_ids([p.tag]) if p.tag else [] for p in self.pairs]
        counts = {
            "source": np.zeros(len(source), dtype=np.int64),
            "target": np.zeros(len(target), dtype=np.int64),
        }
        with (
            ArrowFile(self.folder / f"{split}.arrow", schema(split)) as file,
            self.bars.bar(f"writing {split}", self.cleaned[split]) as advance,
        ):
            for batch in read_batches(self._spill(split), _CHUNK):
                ids: dict[str, list[list[int]]] = {"source": [], "target": []}
                wanted = []
                for pair, one, other in zip(
                    batch["pair"].to_pylist(),
                    encode(source, batch["source"].to_pylist()),
                    encode(target, batch["target"].to_pylist()),
                    strict=True,
                ):
                    lengths = len(one) - 1, len(other) - 1  # without the end mark
                    reason = _objection(lengths, *limits)
                    wanted.append(reason is None)
                    if reason:
                        self.dropped[split][reason] += 1
                    else:
                        ids["source"].append(starts[pair] + one)
                        ids["target"].append(other)
                for side, count in counts.items():
                    flat = np.fromiter(chain.from_iterable(ids[side]), dtype=np.int64)
                    count += np.bincount(flat, minlength=len(count))
                others = batch.filter(pa.array(wanted)).columns[2:]
                file.add([ids["source"], ids["target"], *others])
                advance(batch.num_rows)
        self.sizes[split] = file.rows
        return counts

    # -------------------------------------------------------------- the end

    def write_manifest(self, inputs: Sequence[Mapping[str, str]]) -> None:
        """Write what the folder holds; this is the last file."""
        manifest = {
            "pairs": [asdict(pair) for pair in self.pairs],
            "text": self.processing.text.model_dump(),
            "processing": self._processing(),
            "vocabulary": self.vocabulary,
            "read": dict(self.read),
            "dropped": {split: dict(sorted(n.items())) for split, n in self.dropped.items()},
            "sizes": {split: self.sizes[split] for split in SPLITS},
            "tokens": self.tokens,
            "unknown": self.unknown,
            "inputs": list(inputs),
        }
        seal(self.folder, manifest)

    def _processing(self) -> dict[str, Any]:
        """What was done, without the paths of files."""
        fields = set(Processing.model_fields) - {"text"}
        document = self.processing.model_dump(include=fields)
        if self.processing.codes is not None:
            path = Path(self.processing.codes).expanduser()
            document["codes"] = {"file": path.name, "sha256": sha256(path)}
        return document


def _is_nth(number: int, n: int) -> bool:
    return n > 0 and number % n == 0


def _objection(lengths: tuple[int, int], longest: int, ratio: float) -> str | None:
    """Why a training pair of these lengths is dropped, or None."""
    if longest and max(lengths) > longest:
        return "too long"
    if ratio and max(lengths) / max(1, min(lengths)) > ratio:
        return "length ratio"
    return None


def _text_schema(split: str) -> pa.Schema:
    """The columns of cleaned text: those of the split, with text instead of token ids."""
    return pa.schema([*_TEXT, *(column for column in schema(split) if "text" in column.name)])


def summarize(prepared: Prepared) -> None:
    """Print how many pairs were kept, where they are, and the command that trains on them."""
    manifest, console = prepared.manifest, Console(highlight=False, soft_wrap=True)
    table = Table("split", "read", "dropped", "kept", "source tokens", "target tokens", box=None)
    table.add_column("unknown", no_wrap=True)
    for split in SPLITS:
        dropped = ", ".join(f"{n} {reason}" for reason, n in manifest["dropped"][split].items())
        tokens, unknown = manifest["tokens"][split], manifest["unknown"][split]
        rates = (f"{unknown[side] / tokens[side]:.2%}" for side in ("source", "target"))
        table.add_row(
            split,
            str(manifest["read"].get(split, "held out")),
            dropped or "0",
            str(manifest["sizes"][split]),
            *(str(tokens[side]) for side in ("source", "target")),
            "/".join(rates),
        )
    console.print(table)
    vocabulary = manifest["vocabulary"]
    sizes = [vocabulary["source"]] + [vocabulary["target"]] * (vocabulary["kind"] == "separate")
    console.print(f"vocabulary: {vocabulary['kind']}, {' and '.join(map(str, sizes))} types")
    if prepared.text.moses:
        languages = {name for pair in prepared.pairs for name in (pair.source, pair.target)}
        for language in sorted(languages_without_moses_rules(languages)):
            console.print(f"Moses has no rules for {language}: those for English were used")
    console.print(f"{prepared.path} is ready; to train on it:", markup=False)
    console.print(
        f"labo train RECIPE data.name=prepared data.path={shlex.quote(str(prepared.path))}",
        markup=False,
    )
