"""SentencePiece models, read without the ``sentencepiece`` package.

A model file is a protocol buffer with the pieces and their scores, the kind of model and the
normalization of text. Only these are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DataError
from ..run.files import read_bytes
from .subwords import SPECIAL_TOKENS, finish_tokenizer, panics_refused
from .token_text import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_LARGEST = 1 << 28  # bytes of a file
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}
_UNKNOWN_PENALTY = 10.0  # as in sentencepiece: below the lowest score


@dataclass(frozen=True)
class PieceModel:
    """What is used of a model.

    Attributes:
        pieces: text and score, without control tokens.
        normalization: the compiled table that text is normalized with; may be empty.
        prefix: whether a space is put before a text.
        single_spaces: whether spaces are removed at both ends, and several made one.
    """

    kind: Literal["unigram", "bpe"]
    pieces: tuple[tuple[str, float], ...]
    normalization: bytes
    prefix: bool
    single_spaces: bool


def read_sentencepiece(path: Path) -> PieceModel:
    """A model written by ``spm_train``, of the type unigram or bpe."""
    if path.is_file() and path.stat().st_size > _LARGEST:
        raise DataError(f"{path}: too large for a SentencePiece model")
    content = read_bytes(path)
    try:
        return _model(content)
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"{path}: not a SentencePiece model ({error})") from error


def _model(content: bytes) -> PieceModel:
    pieces: dict[str, float] = {}
    kind, options = 1, dict[int, bytes | float]()
    for field, value in _fields(content):
        if field == 1:
            piece = dict(_fields(_part(value)))
            text, score = _part(piece.get(1, b"")).decode(), _number(piece.get(2, 0.0))
            if piece.get(3, _NORMAL) == _BYTE:
                raise ValueError("byte_fallback is not supported")
            if piece.get(3, _NORMAL) in (_NORMAL, _USER_DEFINED) and text:
                pieces.setdefault(text, score)
        elif field == 2:
            kind = int(_number(dict(_fields(_part(value))).get(3, 1)))
        elif field == 3:
            options = dict(_fields(_part(value)))
    if kind not in _KINDS:
        raise ValueError("of the types only unigram and bpe are supported")
    if not pieces:
        raise ValueError("no pieces")
    return PieceModel(
        _KINDS[kind],
        tuple(pieces.items()),
        normalization=_part(options.get(2, b"")),
        prefix=bool(options.get(3, 1)),
        single_spaces=bool(options.get(4, 1)),
    )


def _fields(content: bytes) -> Iterator[tuple[int, bytes | float]]:
    """The fields of a message: number and value."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        wire = key & 7
        value: bytes | float
        if wire == 0:
            value, at = _varint(content, at)
        elif wire == 1:
            value, at = struct.unpack_from("<d", content, at)[0], at + 8
        elif wire == 2:
            size, at = _varint(content, at)
            if at + size > len(content):
                raise ValueError("cut off")
            value, at = content[at : at + size], at + size
        elif wire == 5:
            value, at = struct.unpack_from("<f", content, at)[0], at + 4
        else:
            raise ValueError("an unknown kind of field")
        yield key >> 3, value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number that does not end")


def _part(value: bytes | float) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a text should be")
    return value


def _number(value: bytes | float) -> float:
    if isinstance(value, bytes) or not math.isfinite(value):
        raise ValueError("no number where one should be")
    return float(value)


# ------------------------------------------------------------------ tokenizers


def make_piece_tokenizer(model: PieceModel, tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with the pieces of a model, that ends each text with </s>.

    Ids: the special tokens, the tags, the pieces.
    """
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    reserved = [*SPECIAL_TOKENS, *tags]
    pieces = [(text, score) for text, score in model.pieces if text not in reserved]
    try:
        with panics_refused():
            tokenizer = _unigram(pieces, reserved)
            if model.kind == "bpe":
                tokenizer = _bpe(pieces, reserved)
            steps: list[Any] = []
            if model.normalization:
                steps.append(normalizers.Precompiled(model.normalization))
            if model.single_spaces:
                steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
            tokenizer.normalizer = normalizers.Sequence(steps)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"not a usable SentencePiece model ({error})") from error
    scheme = "always" if model.prefix else "never"
    # What looks like a special token or a tag in a text is split after its first character.
    names = "|".join(re.escape(name[1:]) for name in reserved)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(SPACE, scheme),
            pre_tokenizers.Split(Regex(f"<(?={names})"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
    return finish_tokenizer(tokenizer, tags)


def _unigram(pieces: Sequence[tuple[str, float]], reserved: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models

    lowest = min(score for _, score in pieces) - _UNKNOWN_PENALTY
    vocabulary = [*((name, lowest) for name in reserved), *pieces]
    return Tokenizer(models.Unigram(vocabulary, SPECIAL_TOKENS.index("<unk>"), False))


def _bpe(pieces: Sequence[tuple[str, float]], reserved: Sequence[str]) -> Tokenizer:
    """The merges are not in the file: a piece is made of two others, the best pieces first."""
    from tokenizers import Tokenizer, models

    names = [*reserved, *(text for text, _ in pieces)]
    vocabulary = {name: index for index, name in enumerate(names)}
    known = {text for text, _ in pieces}
    merges = [
        (text[:cut], text[cut:])
        for text, _ in sorted(pieces, key=lambda piece: -piece[1])
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
