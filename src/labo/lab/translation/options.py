"""The options of ``labo prepare`` with its presets, of beam search and of ``labo translate``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..._names import unknown_name
from ..command_options import Separated, validated
from ..config import Names, Section, read_document
from ..errors import RequestError
from ..run.files import checked
from ..text.folder import check_splits
from ..text.subwords import Size
from .prepared import Pair
from .text import TextOptions

_PAIR = re.compile(r"([a-z]{2,3}(?:_\w+)?)-([a-z]{2,3}(?:_\w+)?)")

_WIDEST = 4096  # a beam that is wider must be allowed by batch_tokens

Tag = Literal["source", "target", "none"]

Inputs = Names | dict[str, Names]  # of all pairs, or by language pair
_Listing = Annotated[Names, BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]

# What ``drop`` can name, and the words for it in the counts.
DROPPED = {"duplicates": "duplicate", "copies": "copy", "script": "wrong script"}


def parse_pairs(names: Sequence[str], tag: Tag | None = None) -> list[Pair]:
    """Language pairs, each with the tag that is put before its source sentences.

    A tag names the source or target; by default the target if there are several, else the source if
    there are several.

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


def _option(panel: str, default: Any, description: str | None = None, **limits: Any) -> Any:
    """An option of ``labo prepare`` under a heading of its help."""
    limits |= {"json_schema_extra": {"panel": panel}}
    return Field(default, description=description, **limits)


_files = partial(_option, "Files")
_cleaning = partial(_option, "Cleaning")
_limits = partial(_option, "Limits", ge=0)
_subwords = partial(_option, "Subwords")

MAX_TYPES = 10_000_000
_SUBWORDS = ("vocabulary", "merges", "codes", "sentencepiece", "tokenizer")  # one of them


