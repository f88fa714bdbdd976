"""Translate raw text: one line of output for each line of input.

:class:`Translator` is for use from Python. ``labo translate`` is :func:`translate_stream`, which
reads and writes up to two thousand lines at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field
from transformers import PreTrainedTokenizerFast

from ..errors import RequestError
from ..run.calibration import divisor_of
from ..run.files import Document, checked
from ..run.progress import Advance, notice
from ..tasks import find_model
from ..text.folder import load_tokenizer
from ..text.model import to_accelerator
from ..text.stdio import Notice, answer_lines, json_line
from ..text.subwords import panics_refused
from .decoding import Hypothesis, decode
from .framing import PairTokens, folder_tokenizers
from .model import (
    EncoderDecoder,
    check_tokens,
    load_translator,
    positions_of,
    start_tokens,
    translation_config,
)
from .options import Decode
from .prepared import Pair
from .text import Pipeline, TextOptions

_LONGEST_LINE = 20_000  # characters; the time that cleaning takes grows with their square


@dataclass(frozen=True)
class Translation:
    """One translation of a line.

    Attributes:
        text: detokenized, without line breaks.
        score: as in :class:`labo.lab.translation.decoding.Hypothesis`.
        tokens: what the model said, ``</s>`` last unless it was cut off.
        probabilities: what it gave each token; calibrated if the model is.
    """

    text: str
    score: float
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]


_NOTHING = Translation("", 0.0, (), ())


class _Facts(Document):
    """What ``config.json`` of a translation model has under "labo"."""

    pairs: list[Pair] = Field(min_length=1)
    text: TextOptions
    decode: Decode


class ModelFolder:
    """The trained translation model of a run, given by its run directory or by the folder itself.

    Attributes:
        path: the folder: ``best`` of a run, or a copy of it.
        pairs: the directions it translates in.
        text: what is done to a line before and after.
        decode: the search it was trained to be used with.
        pretrained: whether the model started from a pre-trained one, whose tokenizer it has.
        temperature: what its logits are divided by for calibrated probabilities, see
            ``labo calibrate``; 1 if it has none, or if that is folded into the model.
    """

    def __init__(self, run: str | Path) -> None:
        self.path, facts = find_model(run, "translation")
        known = checked(facts, _Facts, self.path / "config.json", "labo.")
        self.pairs, self.text, self.decode = known.pairs, known.text, known.decode
        self.pretrained = self.pairs[0].frame is not None
        self.temperature = divisor_of(self.path)

    def load(self) -> EncoderDecoder:
        """The model, on the CPU and in evaluation mode."""
        return load_translator(self.path, whole=not self.pretrained)

    def tokenizers(self) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
        """The tokenizers of source and target; the same object for a joint vocabulary."""
        if self.pretrained:
            return folder_tokenizers(self.path)
        config = translation_config(self.path)
        sizes = config.vocab_size, getattr(config, "decoder_vocab_size", config.vocab_size)
        source = target = load_tokenizer(self.path, sizes[0])
        second = self.path / "target_tokenizer"
        if second.is_dir() or sizes[0] != sizes[1]:
            target = load_tokenizer(second, sizes[1])
        check_tokens(self.path, config, target)
        return source, target

    def pair(self, name: str | None) -> Pair:
        """A direction by its name, such as de-en, or by its source language alone."""
        known = [str(pair) for pair in self.pairs]
        if name is None:
            if len(self.pairs) == 1:
                return self.pairs[0]
            raise RequestError(f"{self.path} translates {', '.join(known)}: choose with --pair")
        chosen = [pair for pair in self.pairs if name in (str(pair), pair.source)]
        if len(chosen) != 1:
            raise RequestError(f"--pair {name}: {self.path} translates {', '.join(known)}")
        return chosen[0]


class Translator:
    """A trained model, ready to translate.

    Args:
        run: a run directory, or a model folder.
        pair: such as ``de-en``, for a model with several directions.
        notice: called with a sentence when a line had to be changed to be translated.
        search: options of :class:`labo.lab.translation.decoding.Decode`; those that are missing or
            None are taken from the recipe.

    Example::

        Translator("runs/cldr-labo-s0", beam=1).translate(["3. Mai 2021"])
    """

    def __init__(
        self,
        run: str | Path,
        *,
        pair: str | None = None,
        notice: Notice = warnings.warn,
        **search: Any,
    ) -> None:
        folder = ModelFolder(run)
        chosen = folder.pair(pair)
        self.options = folder.decode.changed(search)
        self.temperature = folder.temperature
        self.notice = notice
        self.pipeline = Pipeline(folder.text, chosen.source, chosen.target)
        self.network = folder.load()
        self.model = self.network.plain()
        self.tokenizer, self.target_tokenizer = folder.tokenizers()
        self.tokens = PairTokens(chosen, self.tokenizer, self.target_tokenizer)
        self.start = start_tokens(self.model.config, chosen)
        self.positions = positions_of(self.model.config)
        to_accelerator(self.network)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """The best translation of each line; that of an empty line is empty."""
        return [best.text for (best,) in self.nbest(lines, 1)]

    def nbest(
        self,
        lines: Sequence[str],
        number: int,
        *,
        first_line: int = 1,
        advance: Advance | None = None,
    ) -> list[list[Translation]]:
        """The best translations of each line, best first; those of an empty line are empty.

        Args:
            lines: raw text.
            number: of translations of each line, at most the beam.
            first_line: the number of the first line, for notices.
            advance: called with the number of lines after each batch.
        """
        cut = [self._within_limit(line, first_line + i) for i, line in enumerate(lines)]
        texts = [self.pipeline.source(line) for line in cut]
        wanted = [index for index, text in enumerate(texts) if text]
        encoded = self.tokens.sources([texts[index] for index in wanted])
        if advance is not None:
            advance(len(lines) - len(wanted))
        decoded = decode(
            self.model,
            [
                self._within_positions(ids, first_line + index)
                for index, ids in zip(wanted, encoded, strict=True)
            ],
            self.options,
            start=self.start,
            nbest=number,
            temperature=self.temperature,
            advance=advance,
        )
        translations = [[_NOTHING] * number for _ in lines]
        for index, hypotheses in zip(wanted, decoded, strict=True):
            translations[index] = [self._translation(hypothesis) for hypothesis in hypotheses]
        return translations

    def _within_limit(self, line: str, number: int) -> str:
        if len(line) <= _LONGEST_LINE:
            return line
        self.notice(
            f"line {number} has {len(line)} characters, of which the first {_LONGEST_LINE} are "
            "translated"
        )
        return line[:_LONGEST_LINE]

    def _within_positions(self, ids: list[int], line: int) -> list[int]:
        if len(ids) <= self.positions:
            return ids
        self.notice(
            f"line {line} has {len(ids)} tokens, the model takes {self.positions}: the rest is "
            "left out"
        )
        return self.tokens.cut(ids, self.positions)

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        tokenizer = self.target_tokenizer
        with panics_refused():
            said = str(tokenizer.decode(list(hypothesis.ids), skip_special_tokens=True))
            tokens = tokenizer.convert_ids_to_tokens(list(hypothesis.ids))
        return Translation(
            # A model of bytes can produce any of the characters that end a line.
            " ".join(self.pipeline.restore(said).splitlines()),
            hypothesis.score,
            (*tokens, *[tokenizer.eos_token] * hypothesis.ended),
            hypothesis.probabilities,
        )


# ------------------------------------------------------------------ the command


def translate_stream(
    run: str | Path,
    source: BinaryIO,
    target: BinaryIO,
    *,
    pair: str | None = None,
    nbest: int | None = None,
    scores: bool = False,
    **search: Any,
) -> None:
    """``labo translate``: lines in, lines out, as :func:`labo.lab.text.stdio.answer_lines` does it.

    Sentences longer than the model are cut, with a notice on stderr. ``nbest`` writes so many
    translations of each line, each after its line number and score; ``scores`` writes JSON, with
    the probability of each token.
    """
    translator = Translator(run, pair=pair, notice=notice, **search)
    if (nbest or 1) > translator.options.beam:
        raise RequestError(f"--nbest {nbest} is more than the beam of {translator.options.beam}")

    def answer(lines: Sequence[str], first: int, advance: Advance) -> Iterator[str]:
        answers = translator.nbest(lines, nbest or 1, first_line=first, advance=advance)
        for number, translations in enumerate(answers, first):
            for one in translations:
                if scores:
                    yield json_line({"line": number, **asdict(one)})
                else:
                    yield f"{number}\t{one.score:.4f}\t{one.text}" if nbest else one.text

    answer_lines(source, target, answer)
