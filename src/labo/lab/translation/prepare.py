"""Parallel text to prepared data: ``labo prepare``.

Three passes, none of which holds the corpus in memory. The first cleans the text, counts what looks
wrong, and separates the held-out splits from the training split; of each pair it keeps 17 bytes, by
which equal sentences are found. The second learns the subwords from the training split. The
third writes token ids and counts them. All of it happens in a hidden folder beside the result. The
hidden folder is renamed at the very end, so a folder that is there is complete.
"""

from __future__ import annotations

import os
import shlex
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from ..errors import DataError, printable
from ..run.files import sha256
from ..run.progress import ProgressBars, notice
from ..text.arrow import ArrowFile, read_batches
from ..text.folder import SPLITS, Preparation, building, check_apart, check_free, print_ready, seal
from ..text.pretrained_tokenizer import vocabulary_digest, vocabulary_size
from ..text.sentencepiece import make_piece_tokenizer, read_sentencepiece
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
from .framing import PairTokens, folder_tokenizers, frame_pairs
from .guard import (
    SUBWORDS,
    TOKENIZED,
    Keys,
    duplicates,
    hold_out,
    join_subwords,
    language_name,
    look_swapped,
    markup,
    overlap,
    sentence_groups,
    sentence_key,
    wrong_script,
)
from .options import DROPPED, RECIPES, PrepareOptions, Processing, parse_pairs
from .parallel import ParallelText, find_parallel_text
from .prepared import MAKER, Pair, Prepared, schema
from .text import languages_without_moses_rules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHUNK = 5_000  # pairs worked on at a time
_SAMPLE = 10_000  # pairs of a file that are looked at for marks of earlier processing
_SHOWN = 200  # characters of a sentence
_MANY = 200_000  # pairs for which it pays to start processes
_SPILL = pa.schema(
    [
        ("source", pa.string()),
        ("target", pa.string()),
        ("pair", pa.int8()),
        ("source_text", pa.string()),
        ("target_text", pa.string()),
    ]
)

Texts = Mapping[str, Sequence[tuple[int, ParallelText]]]  # by split, with the number of the pair


def prepare(
    options: PrepareOptions, out: str | Path, *, workers: int | None = 1, force: bool = False
) -> Prepared:
    """Prepare files of parallel text.

    Text is cleaned in ``workers`` processes; None for as many as there are processors, if it pays.
    The result does not depend on it. ``force`` replaces prepared data that are in ``out``.
    """
    out = check_free(Path(out), MAKER, force)
    pairs = parse_pairs(options.pair, options.tag)
    texts = {
        split: [
            (number, find_parallel_text(name, pair.source, pair.target, options.columns))
            for number, pair in enumerate(pairs)
            for name in options.inputs(split, pair)
        ]
        for split in SPLITS
        if getattr(options, split)
    }
    parts = [part for of_split in texts.values() for _, part in of_split]
    files = list(dict.fromkeys(file for part in parts for file in part.files))
    names = (name for split in texts for pair in pairs for name in options.inputs(split, pair))
    check_apart(out, [*names, *files])  # names may be those of folders
    # Everything is read once before any work, so that errors are found at once.
    sizes, notes = _survey(pairs, texts, options)
    if workers is None:
        pays = options.text.moses and sizes["train"] >= _MANY
        workers = os.cpu_count() or 1 if pays else 1
    return prepare_pairs(
        out,
        pairs,
        {split: _rows(of_split, options.join_subwords) for split, of_split in texts.items()},
        options,
        sizes=sizes,
        inputs=[{"file": path.name, "sha256": sha256(path)} for path in files],
        notes=notes,
        workers=workers,
        force=force,
    )


def _rows(parts: Iterable[tuple[int, ParallelText]], join: bool) -> Iterator[RawPair]:
    for number, part in parts:
        for source, target in part:
            if join:
                source, target = join_subwords(source), join_subwords(target)
            yield number, source, target


