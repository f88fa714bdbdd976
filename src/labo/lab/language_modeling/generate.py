"""Prompts in, continuations out: one line for each.

:class:`Generator` is the way in from Python; ``labo generate`` is :func:`generate_stream`.

A token is drawn by one random number, a function of the seed, the number of the line and the number
of the token. So what a line gives depends neither on the other lines nor on the size of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ..command_options import validated
from ..errors import RequestError
from ..run.progress import Advance, notice
from ..run.seeds import uniforms
from ..text.batching import in_batches
from ..text.stdio import Notice, answer_lines, json_line
from .model import SavedModel
from .options import Sampling

__all__ = ["Continuation", "Generator", "Sampling", "generate_stream"]


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        text: without the prompt.
        tokens: what the model said, its end last unless it was cut off.
        probabilities: what the model gave each token before ``temperature`` and ``top_p``;
            calibrated if the model is, see ``labo calibrate``.
    """

    text: str
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of each row: all others get a score of minus infinity."""

    def __init__(self, options: Sampling, lines: Tensor, prompt: int, divisor: float = 1.0) -> None:
        self.options, self.lines, self.prompt, self.divisor = options, lines, prompt, divisor
        self.log_p: list[Tensor] = []  # of the chosen tokens, step by step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_p = (scores.float() / self.divisor).log_softmax(-1)
        if self.options.temperature == 0:
            token = log_p.argmax(-1)
        else:
            step = input_ids.shape[1] - self.prompt
            u = uniforms(self.options.seed, step, self.lines, 1, stream="generate")
            token = draw_tokens(log_p, u.to(log_p.device), self.options)
        chosen = token.unsqueeze(-1)
        self.log_p.append(log_p.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)


def draw_tokens(log_p: Tensor, u: Tensor, options: Sampling) -> Tensor:
    """(N,) tokens drawn from log-probabilities (N, V) by the inverse of their cumulative sums.

    Example:
        >>> p = torch.tensor([[0.5, 0.3, 0.2]])
        >>> sampling = Sampling(temperature=1.0)
        >>> [int(draw_tokens(p.log(), torch.tensor([[u]]), sampling)) for u in (0.4, 0.6, 0.9)]
        [0, 1, 2]
        >>> int(draw_tokens(p.log(), torch.tensor([[0.9]]), Sampling(temperature=1.0, top_p=0.8)))
        1
    """
    ranked, order = (log_p.double() / options.temperature).softmax(-1).sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked  # of the tokens that are more probable
    kept = ranked.masked_fill(before >= options.top_p, 0.0)
    kept[:, 0] = ranked[:, 0]
    total = kept.cumsum(-1)
    place = (total <= u.double() * total[:, -1:]).sum(-1, keepdim=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1  # rounding may lead one beyond it
    return order.gather(-1, torch.minimum(place, last)).squeeze(-1)


class Generator(SavedModel):
    """A trained language model, ready to go on from prompts.

    Args:
        run: a run directory, or a model folder itself.
        notice: called with a line of text when a prompt is cut.
        options: fields of :class:`Sampling`.

    Example::

        Generator("runs/lm-manual-labo-s0", temperature=0.8).generate(["The break statement"])
    """

    def __init__(
        self, run: str | Path, *, notice: Notice = warnings.warn, **options: float | None
    ) -> None:
        self.options = validated(Sampling, options)
        super().__init__(run)
        self.notice = notice
        self.kind, self.begin, self.end = (self.facts[name] for name in ("kind", "begin", "end"))
        self.max_tokens = self.options.max_tokens or min(100, self.positions // 2)
        if self.max_tokens >= self.positions:
            raise RequestError(
                f"max_tokens: {self.max_tokens} is too many for a model of {self.positions} "
                "positions"
            )

    def generate(
        self,
        prompts: Sequence[str],
        *,
        first_line: int = 1,
        advance: Advance | None = None,
    ) -> list[Continuation]:
        """The continuation of each prompt.

        For a model trained on chats a prompt is a message of the user, and the continuation the
        answer.

        Args:
            prompts: any text.
            first_line: the number of the first prompt, which its random numbers depend on.
            advance: called with the number of prompts after each batch.
        """
        encoded = [self._encode(text, first_line + i) for i, text in enumerate(prompts)]
        return in_batches(
            lambda batch: self._generate(
                [encoded[i] for i in batch], torch.tensor([first_line + i for i in batch])
            ),
            [len(ids) + self.max_tokens for ids in encoded],
            self.options.batch_tokens,
            longest_first=True,
            advance=advance,
        )

    def _encode(self, text: str, line: int) -> list[int]:
        raw = self.tokenizer.backend_tokenizer
        raw.encode_special_tokens = self.kind != "chat"
        if self.kind == "chat":
            messages = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = raw.encode(text, add_special_tokens=False).ids
        begin = [] if self.begin is None else [self.begin]
        room = self.positions - self.max_tokens - len(begin)
        if len(ids) > room:
            self.notice(
                f"line {line} has {len(ids)} tokens, there is room for {room}: its beginning is "
                "left out"
            )
            ids = ids[len(ids) - room :]
        # A template may be empty; something must be there to go on from.
        return [*begin, *ids] or [self.end]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], lines: Tensor) -> list[Continuation]:
        device, width = self.model.causal.device, max(map(len, prompts))
        ids = torch.tensor([[self.end] * (width - len(p)) + p for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)).long()
        chooser = _Chooser(self.options, lines, width, self.divisor)
        sequences = self.model.causal.generate(
            ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([chooser]),
            generation_config=GenerationConfig(
                max_new_tokens=self.max_tokens,
                do_sample=False,
                eos_token_id=self.end,
                pad_token_id=self.end,
            ),
        )
        log_p = torch.stack(chooser.log_p, 1)
        return [
            self._continuation(row, p)
            for row, p in zip(sequences[:, width:].tolist(), log_p.exp().tolist(), strict=True)
        ]

    def _continuation(self, ids: list[int], probabilities: list[float]) -> Continuation:
        said = ids[: ids.index(self.end)] if self.end in ids else ids
        length = min(len(said) + 1, len(ids))  # with the end, if it came
        return Continuation(
            str(self.tokenizer.decode(said, skip_special_tokens=True)),
            tuple(self.tokenizer.convert_ids_to_tokens(ids[:length])),
            tuple(probabilities[:length]),
        )


def generate_stream(
    run: str | Path,
    source: BinaryIO,
    target: BinaryIO,
    *,
    scores: bool = False,
    **options: float | None,
) -> None:
    """``labo generate``: lines in, lines out, as :func:`labo.lab.text.stdio.answer_lines` does it.

    Line breaks in a continuation become spaces. Prompts longer than the model are cut, with a
    notice on stderr. ``scores`` writes JSON, with the text as it is and the probability of each
    token.
    """
    generator = Generator(run, notice=notice, **options)

    def answer(lines: Sequence[str], first: int, advance: Advance) -> Iterator[str]:
        said = generator.generate(lines, first_line=first, advance=advance)
        for number, (prompt, one) in enumerate(zip(lines, said, strict=True), first):
            if scores:
                yield json_line({"line": number, "prompt": prompt, **asdict(one)})
            else:
                yield " ".join(one.text.splitlines())

    answer_lines(source, target, answer)
