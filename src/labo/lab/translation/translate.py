"""Raw text in, translated text out: one line for each, whatever is in it.

:class:`Translator` is the way in from Python; ``labo translate`` is :func:`translate_stream`, which
reads and writes a few thousand lines at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from transformers import MarianMTModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..config import explain
from ..errors import RequestError
from ..run.calibration import divisor_of
from ..tasks import find_model
from ..text.stdio import Answer, Notice, answer_lines
from ..text.subwords import encode
from .decoding import Decode, Hypothesis, decode
from .prepared import Pair
from .text import Pipeline, TextOptions


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


@dataclass(frozen=True)
class ModelFolder:
    """A trained translation model as it lies on the disk, with what labo knows of it.

    Attributes:
        path: the folder: ``best`` of a run, or a copy of it.
        pairs: the directions it translates in.
        text: what is done to a line before and after.
        decode: the search it was trained to be used with.
        temperature: what its logits are divided by for calibrated probabilities, see
            ``labo calibrate``; 1 if it has none, or if that is folded into the model.
    """

    path: Path
    pairs: tuple[Pair, ...]
    text: TextOptions
    decode: Decode
    temperature: float

    @classmethod
    def find(cls, run: str | Path) -> ModelFolder:
        """The model of a run, given by its run directory or by the folder itself.

        Raises:
            RequestError: there is none, or it is no translation model.
        """
        path, facts = find_model(run, "translation")
        try:
            return cls(
                path,
                tuple(Pair(**pair) for pair in facts["pairs"]),
                TextOptions.model_validate(facts["text"]),
                Decode.model_validate(facts["decode"]),
                divisor_of(path),
            )
        except (KeyError, TypeError, ValidationError) as error:
            raise RequestError(f"{path} holds no model this version can load") from error

    def load(self) -> MarianMTModel:
        """The model, on the CPU and in the mode of evaluation."""
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            return MarianMTModel.from_pretrained(self.path, local_files_only=True).eval()
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise RequestError(f"{self.path} holds no model this version can load") from error
        finally:
            if bars:
                logging.enable_progress_bar()

    def tokenizers(self) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
        """Those of source and target: one and the same if the vocabulary is joint."""
        try:
            source = PreTrainedTokenizerFast.from_pretrained(self.path)
            if not (self.path / "target_tokenizer").is_dir():
                return source, source
            return source, PreTrainedTokenizerFast.from_pretrained(self.path / "target_tokenizer")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"{self.path} holds no tokenizer") from error

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
    """A trained run, ready to translate.

    Args:
        run: a run directory, or a model folder itself.
        pair: such as ``de-en``, for a run that translates in several directions.
        notice: called with a line of text when an input could not be translated as it is.
        search: options of :class:`labo.lab.translation.decoding.Decode`; where they are missing or
            None it is as the recipe has it.

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
        folder = ModelFolder.find(run)
        chosen = folder.pair(pair)
        self.options = _with(folder.decode, search)
        self.temperature = folder.temperature
        self.notice = notice
        self.pipeline = Pipeline(folder.text, chosen.source, chosen.target)
        self.tokenizer, self.target_tokenizer = folder.tokenizers()
        self.tag = [self.tokenizer.get_vocab()[chosen.tag]] if chosen.tag else []
        self.model = folder.load()
        if torch.accelerator.is_available():
            self.model.to(torch.accelerator.current_accelerator())

    def translate(self, lines: Sequence[str]) -> list[str]:
        """The best translation of each line; that of an empty line is empty."""
        return [best.text for (best,) in self.nbest(lines, 1)]

    def nbest(
        self,
        lines: Sequence[str],
        number: int,
        *,
        first_line: int = 1,
        advance: Callable[[int], object] | None = None,
    ) -> list[list[Translation]]:
        """The best translations of each line, best first; an empty line has only empty ones.

        Args:
            lines: raw text.
            number: of translations of each line, at most the beam.
            first_line: the number of the first line, for notices.
            advance: called with the number of lines after each batch.
        """
        texts = [self.pipeline.source(line) for line in lines]
        wanted = [index for index, text in enumerate(texts) if text]
        sources = [
            self._within_positions([*self.tag, *ids], first_line + index)
            for index, ids in zip(
                wanted, encode(self.tokenizer, [texts[i] for i in wanted]), strict=True
            )
        ]
        found = [[_NOTHING] * number for _ in lines]
        if advance is not None:
            advance(len(lines) - len(wanted))
        decoded = decode(
            self.model,
            sources,
            self.options,
            nbest=number,
            temperature=self.temperature,
            advance=advance,
        )
        for index, hypotheses in zip(wanted, decoded, strict=True):
            found[index] = [self._translation(hypothesis) for hypothesis in hypotheses]
        return found

    def _within_positions(self, ids: list[int], line: int) -> list[int]:
        positions = self.model.config.max_position_embeddings
        if len(ids) <= positions:
            return ids
        self.notice(
            f"line {line} has {len(ids)} tokens, the model takes {positions}: the rest is left out"
        )
        return [*ids[: positions - 1], ids[-1]]

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        tokenizer = self.target_tokenizer
        said = str(tokenizer.decode(list(hypothesis.ids), skip_special_tokens=True))
        tokens = tokenizer.convert_ids_to_tokens(list(hypothesis.ids))
        return Translation(
            # A model of bytes may say any of the characters that end a line somewhere.
            " ".join(self.pipeline.restore(said).splitlines()),
            hypothesis.score,
            (*tokens, *[tokenizer.eos_token] * hypothesis.ended),
            hypothesis.probabilities,
        )


def _with(decode: Decode, settings: Mapping[str, Any]) -> Decode:
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return Decode.model_validate(decode.model_dump() | given)
    except ValidationError as error:
        raise RequestError("; ".join(explain(error, Decode))) from error


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
    """Translate line by line, from bytes to bytes; a reader that goes away ends it quietly.

    Lines end with a line feed, with or without a carriage return before it. Bytes that are not
    UTF-8 are read as U+FFFD and sentences longer than the model are cut, with a notice on stderr.

    Args:
        run: a run directory or a model folder.
        source: where to read.
        target: where to write.
        pair: see :class:`Translator`.
        nbest: write so many translations of each line, each after its line number and score.
        scores: write JSON, with the probability of each token.
        search: see :class:`Translator`.
    """

    def start(notice: Notice) -> Answer:
        translator = Translator(run, pair=pair, notice=notice, **search)
        if (nbest or 1) > translator.options.beam:
            raise RequestError(
                f"--nbest {nbest} is more than the beam of {translator.options.beam}"
            )

        def answer(lines: Sequence[str], first: int, advance: Callable[[int], object]) -> str:
            found = translator.nbest(lines, nbest or 1, first_line=first, advance=advance)
            return "".join(
                _format(number, translation, nbest is not None, scores) + "\n"
                for number, translations in enumerate(found, first)
                for translation in translations
            )

        return answer

    answer_lines(source, target, start)


def _format(number: int, translation: Translation, numbered: bool, scores: bool) -> str:
    if scores:
        record = {
            "line": number,
            "text": translation.text,
            "score": translation.score,
            "tokens": translation.tokens,
            "probabilities": translation.probabilities,
        }
        return json.dumps(record, ensure_ascii=False)
    if numbered:
        return f"{number}\t{translation.score:.4f}\t{translation.text}"
    return translation.text
