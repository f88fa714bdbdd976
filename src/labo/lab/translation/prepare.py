"""Parallel text to prepared data: ``labo prepare``.

Three passes, none of which holds the corpus in memory. The first cleans the text and parts the
held-out splits from the training split, the second learns the subwords from the training split,
the third writes token ids and counts them. All happens in a hidden folder beside the result, which
takes its place at the very end: what is there is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from filelock import FileLock
from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..._names import unknown_name
from ..config import Section, explain
from ..errors import DataError, LabError, RequestError
from ..run.files import flush, write_json, write_text
from .parallel import ParallelText, find_parallel_text, sha256
from .prepared import FORMAT, MANIFEST, SPLITS, Pair, Prepared, schema
from .text import (
    SPECIAL_TOKENS,
    Lines,
    Merges,
    Pipeline,
    Size,
    TextOptions,
    encode,
    languages_without_moses_rules,
    learn_merges,
    make_tokenizer,
    read_codes,
    restrict,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "PRESETS",
    "PrepareOptions",
    "Processing",
    "Row",
    "choose",
    "parse_pairs",
    "prepare",
    "prepare_pairs",
    "summarize",
]

_CHUNK = 5_000  # pairs worked on at a time
_BATCH = 100_000  # pairs in a record batch
_MANY = 200_000  # pairs for which it pays to start processes
_UNKNOWN = SPECIAL_TOKENS.index("<unk>")
_PAIR = re.compile(r"([a-z]{2,3}(?:_\w+)?)-([a-z]{2,3}(?:_\w+)?)")
_TEXT = pa.schema([(name, pa.string()) for name in ("source", "target")] + [("pair", pa.int8())])

Row = tuple[int, str, str]  # number of the language pair, raw source line, raw target line
Names = Annotated[tuple[str, ...], Field(strict=False)]
_T = TypeVar("_T")
_R = TypeVar("_R")


# ------------------------------------------------------------------ what is asked for


Tag = Literal["source", "target", "none"]


def parse_pairs(names: Sequence[str], tag: Tag | None = None) -> list[Pair]:
    """Directions of translation, each with the tag that begins its sources.

    Args:
        names: such as "de-en".
        tag: the language that the tag names. By default what the model must be told: the target
            if there are several, else the source if there are several.

    Raises:
        ValueError: a name is no pair of two languages, or is given twice.

    Example:
        >>> [pair.tag for pair in parse_pairs(["de-en", "fr-en"])]
        ['<de>', '<fr>']
    """
    found = [_PAIR.fullmatch(name) for name in names]
    languages = [match.groups() for match in found if match and match[1] != match[2]]
    if not names or len(languages) < len(names) or len(set(names)) < len(names):
        wrong = ", ".join(names) or "nothing"
        raise ValueError(f"pair: each is two languages, such as de-en, given once; got {wrong}")
    sources, targets = zip(*languages, strict=True)
    if tag is None:
        tag = "target" if len(set(targets)) > 1 else "source" if len(names) > 1 else "none"
    named = {"source": sources, "target": targets, "none": [None] * len(names)}[tag]
    return [
        Pair(source, target, name and f"<{name}>")
        for source, target, name in zip(sources, targets, named, strict=True)
    ]


class Processing(Section):
    """What becomes of sentence pairs. A limit of 0 is none."""

    text: TextOptions = TextOptions()
    train_text: TextOptions | None = None  # where training text is treated otherwise
    max_tokens: int = Field(default=0, ge=0)  # words on a side, of training pairs
    max_ratio: float = Field(default=0.0, ge=0)  # of the longer to the shorter side, likewise
    max_pieces: int = Field(default=0, ge=0)  # subwords on a side, of training and held-out pairs
    max_piece_ratio: float = Field(default=0.0, ge=0)  # of the longer to the shorter side, likewise
    holdout: int = Field(default=0, ge=0)  # every so many-th cleaned training pair goes to valid
    holdout_test: int = Field(default=0, ge=0)  # every so many-th of the rest goes to test
    vocabulary: int | None = Field(default=None, ge=1)  # types, special tokens included; or
    merges: int | None = Field(default=None, ge=0)  # so many byte-pair merges; or
    codes: str | None = None  # a file of them, as subword-nmt writes it
    share: Literal["all", "merges", "nothing"] = "all"  # of the subwords, by the two sides

    @model_validator(mode="after")
    def _consistent(self) -> Processing:
        sizes = [n for n in ("vocabulary", "merges", "codes") if getattr(self, n) is not None]
        if len(sizes) > 1:
            raise ValueError(f"{' and '.join(sizes)} exclude each other")
        if self.codes is not None and not self.text.spaced:
            raise ValueError("codes split tokens: they need moses, or text that is tokenized")
        if self.codes is not None and self.share == "nothing":
            raise ValueError("codes are for both sides: share can be all or merges")
        if self.training_text.spaced != self.text.spaced:
            raise ValueError("train_text and text must both be in tokens, or neither")
        if 1 in (self.holdout, self.holdout_test):
            raise ValueError("holdout: every pair held out leaves none to train on")
        return self

    @property
    def training_text(self) -> TextOptions:
        return self.train_text or self.text

    @property
    def size(self) -> Size:
        """How far to merge."""
        if self.vocabulary is None and self.merges is None:
            return Size(vocabulary=10_000)
        return Size(self.vocabulary, self.merges)


class PrepareOptions(Processing):
    """Files of parallel text, and what becomes of them."""

    pair: Names  # such as de-en
    train: Names  # files, see labo.lab.translation.parallel
    valid: Names = ()
    test: Names = ()
    columns: Names = ("source", "target")  # of files with columns
    # The language that the first token of a source names; by default what the model must know.
    tag: Tag | None = None

    @model_validator(mode="after")
    def _has_splits(self) -> PrepareOptions:
        parse_pairs(self.pair, self.tag)
        if not self.train:
            raise ValueError("train: no training data")
        for split, holdout in (("valid", "holdout"), ("test", "holdout_test")):
            if getattr(self, split) and getattr(self, holdout):
                raise ValueError(f"{split} and {holdout} exclude each other")
            if not getattr(self, split) and not getattr(self, holdout):
                raise ValueError(f"{split}: no such data; give {split} or {holdout}")
        return self


# The public recipes of the paper's experiments. In two of them training text is treated otherwise.
PRESETS: dict[str, dict[str, Any]] = {
    "iwslt14": {
        "text": {"moses": True, "straight_apostrophes": True, "lowercase": True},
        "train_text": {"moses": True, "lowercase": True},
        "max_tokens": 175,
        "max_ratio": 1.5,
        "holdout": 23,
        "merges": 10_000,
        "share": "merges",
    },
    "iwslt17": {
        "text": {"straight_apostrophes": True},
        "train_text": {},
        "max_pieces": 250,
        "vocabulary": 16_384,
    },
    "wmt14": {
        "text": {"moses": True, "aggressive_hyphens": True, "straight_apostrophes": True},
        "train_text": {
            "moses": True,
            "aggressive_hyphens": True,
            "normalize_punctuation": True,
            "remove_nonprinting": True,
        },
        "max_pieces": 250,
        "max_piece_ratio": 1.5,
        "holdout": 100,
        "merges": 40_000,
    },
    "multi30k": {
        "text": {"moses": True, "normalize_punctuation": True, "lowercase": True},
        "merges": 10_000,
    },
}


def choose(
    preset: str | None, text: Mapping[str, bool], settings: Mapping[str, Any]
) -> PrepareOptions:
    """A preset with what is to differ from it.

    Args:
        preset: one of :data:`PRESETS`, or None.
        text: fields of :class:`labo.lab.translation.text.TextOptions`.
        settings: other fields of :class:`PrepareOptions`; those that are None are left out.

    Raises:
        RequestError: one line for each thing that is wrong.
    """
    if preset is not None and preset not in PRESETS:
        raise RequestError(unknown_name("preset", preset, PRESETS))
    values = dict(PRESETS[preset]) if preset else {}
    given = {name: value for name, value in settings.items() if value is not None}
    if given.keys() & {"vocabulary", "merges", "codes"}:
        values = {k: v for k, v in values.items() if k not in ("vocabulary", "merges")}
    if given.get("valid") and "holdout" not in given:
        values.pop("holdout", None)
    # Training text has its own apostrophes, so that straight ones are no option for it.
    plain = {name: value for name, value in text.items() if name != "straight_apostrophes"}
    values["train_text"] = {**values.get("train_text", values.get("text", {})), **plain}
    values["text"] = {**values.get("text", {}), **text}
    try:
        return PrepareOptions.model_validate(values | given)
    except ValidationError as error:
        raise RequestError("\n".join(explain(error, PrepareOptions))) from error


# ------------------------------------------------------------------ preparing


def prepare(
    options: PrepareOptions, out: str | Path, *, workers: int | None = 1, force: bool = False
) -> Prepared:
    """Prepare files of parallel text.

    Args:
        options: which files, and what becomes of them.
        out: the folder to make.
        workers: processes that clean text; None for as many as there are processors, if it pays.
            The result does not depend on it.
        force: replace the prepared data that is there.

    Returns:
        What is now in ``out``.

    Raises:
        DataError: the files are missing, damaged or not aligned, or nothing of them is left.
        RequestError: ``out`` exists.
    """
    out = _checked(Path(out), force)
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
    # Everything is read once before any work, so that what is wrong is said at once.
    with _Bars() as bars:
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


def _rows(texts: Sequence[Sequence[ParallelText]]) -> Iterator[Row]:
    for number, parts in enumerate(texts):
        for source, target in chain.from_iterable(parts):
            yield number, source, target


def _survey(
    texts: Mapping[str, Sequence[Sequence[ParallelText]]], bars: _Bars
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How many pairs each split has, and the digests of all files."""
    sizes: dict[str, int] = {}
    digests: dict[Path, str] = {}
    for split, by_pair in texts.items():
        parts = list(chain.from_iterable(by_pair))
        with bars.bar(f"reading {split}", None) as advance:
            sizes[split] = 0
            for chunk in _chunks(chain.from_iterable(parts), _CHUNK):
                sizes[split] += len(chunk)
                advance(len(chunk))
        digests |= {path: sha256(path) for part in parts for path in part.files}
    return sizes, [{"file": path.name, "sha256": digest} for path, digest in digests.items()]


