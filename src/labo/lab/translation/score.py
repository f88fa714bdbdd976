"""Given translations and other test sets: ``labo score`` and ``labo evaluate --source``.

Lines are processed as in training. The probability of a translation is that of its tokens and of
the end of the sentence, given the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import RequestError
from ..run.progress import notice
from ..text.arrow import IGNORED
from ..text.batching import in_batches, padded_rows
from ..text.forced import TokenScore, log_probabilities, mean_metrics, piece_statistics
from ..text.head import Head
from ..text.options import ScoreOptions
from ..text.records import read_lines
from ..text.stdio import write_records
from . import bleu
from .batches import forced
from .translate import Translator

_LINES_AT_ONCE = 2000
_COMET = "unbabel-comet"


@dataclass(frozen=True)
class PairScore(TokenScore):
    """What a model gives a translation, ``</s>`` last, with the statistics of each token."""

    statistics: dict[str, torch.Tensor]


@torch.inference_mode()
def score_pairs(
    translator: Translator, sources: Sequence[str], targets: Sequence[str], *, first_line: int = 1
) -> list[PairScore]:
    """The score of each translation of a source, given as raw text."""
    pipeline, positions = translator.pipeline, translator.positions
    given = translator.tokens.sources([pipeline.source(line) for line in sources])
    wanted = translator.tokens.targets([pipeline.target(line) for line in targets])
    pairs = list(zip(given, wanted, strict=True))
    limits = {"source": positions, "target": positions - len(translator.start) + 1}
    for number, pair in enumerate(pairs, first_line):
        for (side, limit), ids in zip(limits.items(), pair, strict=True):
            if len(ids) > limit:
                raise RequestError(
                    f"line {number}: the {side} has {len(ids)} tokens, the model takes {limit}"
                )
    return in_batches(
        lambda batch: _score(translator, [pairs[i] for i in batch]),
        [max(map(len, pair)) for pair in pairs],
    )


def _score(translator: Translator, pairs: Sequence[tuple[list[int], list[int]]]) -> list[PairScore]:
    model = translator.model
    pad, device = model.config.pad_token_id, model.device
    source, target = (padded_rows(side, pad) for side in zip(*pairs, strict=True))
    start = torch.tensor([translator.start] * len(pairs))
    inputs, labels = forced(source, target, start, pad)
    inputs, labels = inputs.to(device), labels.to(device)
    real = labels != IGNORED
    head: Head = translator.network(inputs.source, inputs.mask, inputs.prefix)
    lengths, temperature = real.sum(-1).tolist(), translator.temperature
    rows = piece_statistics(head.at(real), labels[real], lengths, temperature)
    names = translator.target_tokenizer.convert_ids_to_tokens
    return [
        PairScore(tuple(names(ids)), log_probabilities(row, temperature), row)
        for (_, ids), row in zip(pairs, rows, strict=True)
    ]


# ------------------------------------------------------------------ files


def _read_sides(source: str | Path, target: str | Path) -> tuple[list[str], list[str]]:
    sides = list(read_lines(Path(source))), list(read_lines(Path(target)))
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise RequestError(
            f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}: as many lines "
            "are needed, and at least one"
        )
    return sides


def score_command(
    run: Path, files: Sequence[str], options: ScoreOptions, source: BinaryIO, target: BinaryIO
) -> None:
    """``labo score``: each line of a file as a translation of that line of another."""
    if len(files) != 2:
        raise RequestError("the score of a translation needs two files: SOURCE TARGET")
    sources, targets = _read_sides(*files)
    translator = Translator(run, pair=options.pair, notice=notice)
    for first in range(0, len(sources), _LINES_AT_ONCE):
        part = slice(first, first + _LINES_AT_ONCE)
        scores = score_pairs(translator, sources[part], targets[part], first_line=first + 1)
        numbered = enumerate(scores, first + 1)
        write_records((s.record(line=line, tokens=options.tokens) for line, s in numbered), target)


def evaluate_files(
    run: str | Path,
    source: str | Path,
    reference: str | Path,
    *,
    pair: str | None = None,
    comet: str | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Translate a file and compare the translations with references.

    BLEU, chrF, tokenized BLEU, the score of a COMET model if one is named, the mean NLL of the
    reference tokens and what else :func:`labo.lab.text.forced.mean_metrics` has; and the signature
    of each score that has one.
    """
    sources, references = _read_sides(source, reference)
    translator = Translator(run, pair=pair, notice=notice)
    pipeline = translator.pipeline
    hypotheses, plain = translator.translate(sources), references
    if pipeline.options.tokenized:  # as the corpus was, so that the references are as well
        plain = [pipeline.restore(line) for line in references]
    scores = bleu.scores_with_tokens(hypotheses, plain, [pipeline] * len(plain))
    signatures = bleu.signatures(pipeline.options.lowercase)
    if comet is not None:
        scores["comet"], signatures["comet"] = _comet(comet, sources, hypotheses, plain)
    forced = score_pairs(translator, sources, references)
    return scores | mean_metrics([score.statistics for score in forced]), signatures


def _comet(
    model: str, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> tuple[float, str]:
    """The system score of a COMET model, and what names it."""
    try:
        from comet import __version__, download_model, load_from_checkpoint
    except ImportError as error:
        raise RequestError(f"--comet needs a package: pip install {_COMET}") from error
    loaded: Any = load_from_checkpoint(model if Path(model).is_file() else download_model(model))
    rows = [
        {"src": source, "mt": hypothesis, "ref": reference}
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    predicted = loaded.predict(rows, batch_size=16, gpus=int(torch.cuda.is_available()))
    return float(predicted.system_score), f"model:{Path(model).name}|version:{__version__}"
