"""Text of a direction to token ids.

The tokenizers that ``labo prepare`` learns end each sentence with ``</s>``. That of a pre-trained
model puts more around a sentence: mBART writes ``x </s> de_DE``, NLLB ``deu_Latn x </s>``, BART
``<s> x </s>``. Marian has other subwords for the target, and may want a tag such as ``>>fra<<``
first. A :class:`labo.lab.translation.prepared.Frame` has the ids that are put around, so that no
setting of the tokenizer matters later.

The tokens before a target are given to the decoder, in training and in decoding: they have no loss
and no probability. What is stored of a target is the text and ``</s>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..._names import unknown_name
from ..errors import RequestError
from ..text.pretrained_tokenizer import pretrained_tokenizer
from ..text.subwords import encode, panics_refused
from .prepared import Frame, Pair

_Argument = Literal["text", "text_target"]  # of a tokenizer: a source, a target


class PairTokens:
    """Sentences of one direction to token ids; ``around`` of them are put around a source."""

    def __init__(self, pair: Pair, source: Any, target: Any) -> None:
        self.pair = pair
        self._source, self._target = source, target
        if pair.frame is None:
            self._tag = [source.convert_tokens_to_ids(pair.tag)] if pair.tag else []
            self.around = len(self._tag) + 1
        else:
            self.around = len(pair.frame.before) + len(pair.frame.after)

    def sources(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of source sentences, with all that belongs around them."""
        frame = self.pair.frame
        if frame is None:
            return [[*self._tag, *ids] for ids in encode(self._source, lines)]
        texts = [frame.prefix + line for line in lines]
        return [
            [*frame.before, *ids, *frame.after] for ids in _plain_ids(self._source, texts, "text")
        ]

    def targets(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of target sentences, </s> last."""
        if self.pair.frame is None:
            return list(encode(self._target, lines))
        end = int(self._target.eos_token_id)
        return [[*ids, end] for ids in _plain_ids(self._target, lines, "text_target")]

    def cut(self, source: Sequence[int], length: int) -> list[int]:
        """The first ids of a source, and what belongs after it."""
        after = 1 if self.pair.frame is None else len(self.pair.frame.after)
        return [*source[: length - after], *source[len(source) - after :]]


def _plain_ids(tokenizer: Any, lines: Sequence[str], side: _Argument) -> list[list[int]]:
    """The ids of lines alone. What looks like a special token is split like any other text."""
    if not lines:
        return []
    with panics_refused():
        encoded = tokenizer(
            **{side: list(lines)},
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
    # The pieces of a unigram model may contain </s> and <pad>. In a text they are unknown.
    reserved = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = [] if tokenizer.unk_token_id is None else [tokenizer.unk_token_id]
    return [
        ids
        if reserved.isdisjoint(ids)
        else [x for i in ids for x in (unknown if i in reserved else [i])]
        for ids in encoded["input_ids"]
    ]


# ------------------------------------------------------------------ pre-trained models


def folder_tokenizers(folder: str | Path) -> tuple[Any, Any]:
    """The tokenizers of source and target of a model folder; mostly the same object."""
    source = pretrained_tokenizer(folder, fast=False)
    if source.pad_token_id is None:
        raise RequestError(f"{folder}: its tokenizer has no token that fills up rows (pad_token)")
    if getattr(source, "separate_vocabs", False):
        raise RequestError(f"{folder}: a tokenizer with two vocabularies (separate_vocabs)")
    second = Path(folder).expanduser() / "target_tokenizer"  # as a run of labo saves it
    return source, pretrained_tokenizer(second, fast=False) if second.is_dir() else source


def frame_pairs(
    pairs: Sequence[Pair], folder: str | Path, source: Any, target: Any, prefix: str = ""
) -> list[Pair]:
    """The directions with the frames of the tokenizers of a model.

    A tokenizer that knows languages is set to those of the first direction. Languages are its
    codes, or the beginning of one, such as de for de_DE. ``prefix`` is put before each source;
    {source} and {target} in it are the languages.
    """
    framed = []
    for pair in [*pairs, pairs[0]]:  # the first again, to leave the tokenizers as it needs them
        tag: list[int] = []
        if hasattr(source, "src_lang"):
            for tokenizer in (source, target):
                tokenizer.src_lang = _language_code(tokenizer, pair.source, folder)
                tokenizer.tgt_lang = _language_code(tokenizer, pair.target, folder)
        elif pair.tag:
            names, vocabulary = (pair.tag, f">>{pair.tag[1:-1]}<<"), source.get_vocab()
            tag = [vocabulary[name] for name in names if name in vocabulary][:1]
            if not tag:
                raise RequestError(
                    f"{folder}: the tokenizer has no tag {' or '.join(names)}; --tag none leaves "
                    "tags out"
                )
        before, after = _around(source, "text", folder)
        target_before, target_after = _around(target, "text_target", folder)
        frame = Frame(
            prefix=prefix.replace("{source}", pair.source).replace("{target}", pair.target),
            before=[*tag, *before],
            after=after,
            target_before=target_before,
            target_after=target_after[1:],
        )
        framed.append(Pair(pair.source, pair.target, frame=frame))
    return framed[:-1]


def _around(tokenizer: Any, side: _Argument, folder: str | Path) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text; </s> is the first after it."""
    (plain,) = _plain_ids(tokenizer, ["a"], side)
    whole = tokenizer(**{side: "a"})["input_ids"]
    for first in range(len(whole) - len(plain) + 1):
        after = whole[first + len(plain) :]
        if whole[first : first + len(plain)] == plain and after[:1] == [tokenizer.eos_token_id]:
            return whole[:first], after
    raise RequestError(f"{folder}: its tokenizer does not end a sentence with eos_token")


def _language_code(tokenizer: Any, language: str, folder: str | Path) -> str:
    codes = list(getattr(tokenizer, "lang_code_to_id", None) or tokenizer.all_special_tokens)
    if language in codes:
        return language
    fitting = [str(code) for code in codes if code.startswith(f"{language}_")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RequestError(f"--pair: {language} is one of {', '.join(fitting)} in {folder}")
    raise RequestError(f"--pair: {unknown_name(f'language of {folder}', language, codes)}")