def _survey(
    pairs: Sequence[Pair], texts: Texts, options: PrepareOptions
) -> tuple[dict[str, int], list[str]]:
    """How many pairs each split has, and notes on their text. The user is warned of some."""
    sizes: Counter[str] = Counter()
    notes: list[str] = []
    warnings: list[str] = []
    with ProgressBars() as bars:
        for split, parts in texts.items():
            with bars.bar(f"reading {split}", None) as advance:
                for number, part in parts:
                    sample: list[tuple[str, str]] = []
                    for chunk in chunks(part, _CHUNK):
                        sample += chunk if len(sample) < _SAMPLE else ()
                        sizes[split] += len(chunk)
                        advance(len(chunk))
                    notes += _check_markup(part, sample, options)
                    if look_swapped(sample, pairs[number].source, pairs[number].target):
                        warnings.append(_swapped(part, pairs[number]))
    for warning in dict.fromkeys(warnings):
        notice(f"warning: {warning}")
    return sizes, list(dict.fromkeys([*notes, *warnings]))


def _swapped(part: ParallelText, pair: Pair) -> str:
    source, target = language_name(pair.source), language_name(pair.target)
    files = " and ".join(path.name for path in part.files)
    return (
        f"{files}: the languages look swapped: {pair} is {source} to {target}, but sources look "
        f"like {target} and targets like {source}; give the pair, files or columns the other way "
        "round"
    )


def _check_markup(
    part: ParallelText, sample: Sequence[tuple[str, str]], options: PrepareOptions
) -> Iterator[str]:
    """Notes on text that was processed before; refused if the options do not say so."""
    for side, lines in enumerate(zip(*sample, strict=True)):
        file = part.files[side if part.two_sided else 0]
        marked = markup(lines)
        if options.join_subwords:
            if marked is not None and marked[0] == SUBWORDS:
                yield "the text is split into subwords: they are joined first"
            marked = markup([*map(join_subwords, lines)])
        if marked is None:
            continue
        kind, share = marked
        if kind == TOKENIZED and options.text.tokenized:
            yield "the text is tokenized and taken as such"
        elif options.force_raw:
            yield f"{file.name} looks {kind.looks} already and is taken as running text"
        else:
            raise DataError(
                f"{file}: the text is {kind.looks} already ({share:.0%} of {len(lines)} lines have "
                f"{kind.evidence}): {kind.remedy}; --force-raw takes it as running text"
            )


