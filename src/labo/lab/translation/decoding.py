"""Beam search with ``generate`` of transformers: from source token ids to scored hypotheses.

The search follows fairseq, which the paper used. A sentence is done when ``beam`` hypotheses have
ended. The score of a hypothesis is its log-probability divided by its length to the power of
``length_penalty``; the length counts the closing ``</s>``, and the token that is forced before a
translation if the model has one (the language of mBART-50, M2M100 and NLLB, ``<s>`` of BART). This
is the ``length_penalty`` of ``generate``. An output has at least ``min_length``
tokens before ``</s>``: fairseq's default of 1 forbids an empty output. CTranslate2 searches in the
same way, but gives the probability of forbidden tokens to the others, so that scores differ a
little.

Each sentence has a longest output of its own, so that its translation does not depend on the other
sentences of the batch.

What remains different from fairseq:

- A hypothesis that reaches the longest output stays without ``</s>``. fairseq forces ``</s>`` as
  its last token and counts its probability.
- The longest output is ``max_ratio`` times the source plus ``max_extra``, by default 1.5 and 20.
  fairseq's defaults are ``max_len_a=0`` and ``max_len_b=200``.
- ``<s>`` is never generated. fairseq gives it the probability that the model does.
- Of hypotheses with equal scores another one can be kept, and scores are computed again in one pass
  over each finished hypothesis, so that they agree with fairseq's up to rounding.
- Diverse and constrained search, n-gram blocking and ``unkpen`` are not available.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from ...calibration.folding import evaluating
from ..errors import RequestError
from ..text.batching import in_batches, padded_rows
from .model import positions_of
from .options import Decode

# Logits stored at the same time when hypotheses are scored: 128 MB of float32.
_SCORED_LOGITS = 2**25


@dataclass(frozen=True)
class Hypothesis:
    """One translation: ids without start token and ``</s>``, and the probability of each token.

    The score is the log-probability divided by the length to the power of the length penalty. A
    hypothesis that ended has the probability of ``</s>`` too.
    """

    ids: tuple[int, ...]
    score: float
    probabilities: tuple[float, ...]

    @property
    def ended(self) -> bool:
        """Whether it ended with ``</s>`` and not at the length limit."""
        return len(self.probabilities) > len(self.ids)


def longest_output(
    source_length: int, options: Decode, positions: int, start_length: int = 1
) -> int:
    """The largest number of tokens of a translation, including ``</s>``.

    Each of the ``start_length`` tokens before a translation takes one of the model's positions.

    Example:
        >>> longest_output(10, Decode(), 1024), longest_output(1000, Decode(), 1024)
        (35, 1023)
    """
    longest = int(options.max_ratio * source_length) + options.max_extra
    return min(longest, positions - start_length)


def generation_config(
    options: Decode,
    model: PretrainedConfig,
    *,
    start: Sequence[int] | None = None,
    nbest: int = 1,
    max_length: int | None = None,
) -> GenerationConfig:
    """The options of ``generate``, for :func:`decode` and for the folder of a saved model.

    ``start`` is the start token, and perhaps one that is forced to follow it; by default the start
    token of the model. ``max_length`` counts start and output together; by default it is the
    positions of the model. In a saved file it cannot depend on the source, so that only ``</s>``
    ends a sentence.
    """
    first, *forced = start or (model.decoder_start_token_id,)
    # A beam of 1 has no use for the first two; unset, they would come from the model's own config.
    wide = options.beam > 1
    return GenerationConfig(
        num_beams=options.beam,
        num_return_sequences=nbest,
        length_penalty=options.length_penalty if wide else 1.0,
        early_stopping=wide,
        do_sample=False,
        min_length=1 + len(forced) + options.min_length,  # they count
        max_length=max_length or positions_of(model),
        decoder_start_token_id=first,
        forced_bos_token_id=forced[0] if forced else None,
        bos_token_id=model.bos_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        # What is forced must not be suppressed: then nothing would be left.
        suppress_tokens=[
            token
            for token in (model.bos_token_id, model.pad_token_id)
            if token not in (None, model.eos_token_id, *forced)
        ],
    )


def decode(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    options: Decode,
    *,
    start: Sequence[int] | None = None,
    nbest: int = 1,
    temperature: float = 1.0,
    advance: Callable[[int], object] | None = None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each source, best first, on the device of the model and in eval mode.

    Args:
        model: an encoder-decoder.
        sources: one sequence of token ids per sentence, as the encoder takes them.
        options: the search.
        start: what is given before each translation, see :func:`generation_config`.
        nbest: hypotheses to return per sentence, at most ``options.beam``.
        temperature: the probabilities of the tokens are those of softmax(logits / temperature).
            Search and scores are not changed by it.
        advance: called with the number of sentences after each batch.
    """
    if not 1 <= nbest <= options.beam:
        raise RequestError(f"nbest must be 1 to {options.beam}, the beam size; got {nbest}")
    start = tuple(start or (model.config.decoder_start_token_id,))
    with evaluating(model), torch.inference_mode():
        return in_batches(
            lambda batch: _decode_batch(
                model, [sources[i] for i in batch], options, start, nbest, temperature
            ),
            [len(source) for source in sources],
            options.batch_tokens // options.beam,
            longest_first=True,
            advance=advance,
        )