class Processing(Section):
    """How sentence pairs are cleaned, split and encoded. A limit of 0 means no limit."""

    text: TextOptions = _cleaning(TextOptions())
    train_text: TextOptions | None = None  # if training text is processed differently
    max_characters: int = _limits(
        10_000,
        "Drop training pairs with more characters than this on either side; 0 keeps "
        "all. A longer validation or test line is an error.",
    )
    max_tokens: int = _limits(
        0, "Drop training pairs with more words than this on either side; 0 keeps all."
    )
    max_ratio: float = _limits(
        0.0,
        "Drop training pairs in which one side has more than this many times the words "
        "of the other; 0 keeps all.",
    )
    max_pieces: int = _limits(
        0,
        "Drop training and held-out pairs with more subwords than this on either side; "
        "0 keeps all.",
    )
    max_piece_ratio: float = _limits(
        0.0,
        "Drop training and held-out pairs in which one side has more than this many "
        "times the subwords of the other; 0 keeps all.",
    )
    holdout: int = _files(
        0,
        "Use every N-th group of cleaned training pairs for validation, or every N-th "
        "pair with --holdout-by pair; 0 holds out none.",
        ge=0,
    )
    holdout_test: int = _files(
        0, "Use every N-th group or pair of the remaining ones for testing; 0 holds out none.", ge=0
    )
    holdout_by: Literal["group", "pair"] = _files(
        "group",
        "What is held out: group (pairs that share a source or target sentence stay "
        "together; groups of more than N pairs stay in training) or pair (as the presets iwslt14 "
        "and wmt14 do). Default: group, or as in the preset.",
    )
    drop: Separated = _cleaning(
        (),
        "Training pairs to drop: duplicates (the same pair again), copies (source and "
        "target are equal), script (most letters of a side are not in the script of its "
        "language), separated by commas. They are counted in any case.",
    )
    vocabulary: int | None = _subwords(
        None, "Size of the vocabulary, special tokens included. Default: 10000.", ge=1, le=MAX_TYPES
    )
    merges: int | None = _subwords(
        None, "Number of byte-pair merges, instead of --vocabulary.", ge=0, le=MAX_TYPES
    )
    codes: str | None = _subwords(None, "File of merges from subword-nmt, instead of --vocabulary.")
    sentencepiece: str | None = _subwords(
        None,
        "SentencePiece model of the type unigram or bpe, instead of --vocabulary; "
        "spm_train makes one.",
    )
    tokenizer: str | None = _subwords(
        None, "Use the tokenizer of this Hugging Face folder, for model.pretrained."
    )
    prefix: str = _subwords(
        "",
        "With --tokenizer: text before each source sentence, such as 'translate German "
        "to English: ' for T5. {source} and {target} stand for the languages.",
    )
    share: Literal["all", "merges", "nothing"] = _subwords(
        "all",
        "What the two languages share: all (one vocabulary, the default), merges (one "
        "set of merges, two vocabularies) or nothing.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Processing:
        sizes = [f"--{name}" for name in _SUBWORDS if getattr(self, name) is not None]
        if len(sizes) > 1:
            raise ValueError(f"{' and '.join(sizes)} exclude each other")
        if self.codes is not None and not self.text.spaced:
            raise ValueError("--codes split tokens: they need --moses, or text that is --tokenized")
        if self.codes is not None and self.share == "nothing":
            raise ValueError("--codes are for both sides: --share can be all or merges")
        for name in ("sentencepiece", "tokenizer"):
            if getattr(self, name) is not None and self.share != "all":
                raise ValueError(f"--{name} is for both sides: --share must be all")
        if self.tokenizer is not None and self.text.spaced:
            raise ValueError("--tokenizer takes running text, without --moses or --tokenized")
        if self.prefix and self.tokenizer is None:
            raise ValueError("--prefix: only with --tokenizer")
        if self.training_text.spaced != self.text.spaced:
            raise ValueError("train_text and text must both be in tokens, or neither")
        if unknown := set(self.drop) - set(DROPPED):
            raise ValueError(f"--drop: {sorted(unknown)[0]} is none of {', '.join(DROPPED)}")
        if 1 in (self.holdout, self.holdout_test):
            raise ValueError("--holdout: every pair held out leaves none to train on")
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
    """All options of ``labo prepare``."""

    pair: Names = _files((), "Source and target language, such as de-en. Can be repeated.")
    train: Inputs = _files(
        (),
        "Training text: PREFIX for the files PREFIX.de and PREFIX.en, SOURCE,TARGET "
        "for two files, a CSV, JSONL or Parquet file or a folder of datasets with named columns, "
        "or one tab-separated file. Plain text, .gz, .xml and .sgm are read. {pair}, {source} and "
        "{target} stand for the languages. Can be repeated.",
    )
    valid: Inputs = _files((), "Validation text, given like --train.")
    test: Inputs = _files((), "Test text, given like --train.")
    columns: Separated = _files(
        ("source", "target"),
        "Columns of a tab-separated file, in order (default: source,target), or the "
        "names of named columns: source=NAME,target=NAME or de=NAME,en=NAME (default: the "
        "languages, or source and target).",
    )
    tag: Tag | None = _files(
        None,
        "Language that a tag before each source sentence names: source, target or none. Default: "
        "the target if there are several, else the source if there are several.",
    )
    join_subwords: bool = _cleaning(
        False, "Join subwords that are marked with @@ or ▁ before everything else."
    )
    force_raw: bool = _cleaning(
        False, "Take the text as running text although it looks tokenized or split into subwords."
    )

    @model_validator(mode="after")
    def _has_splits(self) -> PrepareOptions:
        parse_pairs(self.pair, self.tag)
        check_splits(self)
        if self.force_raw and (self.text.tokenized or self.join_subwords):
            raise ValueError("--force-raw excludes --tokenized and --join-subwords")
        return self

    def inputs(self, split: str, pair: Pair) -> Sequence[str]:
        """The names of the inputs of a split for a language pair."""
        names: Inputs = getattr(self, split)
        return names.get(str(pair), ()) if isinstance(names, Mapping) else names


class _Listed(Section):
    """The inputs of a language pair in a YAML file, each an input or a list of them."""

    train: _Listing = ()
    valid: _Listing = ()
    test: _Listing = ()


def read_inputs(path: str | Path) -> dict[str, Any]:
    """The settings ``pair``, ``train``, ``valid`` and ``test`` from a YAML file.

    The file has a section for each language pair, with the inputs of each split::

        de-en:
          train: [europarl.de-en, "news.german,news.english"]
          valid: dev.csv

    Relative names start at the folder of the file.
    """
    path = Path(path).expanduser()
    listed = {
        str(pair): checked(section, _Listed, path, f"{pair}.")
        for pair, section in read_document(path).items()
    }
    settings: dict[str, Any] = {"pair": list(listed)}
    for split in _Listed.model_fields:
        inputs = {pair: getattr(section, split) for pair, section in listed.items()}
        missing = [pair for pair, names in inputs.items() if not names]
        if len(missing) == len(listed):
            continue
        if missing:
            raise RequestError(f"{path}: {missing[0]} has no {split}, but another pair has")
        settings[split] = {
            pair: [
                ",".join(str(path.parent / Path(part).expanduser()) for part in name.split(","))
                for name in names
            ]
            for pair, names in inputs.items()
        }
    return settings


# The public recipes of the paper's experiments. Two of them process training text differently.
PREPARE_PRESETS: dict[str, dict[str, Any]] = {
    "iwslt14": {
        "text": {"moses": True, "straight_apostrophes": True, "lowercase": True},
        "train_text": {"moses": True, "lowercase": True},
        "max_tokens": 175,
        "max_ratio": 1.5,
        "holdout": 23,
        "holdout_by": "pair",
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
        "holdout_by": "pair",
        "merges": 40_000,
    },
    "multi30k": {
        "text": {"moses": True, "normalize_punctuation": True, "lowercase": True},
        "merges": 10_000,
    },
}


# Preset -> the recipe that trains on data prepared with it.
RECIPES: dict[str | None, str] = {name: name for name in PREPARE_PRESETS}
RECIPES["iwslt17"] = "iwslt17_multi"


def choose(preset: str | None, settings: Mapping[str, Any]) -> PrepareOptions:
    """The options of a preset, with changes: fields of :class:`PrepareOptions` and TextOptions.

    None keeps what the preset says.
    """
    if preset is not None and preset not in PREPARE_PRESETS:
        raise RequestError(unknown_name("preset", preset, PREPARE_PRESETS))
    values = dict(PREPARE_PRESETS[preset]) if preset else {}
    given = {name: value for name, value in settings.items() if value is not None}
    text = {name: given.pop(name) for name in TextOptions.model_fields if name in given}
    if given.keys() & set(_SUBWORDS):
        values = {k: v for k, v in values.items() if k not in ("vocabulary", "merges")}
    if given.get("valid") and "holdout" not in given:
        values.pop("holdout", None)
    if text.get("tokenized") and not text.get("moses"):  # instead of the preset's tokenizer
        text = {"moses": False, "aggressive_hyphens": False} | text
    # Training text keeps its apostrophes: straight ones are for the text that is translated.
    plain = {name: value for name, value in text.items() if name != "straight_apostrophes"}
    values["train_text"] = {**values.get("train_text", values.get("text", {})), **plain}
    values["text"] = {**values.get("text", {}), **text}
    return validated(PrepareOptions, values | given)


# ------------------------------------------------------------------ translating


class Decode(Section):
    """Beam search. Lengths include ``</s>`` and are limited by the positions of the model."""

    beam: int = Field(5, ge=1, description="Hypotheses kept at each step.")
    length_penalty: float = Field(
        1.0,
        ge=0,
        le=100,
        description="A hypothesis scores its log-probability divided by its length to this power. "
        "Larger values favor longer outputs.",
    )
    min_length: int = Field(
        1,
        ge=0,
        description="The shortest output in tokens, without `</s>`; 1, as in fairseq, forbids an "
        "empty output.",
    )
    max_ratio: float = Field(
        1.5,
        ge=0,
        description="The longest output has `max_ratio` times the tokens of the source, plus "
        "`max_extra`.",
    )
    max_extra: int = Field(20, ge=1, description="See `max_ratio`.")
    batch_tokens: int = Field(
        4096, ge=1, description="The largest batch: sentences times longest source times beam."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Decode:
        if self.beam > max(self.batch_tokens, _WIDEST):
            raise ValueError(
                f"a beam of {self.beam} needs batch_tokens (--batch-tokens) of at least as many, "
                f"and the memory for it"
            )
        if self.min_length > self.max_extra:
            raise ValueError("min_length must not be larger than max_extra")
        return self

    def with_beam(self, beam: int) -> Decode:
        """The same search with another beam."""
        return self.changed({"beam": beam})

    def changed(self, settings: Mapping[str, Any]) -> Decode:
        """The same search with other settings; None leaves one as it is."""
        given = {name: value for name, value in settings.items() if value is not None}
        return validated(Decode, self.model_dump() | given)


def _as_in_recipe(name: str) -> Any:
    """An option with the name and description of a field of :class:`Decode`."""
    described = Decode.model_fields[name].description
    return Field(None, description=f"{described} Default: as in the recipe.")


class TranslateOptions(Section):
    """The options of ``labo translate``."""

    pair: str | None = Field(
        None,
        description="Language pair of a model with several, such as de-en. One language is enough "
        "if it identifies the pair.",
    )
    beam: int | None = _as_in_recipe("beam")
    length_penalty: float | None = _as_in_recipe("length_penalty")
    batch_tokens: int | None = _as_in_recipe("batch_tokens")
    nbest: int | None = Field(
        None,
        ge=1,
        description="Write this many lines per input line: NUMBER<tab>SCORE<tab>TEXT.",
    )
    scores: bool = Field(
        False,
        description="Write JSON lines with line, text, score, tokens and token probabilities.",
    )


class OtherTestSet(Section):
    """The options of ``labo evaluate`` that are for translation only."""

    source: str | None = Field(
        None,
        description="Translation: text file of another test set, used with --reference.",
    )
    reference: str | None = Field(
        None, description="Translation: a reference for each line of --source."
    )
    pair: str | None = Field(
        None, description="Language pair of --source, if the model has several."
    )
    comet: str | None = Field(
        None,
        description="Score --source with this COMET model too: a checkpoint file, or a name that "
        "the package unbabel-comet knows.",
    )