def prepare_pairs(
    out: str | Path,
    pairs: Sequence[Pair],
    splits: Mapping[str, Iterable[Row]],
    processing: Processing,
    *,
    sizes: Mapping[str, int] | None = None,
    inputs: Sequence[Mapping[str, str]] = (),
    workers: int = 1,
    force: bool = False,
) -> Prepared:
    """Prepare sentence pairs that come from anywhere.

    Args:
        out: the folder to make.
        pairs: the directions of translation.
        splits: for "train" and, unless they are held out, "valid" and "test": the number of the
            language pair, the source line and the target line of each sentence pair.
        processing: what becomes of them.
        sizes: how many each split has, for the progress bars.
        inputs: what the manifest says of where they come from.
        workers: processes that clean text; the result does not depend on it.
        force: replace the prepared data that is there.

    Returns:
        What is now in ``out``.
    """
    out = _checked(Path(out), force)
    if processing.codes is not None:
        read_codes(Path(processing.codes).expanduser(), list)  # a wrong file is refused at once
    try:
        with _building(out, force) as folder, _Bars() as bars:
            work = _Work(folder, list(pairs), processing, bars)
            work.clean(splits, sizes or {}, workers)
            work.write_splits(*work.learn_subwords())
            work.write_manifest(inputs)
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error
    return Prepared(out)