class _LongestOutputs(StoppingCriteria):  # type: ignore[misc]
    """Ends each sentence of a batch at its own longest output (N,), which counts what is given."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        rows, length = input_ids.shape  # the beams of a sentence are adjacent
        return (length >= self.lengths).repeat_interleave(rows // len(self.lengths))


class _BeamCache(EncoderDecoderCache):  # type: ignore[misc]
    """The cache of a search. All beams of a sentence share the source, which is not reordered."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)


def _decode_batch(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    options: Decode,
    start: tuple[int, ...],
    nbest: int,
    temperature: float,
) -> list[list[Hypothesis]]:
    config, device, given = model.config, model.device, len(start)
    positions = positions_of(config)
    limits = [given + longest_output(len(s), options, positions, given) for s in sources]
    longest = torch.tensor(limits, device=device)
    input_ids = padded_rows(sources, config.pad_token_id).to(device)
    mask = padded_rows([[1] * len(source) for source in sources], 0).to(device)
    encoded: Tensor = model.get_encoder()(input_ids, attention_mask=mask).last_hidden_state
    sequences: Tensor = model.generate(
        encoder_outputs=BaseModelOutput(encoded),  # which is modified
        attention_mask=mask,
        generation_config=generation_config(
            options, config, start=start, nbest=nbest, max_length=max(limits)
        ),
        stopping_criteria=StoppingCriteriaList([_LongestOutputs(longest)]),
        past_key_values=_BeamCache(DynamicCache(), DynamicCache()),
    )
    log_p = _log_probabilities(model, encoded, mask, sequences, given, nbest, (1.0, temperature))

    def hypothesis(ids: list[int], log_p: list[float], tempered: list[float]) -> Hypothesis:
        """A row of ``generate``, without what is given before it and what follows its end."""
        if config.eos_token_id in ids:
            end = ids.index(config.eos_token_id)
            length = end + 1
        else:  # at the length limit; padded if another sentence of the batch is longer
            padded = config.pad_token_id in ids
            length = end = ids.index(config.pad_token_id) if padded else len(ids)
        return Hypothesis(
            ids=tuple(ids[:end]),
            score=sum(log_p[:length]) / (length + given - 1) ** options.length_penalty,
            probabilities=tuple(map(math.exp, tempered[:length])),
        )

    rows = zip(sequences[:, given:].tolist(), log_p.tolist(), strict=True)
    hypotheses = [hypothesis(ids, *of_tokens) for ids, of_tokens in rows]
    return [hypotheses[i : i + nbest] for i in range(0, len(hypotheses), nbest)]


def _log_probabilities(
    model: PreTrainedModel,
    encoded: Tensor,
    mask: Tensor,
    sequences: Tensor,
    given: int,
    nbest: int,
    temperatures: Sequence[float],
) -> Tensor:
    """(rows, temperatures, T) of each token of the sequences (rows, given + T), in one pass."""
    prefixes, tokens = sequences[:, :-1], sequences[:, given:].unsqueeze(-1)
    types = len(model.get_output_embeddings().weight)
    rows = max(1, _SCORED_LOGITS // (prefixes.shape[1] * types))
    blocks = []
    for index in torch.arange(len(sequences), device=sequences.device).split(rows):
        output = model(
            encoder_outputs=BaseModelOutput(encoded[index // nbest]),
            attention_mask=mask[index // nbest],
            decoder_input_ids=prefixes[index],
            use_cache=False,
        )
        logits, log_p = output.logits[:, given - 1 :].float(), {}
        for t in {*temperatures}:
            scaled = logits if t == 1 else logits / t
            log_p[t] = scaled.gather(-1, tokens[index]).squeeze(-1) - scaled.logsumexp(-1)
        blocks.append(torch.stack([log_p[t] for t in temperatures], 1))
    return torch.cat(blocks)
