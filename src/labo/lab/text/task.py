"""What the tasks on text share: the model and its files, batches of tokens, and the loss."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..methods import METHODS
from ..pretrained import adapter_files, add_lora, freeze
from ..run.seeds import permutation, uniforms
from ..tasks import Batch, Task
from . import forced
from .arrow import IGNORED
from .folder import PreparedFolder
from .head import Head, head_loss
from .model import TokenModel
from .pretrained_tokenizer import vocabulary_digest, vocabulary_size
from .stored import StoredTeacher
from .token_text import token_name

_EXPLORED = 5  # examples with all their logits


class TokenTask(Task):
    """A task whose targets are tokens, and whose outputs are a :class:`Head` at those tokens.

    The batches are fixed for a run; each epoch uses them in another order. ``samples`` is how many
    samples of the training split ``labo teacher`` stores predictions for.
    """

    tempered_records: ClassVar = True
    method_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "kd": {"alpha": 0.5, "tau": 1.0},
        "tf-kd-self": {"alpha": 0.5, "tau": 1.0},
        "ps-kd": {"alpha": 0.7},
    }
    data: PreparedFolder[Any, Any]
    samples: int

    # ------------------------------------------------------------------ the model

    def method_notes(self) -> list[str]:
        """What the method says of a model that is trained from scratch."""
        warning = METHODS[self.recipe.method["name"]].from_scratch
        return [warning] if warning is not None and self.recipe.model.pretrained is None else []

    def prepare_model(self, model: TokenModel) -> None:
        """Freeze parameters and add adapters as the recipe says."""
        options = self.recipe.model
        if options.freeze:
            freeze(model.inside, options.freeze)
        if options.lora is not None:
            add_lora(model.inside, options.lora, [model.head_name], train_heads=False)

    def folder_files(
        self, model: nn.Module, weights: Mapping[str, Tensor], generation: str
    ) -> tuple[dict[str, Tensor], dict[str, str | bytes]]:
        """What a run saves of a model: tensors, and further files by name.

        ``generation`` is the content of ``generation_config.json``.
        """
        assert isinstance(model, TokenModel)
        options = self.recipe.model
        settings = model.plain_config() | {"labo": self.facts()}
        apart = model.network_weights(weights)
        files: dict[str, str | bytes] = {
            "config.json": json.dumps(settings, indent=2) + "\n",
            "generation_config.json": generation,
            **adapter_files(model.inside, apart, options.lora, options.pretrained),
            **self.data.tokenizer_files,
        }
        return model.plain_weights(weights), files

    def fold_temperature(self, model: nn.Module, temperature: float) -> None:
        assert isinstance(model, TokenModel)
        model.fold_temperature(temperature)

    # ------------------------------------------------------------------ stored predictions

    @abstractmethod
    def target_tokenizer(self) -> Any:
        """The tokenizer of the targets."""

    @abstractmethod
    def stored_places(self, batch: Batch) -> Iterable[tuple[int, slice]]:
        """The targets of a training batch in order: samples, and which targets of each."""

    def stored_teacher(self, folder: str) -> tuple[str, Callable[[Batch], tuple[Tensor, Tensor]]]:
        stored = StoredTeacher(folder)
        vocabulary = vocabulary_digest(self.target_tokenizer())
        stored.check(data=self.data.fingerprint, vocabulary=vocabulary, samples=self.samples)

        def read(batch: Batch) -> tuple[Tensor, Tensor]:
            if not bool(self.learned(batch).any()):  # Batch.without_targets
                return torch.empty(0, stored.top_k).long(), torch.empty(0, stored.top_k)
            found = ((stored.sample(i), places) for i, places in self.stored_places(batch))
            rows = [(indices[places], log_p[places]) for (indices, log_p), places in found]
            columns = map(np.concatenate, zip(*rows, strict=True))
            indices, log_p = map(torch.from_numpy, columns)
            return indices.long(), log_p

        return stored.about.content_fingerprint[:12], read

    # ------------------------------------------------------------------ batches

    def set_batches(self, batches: Sequence[Tensor]) -> None:
        """Take the samples of each batch of an epoch."""
        self._batches = batches
        self.steps_per_epoch = len(batches)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> list[int]:
        order: list[int] = permutation(
            self.recipe.seed, epoch, len(self._batches), stream="order of batches"
        ).tolist()
        return order

    def global_batch(self, epoch: int, position: int) -> Tensor:
        return self._batches[self._order(epoch)[position]]

    def outputs(self, model: nn.Module, batch: Batch, **options: Any) -> Head:
        """Hidden states at the tokens of a batch that are to be learned, and the output layer."""
        head: Head = model(*batch.inputs.tensors().values(), **options)
        return head.at(self.learned(batch))

    def learned(self, batch: Batch) -> Tensor:
        """(N, T) bool: the targets that the outputs are for."""
        return batch.target != IGNORED

    def tokens(self, batch: Batch) -> Tensor:
        """(tokens,) the targets that the outputs are for."""
        return batch.target[self.learned(batch)]

    def token_draws(self, batch: Batch, stream: str) -> Tensor:
        learned, seed = self.learned(batch), self.recipe.seed
        draws = uniforms(seed, batch.epoch, batch.index, learned.shape[1], stream=stream)
        return draws.to(learned.device)[learned]

    def loss(
        self, loss: nn.Module, outputs: Head, batch: Batch, teacher_outputs: tuple[Any, ...]
    ) -> Tensor:
        return head_loss(loss, outputs, self.tokens(batch), *teacher_outputs)

    def sums(self, outputs: Head, batch: Batch) -> Tensor:
        learned = self.learned(batch)
        sums = torch.zeros(learned.shape, device=learned.device)
        sums[learned] = outputs.states.detach().float().sum(-1)
        return sums.sum(-1)

    # ------------------------------------------------------------------ scores

    @abstractmethod
    def scored_batches(
        self, split: str, accelerator: Accelerator, *, sampled: bool = False
    ) -> Iterator[tuple[list[Any], list[int], Batch]]:
        """This process's share of a split: keys of its pieces, the targets of each, the batch.

        A batch without keys is only there so that all processes run the model equally often.
        ``sampled``: a part of a large split will do.
        """

    @torch.no_grad()
    def _heads(
        self, model: nn.Module, split: str, accelerator: Accelerator, *, sampled: bool = False
    ) -> Iterator[tuple[list[Any], list[int], Batch, Head]]:
        """The batches of :meth:`scored_batches`, and the model's states at their targets."""
        model.eval()
        for keys, lengths, batch in self.scored_batches(split, accelerator, sampled=sampled):
            batch = batch.to(accelerator.device)
            with accelerator.autocast():
                head = self.outputs(model, batch)
            if keys:
                yield keys, lengths, batch, head  # outside of autocast: statistics are in float32

    @torch.no_grad()
    def forced_rows(
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        temperature: float | None = None,
    ) -> list[tuple[Any, dict[str, Tensor]]]:
        """Statistics of each target given the true prefix, of all processes, sorted by their keys.

        A row has those of a piece of :meth:`scored_batches`.
        """
        rows = []
        for keys, lengths, batch, head in self._heads(model, split, accelerator):
            found = forced.piece_statistics(head, self.tokens(batch), lengths, temperature)
            for key, row in zip(keys, found, strict=True):
                # A copy: what is sent to another process is all of a tensor's memory.
                rows.append((key, {name: column.clone() for name, column in row.items()}))
        return sorted(gather_object(rows), key=itemgetter(0))

    @torch.no_grad()
    def logits(
        self, model: nn.Module, split: str, accelerator: Accelerator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for *_, batch, head in self._heads(model, split, accelerator, sampled=True):
            yield from forced.blocks(head, self.tokens(batch))

    # ------------------------------------------------------------------ the report

    @torch.no_grad()
    def competing(
        self,
        model: nn.Module,
        batch: Batch,
        places: Iterable[tuple[int, int]],
        describe: Callable[[int], tuple[Any, str, str]],
    ) -> dict[str, Any]:
        """Targets with the most probable second choice, one per sample, with all logits.

        ``places`` has the sample of each target and the index of its token; ``describe`` gives the
        ids of a sample, its name, and what is shown before its text.
        """
        model.eval()
        head = self.outputs(model, batch)
        rivals = forced.rival_probabilities(head, self.tokens(batch))
        tokens, where = self.target_tokenizer(), list(places)
        examples: dict[int, dict[str, Any]] = {}
        for row in rivals.argsort(descending=True).tolist():
            sample, position = where[row]
            if sample in examples or len(examples) == _EXPLORED:
                continue
            ids, name, context = describe(sample)
            so_far = tokens.decode(ids[:position].tolist(), skip_special_tokens=True)
            logits = head.logits(head.states[row]).float()
            target = int(ids[position])
            token = token_name(tokens.convert_ids_to_tokens(target))
            examples[sample] = {
                "title": f"{name}, after {so_far[-40:]!r}: {token}",
                "target": target,
                "logits": [round(x, 4) for x in logits.tolist()],
                "image": None,
                "context": f"{context}{so_far[-300:]} ...",
            }
        classes = self.token_texts(range(self.num_classes))
        return {"classes": classes, "examples": [*examples.values()]}

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Target tokens. An output layer may have more rows than the tokenizer has types."""
        tokens = self.target_tokenizer()
        types = vocabulary_size(tokens)
        known: list[str] = tokens.convert_ids_to_tokens([i if i < types else 0 for i in ids])
        return [t if i < types else f"unused {i}" for i, t in zip(ids, known, strict=True)]