def prepare_pairs(
    out: str | Path,
    pairs: Sequence[Pair],
    splits: Mapping[str, Iterable[RawPair]],
    processing: Processing,
    *,
    sizes: Mapping[str, int] | None = None,
    inputs: Sequence[Mapping[str, str]] = (),
    notes: Sequence[str] = (),
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
        inputs, notes: the origin of the pairs and remarks on them, for the manifest.
        workers, force: as for :func:`prepare`.
    """
    out = check_free(Path(out), MAKER, force)
    read = [processing.codes, processing.sentencepiece, processing.tokenizer]
    check_apart(out, filter(None, read))
    if processing.codes is not None:
        read_codes(Path(processing.codes).expanduser(), list)  # refuse a wrong file at once
    if processing.sentencepiece is not None:
        read_sentencepiece(Path(processing.sentencepiece).expanduser())
    given = None
    if processing.tokenizer is not None:
        given = folder_tokenizers(processing.tokenizer)
        pairs = frame_pairs(pairs, processing.tokenizer, *given, processing.prefix)
    with building(out, MAKER, force) as folder, ProgressBars() as bars:
        work = _Work(folder, bars, list(pairs), processing)
        work.clean(splits, sizes or {}, workers)
        work.write_splits(*(given or work.learn_subwords()), learned=given is None)
        work.write_manifest(inputs, notes)
    return Prepared(out)


class _Work(Preparation):
    """The three passes over one corpus, and their counts."""

    def __init__(
        self, folder: Path, bars: ProgressBars, pairs: list[Pair], processing: Processing
    ) -> None:
        super().__init__(folder, bars)
        self.pairs, self.processing = pairs, processing
        self.tags = list(dict.fromkeys(pair.tag for pair in pairs if pair.tag))
        self.holds_out = bool(processing.holdout or processing.holdout_test)
        self.dropped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.found: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}  # kept
        # Of the kept sources and targets, and the numbers of their language pairs.
        self.keys = {split: (array("Q"), array("Q"), array("b")) for split in SPLITS}
        self.overlap: dict[str, dict[str, int]] = {}
        self.tokens: dict[str, dict[str, int]] = {}
        self.unknown: dict[str, dict[str, int]] = {}
        self.tokenizers: dict[str, Any] = {}  # what the manifest says of them

    # -------------------------------------------------------------- pass 1: clean text

    def clean(
        self, splits: Mapping[str, Iterable[RawPair]], sizes: Mapping[str, int], workers: int
    ) -> None:
        """Write the cleaned lines of each split to a file of their own."""
        options = self.processing
        for split, rows in splits.items():
            text = options.training_text if split == "train" else options.text
            run = partial(clean_pairs, text, self.pairs)
            path = self._unsplit if split == "train" else self.spill(split)
            with (
                ArrowFile(path, _SPILL) as file,
                self.bars.bar(f"cleaning {split}", sizes.get(split)) as advance,
                closing(
                    map_in_order(run, chunks(self._short_enough(split, rows), _CHUNK), workers)
                ) as cleaned,
            ):
                for chunk in cleaned:
                    kept = (row for row in chunk if self._is_kept(split, row))
                    file.add(zip(*kept, strict=True))
                    advance(len(chunk))
            self.sizes[split] = file.rows
        places = self._places()
        self._count_overlap(places)
        self.keys.clear()
        self._distribute(places)
        for split in SPLITS:
            self.refuse_empty(split, self.sizes[split], self.dropped[split])

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

    def _is_kept(self, split: str, row: CleanPair) -> bool:
        """Whether a pair is kept. If not, the reason is counted, as is what looks suspicious."""
        options, pair = self.processing, self.pairs[row.pair]
        reason = None if row.source and row.target else "empty"
        if split == "train" and not reason and (options.max_tokens or options.max_ratio):
            lengths = len(row.source.split()), len(row.target.split())
            reason = _objection(lengths, options.max_tokens, options.max_ratio)
        if not reason:
            suspicions = ["copies"] if row.source == row.target else []
            if wrong_script(row.source, pair.source) or wrong_script(row.target, pair.target):
                suspicions.append("script")
            unwanted = [name for name in suspicions if split == "train" and name in options.drop]
            if unwanted:
                reason = DROPPED[unwanted[0]]
            else:
                self.found[split].update(DROPPED[name] for name in suspicions)
        if reason:
            self.dropped[split][reason] += 1
            return False
        sources, targets, numbers = self.keys[split]
        sources.append(sentence_key(pair.source, row.source))
        targets.append(sentence_key(pair.target, row.target))
        numbers.append(row.pair)
        return True

    def _places(self) -> npt.NDArray[np.int8]:
        """(N,), for each cleaned training pair the number of its split, or -1 to drop it."""
        for split, arrays in self.keys.items():
            source, target, pair = map(np.asarray, arrays)
            repeated = duplicates(source, target)
            counts = self.found[split]
            if split == "train":
                places = np.zeros(len(source), dtype=np.int8)
                if "duplicates" in self.processing.drop:
                    places[repeated] = -1
                    counts = self.dropped[split]
                kept = np.flatnonzero(places == 0)
                if self.holds_out:
                    places[kept] = self._held_out(source[kept], target[kept], pair[kept])
            if repeated.any():
                counts[DROPPED["duplicates"]] += int(repeated.sum())
        return places

    def _count_overlap(self, places: npt.NDArray[np.int8]) -> None:
        """Count the held-out sentences that are in the training split too, sources with tags."""
        tags = np.array([self.tags.index(p.tag) if p.tag else 0 for p in self.pairs], np.uint64)
        keys = {}
        for split, arrays in self.keys.items():
            source, target, pair = map(np.asarray, arrays)
            keys[split] = source + tags[pair], target
        train, *taken = (
            [column[places == number] for column in keys["train"]] for number in range(len(SPLITS))
        )
        for split, columns in zip(SPLITS[1:], taken, strict=True):
            # Those that were given and those of the training text; one of the two is empty.
            held_out = map(np.concatenate, zip(keys[split], columns, strict=True))
            self.overlap[split] = overlap(train, [*held_out])

    def _held_out(
        self, source: Keys, target: Keys, pair: npt.NDArray[np.int8]
    ) -> npt.NDArray[np.int8]:
        """(N,), the number of the split of each training pair."""
        options = self.processing
        places = np.zeros(len(source), dtype=np.int8)
        if options.holdout_by == "group":
            groups = [sentence_groups(source, target)]
            members = [np.arange(len(source))]
        else:  # each pair is a group of its own, and each language pair is counted by itself
            members = [np.flatnonzero(pair == number) for number in range(len(self.pairs))]
            groups = [np.arange(len(mine)) for mine in members]
        for mine, group in zip(members, groups, strict=True):
            for split, n in ((1, options.holdout), (2, options.holdout_test)):
                left = np.flatnonzero(places[mine] == 0)
                places[mine[left[hold_out(group[left], n)]]] = split
        return places

    def _distribute(self, places: npt.NDArray[np.int8]) -> None:
        """Move the cleaned training pairs to the files of their splits."""
        if not places.any():
            self._unsplit.replace(self.spill("train"))
            return
        with ExitStack() as stack:
            files = {
                number: stack.enter_context(ArrowFile(self.spill(split), _SPILL))
                for number, split in enumerate(SPLITS)
                if number == 0 or (places == number).any()
            }
            advance = stack.enter_context(self.bars.bar("splitting train", len(places)))
            done = 0
            for batch in read_batches(self._unsplit, _CHUNK):
                mine = places[done : done + batch.num_rows]
                for number, file in files.items():
                    file.add(batch.filter(pa.array(mine == number)).columns)
                done += batch.num_rows
                advance(batch.num_rows)
        for number, file in files.items():
            self.sizes[SPLITS[number]] = file.rows
        self._unsplit.unlink()

    @property
    def _unsplit(self) -> Path:
        """The cleaned training text, before pairs are held out."""
        return self.folder / "unsplit.text"

    # -------------------------------------------------------------- pass 2: subwords

    def learn_subwords(self) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
        """The tokenizers of source and target; the same object if they share everything."""
        options = self.processing
        if options.sentencepiece is not None:
            model = read_sentencepiece(Path(options.sentencepiece).expanduser())
            joint = make_piece_tokenizer(model, self.tags)
            return joint, joint
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
        for batch in read_batches(self.spill("train"), _CHUNK):
            yield from batch[side].to_pylist()

    def _used(self, tokenizer: PreTrainedTokenizerFast, side: str) -> set[str]:
        """The types that occur in the training text of a side."""
        used = np.zeros(len(tokenizer), dtype=bool)
        with self.bars.bar(f"counting {side}", self.sizes["train"]) as advance:
            for lines in chunks(self._lines(side), _CHUNK):
                used[np.concatenate(list(encode(tokenizer, lines)))] = True
                advance(len(lines))
        return set(tokenizer.convert_ids_to_tokens(np.flatnonzero(used).tolist()))

    # -------------------------------------------------------------- pass 3: token ids

    def write_splits(
        self,
        source: PreTrainedTokenizerFast,
        target: PreTrainedTokenizerFast,
        *,
        learned: bool,
    ) -> None:
        """Write token ids, tokenizers and the counts of the training split."""
        tokenizers = {"source": source, "target": target}
        for split in SPLITS:
            counts = self._write_split(split, source, target)
            self.refuse_empty(split, self.sizes[split], self.dropped[split])
            self.spill(split).unlink()
            self.tokens[split] = {side: int(count.sum()) for side, count in counts.items()}
            unknown = {side: tokenizers[side].unk_token_id for side in counts}
            self.unknown[split] = {
                side: 0 if unknown[side] is None else int(count[unknown[side]])
                for side, count in counts.items()
            }
            if split == "train":
                self.save_frequencies(counts)
        self.save_tokenizer(source, "tokenizer", learned=learned)
        if target is not source:
            self.save_tokenizer(target, "target_tokenizer", learned=learned)
        self.tokenizers = {
            "vocabulary": {
                "kind": "joint" if target is source else "separate",
                **{side: vocabulary_size(tokenizer) for side, tokenizer in tokenizers.items()},
            },
            "processing": self._processing(source),
        }

    def _write_split(
        self, split: str, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Write the token ids of a split; returns how often each type occurs in it."""
        options = self.processing
        held_out = {"train": True, "valid": options.holdout, "test": options.holdout_test}
        limits = (options.max_pieces, options.max_piece_ratio) if held_out[split] else (0, 0.0)
        tokens = [PairTokens(pair, source, target) for pair in self.pairs]
        counts = {
            "source": np.zeros(vocabulary_size(source), dtype=np.int64),
            "target": np.zeros(vocabulary_size(target), dtype=np.int64),
        }
        with (
            ArrowFile(self.folder / f"{split}.arrow", schema(split)) as file,
            self.bars.bar(f"writing {split}", self.sizes[split]) as advance,
        ):
            for batch in read_batches(self.spill(split), _CHUNK):
                ids: dict[str, list[list[int]]] = {"source": [], "target": []}
                wanted = []
                encoded = _encoded(batch, tokens)
                for pair in batch["pair"].to_pylist():
                    one, other = next(encoded[pair])
                    lengths = len(one) - tokens[pair].around, len(other) - 1  # the text alone
                    reason = _objection(lengths, *limits)
                    wanted.append(reason is None)
                    if reason:
                        self.dropped[split][reason] += 1
                    else:
                        ids["source"].append(one)
                        ids["target"].append(other)
                for side, count in counts.items():
                    flat = np.fromiter(chain.from_iterable(ids[side]), dtype=np.int64)
                    count += np.bincount(flat, minlength=len(count))
                rows = batch.filter(pa.array(wanted))
                texts = () if split == "train" else self._shown(rows)
                file.add([ids["source"], ids["target"], rows["pair"], *texts])
                advance(batch.num_rows)
        self.sizes[split] = file.rows
        return counts

    def _shown(self, rows: pa.RecordBatch) -> list[list[str]]:
        """The lines of both sides; detokenized if the text was published in tokens."""
        text = self.processing.text
        sources, targets = rows["source_text"].to_pylist(), rows["target_text"].to_pylist()
        if text.tokenized:
            pairs = [self.pairs[number] for number in rows["pair"].to_pylist()]
            pipelines = [pipeline_for(text, pair.source, pair.target) for pair in pairs]
            sources = [p.restore_source(line) for p, line in zip(pipelines, sources, strict=True)]
            targets = [p.restore(line) for p, line in zip(pipelines, targets, strict=True)]
        return [sources, targets]

    # -------------------------------------------------------------- the end

    def write_manifest(self, inputs: Sequence[Mapping[str, str]], notes: Sequence[str]) -> None:
        """Write what the folder holds; this is the last file."""
        manifest = {
            "pairs": [pair.entry() for pair in self.pairs],
            "text": self.processing.text.model_dump(),
            **self.tokenizers,
            "read": dict(self.read),
            "dropped": {split: dict(sorted(n.items())) for split, n in self.dropped.items()},
            "found": {split: dict(sorted(n.items())) for split, n in self.found.items()},
            "overlap": self.overlap,
            "notes": list(notes),
            "sizes": {split: self.sizes[split] for split in SPLITS},
            "tokens": self.tokens,
            "unknown": self.unknown,
            "inputs": list(inputs),
        }
        seal(self.folder, manifest)

    def _processing(self, tokenizer: Any) -> dict[str, Any]:
        """What was done, without the paths of files."""
        document = self.processing.model_dump(include=set(Processing.model_fields) - {"text"})
        for option in ("codes", "sentencepiece"):
            if document[option] is not None:
                path = Path(document[option]).expanduser()
                document[option] = {"file": path.name, "sha256": sha256(path)}
        if document["tokenizer"] is not None:
            name = Path(document["tokenizer"]).expanduser().name
            document["tokenizer"] = {"folder": name, "vocabulary": vocabulary_digest(tokenizer)}
        return document


def _encoded(
    batch: pa.RecordBatch, tokens: Sequence[PairTokens]
) -> list[Iterator[tuple[list[int], list[int]]]]:
    """The ids of both sides of the sentence pairs of each direction, in their order."""
    encoded: list[Iterator[tuple[list[int], list[int]]]] = []
    for number, direction in enumerate(tokens):
        mine = batch.filter(pa.array(batch["pair"].to_numpy() == number))
        sources = direction.sources(mine["source"].to_pylist())
        targets = direction.targets(mine["target"].to_pylist())
        encoded.append(zip(sources, targets, strict=True))
    return encoded


def _objection(lengths: tuple[int, int], longest: int, ratio: float) -> str | None:
    """Why a training pair of these lengths is dropped, or None."""
    if longest and max(lengths) > longest:
        return "too long"
    if ratio and max(lengths) / max(1, min(lengths)) > ratio:
        return "length ratio"
    return None


def summarize(prepared: Prepared, tokenizer: str | None = None, preset: str | None = None) -> None:
    """Print how many pairs were kept, where they are, and the command that trains on them.

    The recipe is that of the preset, or for the pre-trained model in the folder ``tokenizer``.
    """
    manifest, console = prepared.manifest, Console(highlight=False, soft_wrap=True)
    table = Table("split", "read", "dropped", "kept", "source tokens", "target tokens", box=None)
    table.add_column("unknown", no_wrap=True)
    for split in SPLITS:
        dropped = ", ".join(f"{n} {reason}" for reason, n in manifest["dropped"][split].items())
        tokens, unknown = manifest["tokens"][split], manifest["unknown"][split]
        table.add_row(
            split,
            str(manifest["read"].get(split, "held out")),
            dropped or "0",
            str(manifest["sizes"][split]),
            *map(str, tokens.values()),
            "/".join(f"{unknown[side] / tokens[side]:.2%}" for side in tokens),
        )
    console.print(table)
    vocabulary = manifest["vocabulary"]
    sizes = [vocabulary["source"]] + [vocabulary["target"]] * (vocabulary["kind"] == "separate")
    console.print(f"vocabulary: {vocabulary['kind']}, {' and '.join(map(str, sizes))} types")
    if prepared.text.moses:
        languages = {name for pair in prepared.pairs for name in (pair.source, pair.target)}
        for language in sorted(languages_without_moses_rules(languages)):
            console.print(f"Moses has no rules for {language}: those for English were used")
    for line in chain(_first_pairs(prepared), _observations(manifest)):
        console.print(printable(line), markup=False)
    for split, counts in manifest["overlap"].items():
        size = manifest["sizes"][split]
        shares = ", ".join(f"{n / size:.1%} of the {what}s" for what, n in counts.items())
        line = f"{split}: also in train: {shares}"
        if any(counts.values()):
            notice(f"warning: {line}")
        else:
            console.print(line)
    recipe, settings = RECIPES.get(preset, "translation"), []
    if tokenizer is not None:
        recipe, settings = "translation-sft", [f"model.pretrained={shlex.quote(tokenizer)}"]
    elif vocabulary["kind"] == "separate":
        settings = ["model.embeddings=decoder"]
    print_ready(console, prepared.path, recipe, *settings)


def _observations(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What is known of the quality of the data: a line for each fact."""
    yield from (f"note: {note}" for note in manifest["notes"])
    for split in SPLITS:
        if suspicious := manifest["found"][split]:
            counts = ", ".join(f"{n} {reason}" for reason, n in suspicious.items())
            names = [name for name, reason in DROPPED.items() if reason in suspicious]
            cure = f"; --drop {','.join(names)} drops them" if split == "train" else ""
            yield f"{split}: kept, but suspicious: {counts}{cure}"


def _first_pairs(prepared: Prepared) -> Iterator[str]:
    """The first validation pair of each direction, with the names of the languages."""
    split = prepared.split("valid")
    for number, pair in enumerate(prepared.pairs):
        for row in np.flatnonzero(split.pair == number)[:1].tolist():
            sides = (pair.source, split.source_text(row)), (pair.target, split.target_text(row))
            for language, text in sides:
                shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
                yield f"{language_name(language)}: {shown}"