def summarize(prepared: Prepared) -> None:
    """Print what became of the pairs, where they are, and what to do next."""
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


@dataclass
class _Work:
    """The three passes over one corpus, and what they counted."""

    folder: Path
    pairs: list[Pair]
    processing: Processing
    bars: _Bars
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
        self, splits: Mapping[str, Iterable[Row]], sizes: Mapping[str, int], workers: int
    ) -> None:
        """Write the cleaned lines of each split to a file of their own."""
        options = self.processing
        with ExitStack() as stack:
            files = {
                split: stack.enter_context(_ArrowFile(self._spill(split), _text_schema(split)))
                for split in SPLITS
            }
            for split, rows in splits.items():
                text = options.training_text if split == "train" else options.text
                run = partial(_clean_rows, text, self.pairs)
                advance = stack.enter_context(self.bars.bar(f"cleaning {split}", sizes.get(split)))
                for chunk in _in_order(run, _chunks(rows, _CHUNK), workers):
                    parts: dict[str, list[_Cleaned]] = {name: [] for name in SPLITS}
                    for row in chunk:
                        place = self._place(split, row)
                        if place is not None:
                            parts[place].append(self._shown(row) if place != "train" else row)
                    for place, part in parts.items():
                        files[place].add(zip(*part, strict=True))
                    self.read[split] += len(chunk)
                    advance(len(chunk))
        for split in SPLITS:
            self.cleaned[split] = files[split].rows
            self._refuse_empty(split, self.cleaned[split])

    def _place(self, split: str, row: _Cleaned) -> str | None:
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

    def _shown(self, row: _Cleaned) -> _Cleaned:
        """With its lines as people read them, if they were published in tokens."""
        if not self.processing.text.tokenized:
            return row
        pair = self.pairs[row.pair]
        pipeline = _pipeline(self.processing.text, pair.source, pair.target)
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
        """The tokenizers of source and target; one and the same if they share all."""
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
        for batch in _read_batches(self._spill("train")):
            yield from batch[side].to_pylist()

    def _used(self, tokenizer: PreTrainedTokenizerFast, side: str) -> set[str]:
        """The types that the training text of a side is made of."""
        used = np.zeros(len(tokenizer), dtype=bool)
        with self.bars.bar(f"counting {side}", self.cleaned["train"]) as advance:
            for lines in _chunks(self._lines(side), _CHUNK):
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
        _save_tokenizer(source, self.folder / "tokenizer")
        if target is not source:
            _save_tokenizer(target, self.folder / "target_tokenizer")
        self.vocabulary = {
            "kind": "joint" if target is source else "separate",
            "source": len(source),
            "target": len(target),
        }

    def _write_split(
        self, split: str, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Write the token ids of a split; how often each type occurs in it."""
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
            _ArrowFile(self.folder / f"{split}.arrow", schema(split)) as file,
            self.bars.bar(f"writing {split}", self.cleaned[split]) as advance,
        ):
            for batch in _read_batches(self._spill(split)):
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
        """Say what the folder holds; written last."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        digests = {path.relative_to(self.folder).as_posix(): sha256(path) for path in files}
        listing = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
        manifest = {
            "format": FORMAT,
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
            "sha256": digests,
            "fingerprint": hashlib.sha256(listing.encode()).hexdigest(),
        }
        for path in (*files, *{path.parent for path in files}):
            flush(path)
        write_json(self.folder / MANIFEST, manifest)

    def _processing(self) -> dict[str, Any]:
        """What was done, without the places of files."""
        fields = set(Processing.model_fields) - {"text"}
        document = self.processing.model_dump(include=fields)
        if self.processing.codes is not None:
            path = Path(self.processing.codes).expanduser()
            document["codes"] = {"file": path.name, "sha256": sha256(path)}
        return document


def _is_nth(number: int, n: int) -> bool:
    return n > 0 and number % n == 0


def _objection(lengths: tuple[int, int], longest: int, ratio: float) -> str | None:
    """Why a training pair of these lengths is not wanted, or None."""
    if longest and max(lengths) > longest:
        return "too long"
    if ratio and max(lengths) / max(1, min(lengths)) > ratio:
        return "length ratio"
    return None


# ------------------------------------------------------------------ cleaning, in any process


class _Cleaned(NamedTuple):
    """A sentence pair, as the subword model sees it and as it is shown."""

    source: str
    target: str
    pair: int
    source_text: str
    target_text: str


def _clean_rows(text: TextOptions, pairs: Sequence[Pair], rows: Sequence[Row]) -> list[_Cleaned]:
    cleaned = []
    for number, source, target in rows:
        pipeline = _pipeline(text, pairs[number].source, pairs[number].target)
        one, other = pipeline.source(source), pipeline.target(target)
        cleaned.append(_Cleaned(one, other, number, source, target))
    return cleaned


@lru_cache(maxsize=64)
def _pipeline(text: TextOptions, source: str, target: str) -> Pipeline:
    return Pipeline(text, source, target)


def _chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _in_order(function: Callable[[_T], _R], items: Iterable[_T], workers: int) -> Iterator[_R]:
    """``map`` by several processes, a few items ahead of what is asked for."""
    if workers == 1:
        yield from map(function, items)
        return
    pending: deque[Future[_R]] = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ------------------------------------------------------------------ files


def _text_schema(split: str) -> pa.Schema:
    """The columns of cleaned text: those of the split, with text in the place of token ids."""
    return pa.schema([*_TEXT, *(column for column in schema(split) if "text" in column.name)])


class _ArrowFile:
    """A stream of record batches, written as rows come."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self.rows = 0
        self._schema = columns
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, columns)

    def add(self, columns: Iterable[Any]) -> None:
        """Append rows, column by column; columns beyond those of the file are left out."""
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, kind)
            for column, kind in zip(columns, self._schema.types, strict=False)
        ]
        if arrays:
            self._waiting.append(pa.record_batch(arrays, schema=self._schema))
            self._waiting_rows += self._waiting[-1].num_rows
            self.rows += self._waiting[-1].num_rows
        if self._waiting_rows >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._waiting_rows:
            self._stream.write_batch(pa.concat_batches(self._waiting))
        self._waiting, self._waiting_rows = [], 0

    def __enter__(self) -> _ArrowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._stream.close()
        self._file.close()


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The content of an Arrow stream, a few rows at a time."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, _CHUNK):
                yield batch.slice(start, _CHUNK)


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    # transformers 5 writes the name of a class that earlier ones do not have.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    write_json(path, config)


def _checked(out: Path, force: bool) -> Path:
    """The absolute path of a folder that may be made."""
    out = out.expanduser().absolute()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    if not (out / MANIFEST).is_file():
        raise RequestError(f"{out} exists, and is no prepared data")
    if not force:
        raise RequestError(f"{out} exists; --force replaces it")
    return out


@contextmanager
def _building(out: Path, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``out`` if all goes well.

    Whoever wants to build the same waits here; what a killed process left is cleared away.
    """
    folder, old = (out.with_name(f".{out.name}.{name}") for name in ("preparing", "replaced"))
    lock = out.with_name(f".{out.name}.lock")
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        try:
            _checked(out, force)
            for leftover in (folder, old):
                shutil.rmtree(leftover, ignore_errors=True)
            folder.mkdir()
            yield folder
            if out.exists():
                os.replace(out, old)
            os.replace(folder, out)
            flush(out.parent)
        finally:
            for leftover in (folder, old):
                shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                lock.unlink()


class _Bars:
    """Progress bars on standard error, if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def bar(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar for one piece of work; what it yields says how much more is done."""
        task = self._progress.add_task(title, total=total)
        yield lambda done: self._progress.advance(task, done)
        self._progress.remove_task(task)
