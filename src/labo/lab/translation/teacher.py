"""The predictions of a translation model for training sentences, stored by ``labo teacher``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RequestError
from ..text.batching import in_batches
from ..text.pretrained_tokenizer import vocabulary_size
from ..text.stored import Rows
from ..text.teacher import TrainingPredictions
from .batches import of_split
from .model import EncoderDecoder, fitting_config, load_translator, positions_of, start_tokens
from .prepared import MAKER, Prepared


class SentencePredictions(TrainingPredictions):
    """What an encoder-decoder predicts for the tokens of translations, given the sources."""

    maker = MAKER
    model: EncoderDecoder

    def __init__(self, folder: Path, data: Path, block: int | None) -> None:
        if block is not None:
            raise RequestError("--block is for documents; the model sees whole sentences")
        self.data = Prepared(data)
        config = fitting_config(folder, self.data)
        self.take(self.data, self.data.target_tokenizer)
        self.types = vocabulary_size(self.data.target_tokenizer)
        self.block = positions_of(config)
        self.split = self.data.split("train")
        self.targets = self.split.lengths("target")
        self._starts = torch.tensor([start_tokens(config, pair) for pair in self.data.pairs])
        longest = int(self.split.longest(self._starts.shape[1] - 1).max(initial=0))
        if longest > self.block:
            raise RequestError(
                f"{data} has a training sentence of {longest} tokens, but {folder} takes "
                f"{self.block}: prepare the data with a smaller --max-tokens"
            )
        self.model = load_translator(folder).eval()

    def samples(self, first: int, last: int) -> Iterator[Rows]:
        yield from in_batches(
            lambda batch: self._sentences(first + torch.tensor(batch)),
            self.split.longest()[first:last].tolist(),
        )

    @torch.inference_mode()
    def _sentences(self, index: Tensor) -> list[Rows]:
        inputs, labels = of_split(self.split, index, self._starts, self.data.pad)
        inputs = inputs.to(next(self.model.parameters()).device)
        return self.most_probable(self.model(inputs.source, inputs.mask, inputs.prefix), labels)


PREDICTIONS = SentencePredictions
