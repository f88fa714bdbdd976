"""Language modelling: prepared documents, a causal model, bits per byte.

The samples of the loop are blocks: pieces of documents packed together, see
:mod:`labo.lab.language_modeling.packing`. Attention does not cross documents, and positions restart
with each. Batches are made up by their tokens, as many blocks as fit in ``train.batch_tokens``. The
loss takes hidden states and output layer through :func:`labo.linear_loss`, at the tokens that are
to be learned only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..._names import unknown_name
from .. import config
from ..custom import call_function, function_version, is_reference
from ..errors import RequestError
from ..pretrained import StartingModel, first_line, folder_digest, load_config
from ..run.distributed import in_step
from ..tasks import Batch, Evaluation
from ..text import forced
from ..text.arrow import IGNORED
from ..text.batching import TOKENS_AT_ONCE, Inputs, training_batches
from ..text.pretrained_tokenizer import pretrained_tokenizer, vocabulary_digest
from ..text.task import TokenTask
from .model import (
    PRESETS,
    LanguageModel,
    causal_config,
    check_head,
    check_packing,
    fresh_model,
    load_causal,
)
from .packing import Ints, Piece, pack
from .prepared import DocumentSplit, PreparedDocuments

_FITTED_TOKENS = 1 << 16  # of a split, to fit a temperature to
_EXAMPLE_TOKENS = 4096  # among which examples are looked for


class DocumentData(config.Section):
    """Which documents: the built-in manual, or a folder made by ``labo prepare-text``."""

    name: Literal["manual", "prepared"] = Field(
        description="`manual` (the reference manual of Python, built in) or `prepared` (a folder)."
    )
    path: str | None = Field(None, description="The folder that `labo prepare-text` made.")
    vocabulary: int = Field(2000, ge=300, description="Size of the vocabulary of the manual.")
    data_seed: int = Field(
        0, ge=0, description="Seed that selects the held-out sections of the manual."
    )
    block: int = Field(
        256, ge=8, description="Tokens in a block, and positions of a model from a preset."
    )
    packing: bool = Field(
        True,
        description="Pack several documents into a block. If false, each document has a row of its "
        "own, padded.",
    )
    recorded_tokens: int = Field(
        200_000,
        ge=0,
        description="`labo evaluate` records the probability of each token for the first documents "
        "of a split, up to this number of tokens.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DocumentData:
        if (self.name == "prepared") != (self.path is not None):
            raise ValueError(
                "name: prepared needs path=FOLDER, made by `labo prepare-text`; name: manual "
                "takes none"
            )
        return self

    def unused(self) -> dict[str, str]:
        of_manual = ("data_seed", "vocabulary") if self.name == "prepared" else ()
        return dict.fromkeys(of_manual, "name=prepared")


class CausalModel(StartingModel):
    """A preset and what is to differ from it, or a pre-trained folder."""

    preset: str | None = Field(
        None,
        description="Architecture and size: "
        + ", ".join(f"`{name}`" for name in PRESETS)
        + ", or `package.module:function` for a config of your own.",
    )
    arguments: dict[str, Any] = Field(
        {}, description="Keyword arguments of a function of your own."
    )
    width: int | None = Field(None, ge=2, description="Size of the hidden states.")
    layers: int | None = Field(None, ge=1, description="Number of layers.")
    heads: int | None = Field(None, ge=1, description="Attention heads.")
    ffn: int | None = Field(None, ge=1, description="Inner size of the feed-forward layers.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout, wherever the architecture has it. For presets."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keys of the transformers config, such as `rope_theta`. For presets.",
    )

    @field_validator("preset")
    @classmethod
    def _known(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS and not is_reference(preset):
            raise ValueError(unknown_name("preset", preset, PRESETS))
        return preset

    @model_validator(mode="after")
    def _consistent(self) -> CausalModel:
        if self.arguments and not self.is_custom:
            raise ValueError("arguments: only a function of your own has them")
        if self.preset is None or self.is_custom:
            if self.dimensions() or self.config or (self.is_custom and self.dropout):
                kind = "pretrained model" if self.preset is None else "config of your own"
                raise ValueError(f"the dimensions and dropout of a {kind} are its own")
            return self
        values = {**PRESETS[self.preset], **self.dimensions()}
        if values["width"] % (2 * values["heads"]):
            raise ValueError(
                f"width {values['width']} must be divisible by twice the heads {values['heads']}"
            )
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the preset is a function of your own."""
        return self.preset is not None and is_reference(self.preset)

    def dimensions(self) -> dict[str, int]:
        """What differs from the preset."""
        given = {name: getattr(self, name) for name in ("width", "layers", "heads", "ffn")}
        return {name: value for name, value in given.items() if value is not None}


class DocumentTrain(config.Train):
    """The loop, and the score on the validation documents that selects the model."""

    batch_tokens: int = Field(
        ge=16,
        description="Blocks times the longest block of a batch, over all processes and "
        "micro-batches.",
    )
    select: Literal["nll", "bits_per_byte", "token_accuracy"] = Field(
        "nll", description="The score on the validation split that selects the model."
    )


class DocumentRecipe(config.Recipe):
    """A recipe for language modelling."""

    data: DocumentData = Field(description="The documents.")
    model: CausalModel = Field(description="The model.")
    train: DocumentTrain = Field(description="The training loop.")


@dataclass(frozen=True)
class Blocks(Inputs):
    """Token ids (N, T), padded on the right, and the position of each in its document."""

    ids: Tensor
    positions: Tensor


class LanguageModelingTask(TokenTask):
    """Documents, the model that predicts their tokens, and its scores."""

    Recipe = DocumentRecipe
    data: PreparedDocuments
    higher_is_better: ClassVar = {
        "nll": False,
        "bits_per_byte": False,
        "token_accuracy": True,
    }
    provides: ClassVar = frozenset({"inner_states", "stored_teacher"})
    shardable: ClassVar = True
    method_defaults: ClassVar = {
        **TokenTask.method_defaults,
        "labo": {"warmup_steps": 1000},
        # The only published setting, which is for language models.
        "eaft": {"top_k": 20},
    }

    def __init__(self, recipe: DocumentRecipe) -> None:
        self.recipe = recipe
        options = recipe.data
        self.data = _load(options)
        self.data.hold()
        self.fingerprint = f"{options.name}@{self.data.fingerprint[:12]}"
        self.num_classes = len(self.data.tokenizer)
        if recipe.model.pretrained is not None:
            self.num_classes = self._pretrained_vocabulary(recipe.model.pretrained)
            self.fingerprint += f"~{folder_digest(recipe.model.pretrained)}"
        if recipe.model.is_custom:
            version = function_version("model.preset", str(recipe.model.preset))
            self.fingerprint += f"~{recipe.model.preset}@{version}"
        if options.block > recipe.train.batch_tokens:
            raise RequestError(
                f"train.batch_tokens: {recipe.train.batch_tokens} is less than a block of "
                f"data.block={options.block}"
            )
        documents = self.data.split("train")
        self._train = _Packed(documents, recipe)
        self.size, self.samples = len(self._train.packing), len(documents)
        if not self.size:
            raise RequestError(
                f"data.block: no training example is as short as {options.block} tokens"
            )
        lengths = torch.from_numpy(self._train.lengths)
        every = torch.ones(len(lengths), dtype=torch.bool)
        self.set_batches(training_batches(lengths, every, recipe.train.batch_tokens, recipe.seed))
        self.notes = self.method_notes()
        if documents.masked and (long := int((documents.lengths - 1 > options.block).sum())):
            note = f"{long} training examples are longer than a block and left out"
            self.notes = [note, *self.notes]
        self._held_out = lru_cache(maxsize=2)(lambda split: _Packed(self.data.split(split), recipe))

    # ------------------------------------------------------------------ the model

    def build_model(self) -> LanguageModel:
        model = self._start()
        self.prepare_model(model)
        check_head(model)
        if self.recipe.data.packing:
            check_packing(model)
        return model

    def _start(self) -> LanguageModel:
        """The model before any training."""
        options, block = self.recipe.model, self.recipe.data.block
        if options.is_custom:
            return self._from_function(str(options.preset), options.arguments)
        if options.preset is not None:
            return fresh_model(
                causal_config(
                    options.preset,
                    self.num_classes,
                    positions=block,
                    dropout=options.dropout,
                    begin=self.data.begin,
                    end=self.data.end,
                    pad=self.data.tokenizer.pad_token_id,
                    dimensions=options.dimensions(),
                    settings=options.config,
                )
            )
        assert options.pretrained is not None
        causal = load_causal(options.pretrained)
        positions = getattr(causal.config, "max_position_embeddings", block)
        if block > positions:
            raise RequestError(
                f"data.block: {block} is more than the {positions} positions of "
                f"{options.pretrained}"
            )
        return LanguageModel(causal)

    def _from_function(self, name: str, arguments: Mapping[str, Any]) -> LanguageModel:
        """A new model from the config that a function of the user returns."""
        key, block = "model.preset", self.recipe.data.block
        given = {"vocab_size": self.num_classes, "positions": block, **self._special_tokens}
        config = call_function(key, name, given, arguments)
        must_return = f"{key}: {name} must return a config"
        if not isinstance(config, PretrainedConfig):
            raise RequestError(f"{must_return} of transformers, not {type(config).__name__}")
        types = getattr(config, "vocab_size", None)
        if types != self.num_classes:
            raise RequestError(f"{must_return} with vocab_size={self.num_classes}, not {types}")
        positions = getattr(config, "max_position_embeddings", block)
        if block > positions:
            raise RequestError(
                f"{must_return} with max_position_embeddings of at least {block} (data.block), not "
                f"{positions}"
            )
        try:
            return fresh_model(config)
        except ValueError as error:
            reason = first_line(error)
            raise RequestError(f"{key}: {name}: no causal language model: {reason}") from error

    def _pretrained_vocabulary(self, folder: str) -> int:
        """Types of the output layer of a pre-trained model, whose tokenizer the data must have."""
        theirs = pretrained_tokenizer(folder)
        if vocabulary_digest(theirs) != vocabulary_digest(self.data.tokenizer):
            raise RequestError(
                f"{self.data.path} was not prepared with the tokenizer of {folder}: "
                f"`labo prepare-text ... --tokenizer {folder}` does that"
            )
        size = int(load_config(folder).vocab_size)
        if size < len(theirs):
            raise RequestError(f"{folder}: its tokenizer has more types than its output layer")
        return size

    @staticmethod
    def load_model(folder: Path) -> LanguageModel:
        return LanguageModel(load_causal(folder))

    def facts(self) -> dict[str, Any]:
        """What the saved model says of itself besides its dimensions."""
        return {
            "task": self.recipe.task,
            "num_classes": self.num_classes,
            "vocabulary": vocabulary_digest(self.data.tokenizer),
            "kind": self.data.kind,
            "begin": self.data.begin,
            "end": self.data.end,
        }

    def model_files(
        self, model: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str | bytes]]:
        generation = json.dumps(self._special_tokens, indent=2) + "\n"
        return self.folder_files(model, weights, generation)

    @property
    def _special_tokens(self) -> dict[str, int | None]:
        pad = self.data.tokenizer.pad_token_id
        return {
            "bos_token_id": self.data.begin,
            "eos_token_id": self.data.end,
            "pad_token_id": pad,
        }

    def stored_places(self, batch: Batch) -> Iterator[tuple[int, slice]]:
        whole = self._train.documents.masked  # predictions are stored for the learned tokens only
        for piece in chain.from_iterable(map(self._train.packing.pieces, batch.index.tolist())):
            last = None if whole else piece.first + piece.length
            yield piece.document, slice(piece.first, last)

    def target_tokenizer(self) -> Any:
        return self.data.tokenizer

    # ------------------------------------------------------------------ training batches

    def count(self, index: Tensor, epoch: int) -> int:
        return int(self._train.targets[index.numpy()].sum())

    def batch(self, index: Tensor, epoch: int) -> Batch:
        return self._batch(self._train, index, epoch)

    def _batch(self, split: _Packed, index: Tensor, epoch: int) -> Batch:
        pad = self.data.tokenizer.pad_token_id
        filler = 0 if pad != 0 else 1  # transformers warns of padding without a mask
        ids, positions, target = split.rows(index.tolist(), filler)
        return Batch(Blocks(ids, positions), target, index, epoch)

    # ------------------------------------------------------------------ scores

    def validate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        return _metrics(self._held_out("valid"), self._forced(model, "valid", accelerator))

    def evaluate(  # type: ignore[override]  # the options are those of this task
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        *,
        temperature: float | None = None,
    ) -> Evaluation:
        chosen = self._held_out(split)
        rows = self._forced(model, split, accelerator, temperature)
        records = self._records(chosen, rows, temperature)
        counted = {"tokens": int(chosen.targets.sum()), "bytes": chosen.bytes}
        return Evaluation(_metrics(chosen, rows), records, {"counted": counted})

    def scored_batches(
        self, split: str, accelerator: Accelerator, *, sampled: bool = False
    ) -> Iterator[tuple[list[tuple[int, int]], list[int], Batch]]:
        """Blocks: all of them, or every n-th one of a large split."""
        chosen = self._held_out(split)
        every = max(1, -(-int(chosen.targets.sum()) // _FITTED_TOKENS)) if sampled else 1
        blocks = range(0, len(chosen.packing), every)
        mine = blocks[accelerator.process_index :: accelerator.num_processes]
        at_once = max(1, TOKENS_AT_ONCE // self.recipe.data.block)
        for first in in_step(len(blocks), accelerator.num_processes, at_once):
            part = mine[first : first + at_once]
            batch = self._batch(chosen, torch.tensor(part or blocks[:1]), 0)
            pieces = [*chain.from_iterable(map(chosen.packing.pieces, part))]
            keys = [(piece.document, piece.first) for piece in pieces]
            yield keys, [len(chosen.learned(piece)) for piece in pieces], batch

    def _forced(
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        temperature: float | None = None,
    ) -> dict[int, dict[str, Tensor]]:
        """Statistics of each token of each document that is used."""
        documents: dict[int, list[dict[str, Tensor]]] = {}
        for (document, _), row in self.forced_rows(model, split, accelerator, temperature):
            documents.setdefault(document, []).append(row)
        return {
            document: {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            for document, rows in documents.items()
        }

    def _records(
        self, split: _Packed, rows: Mapping[int, Mapping[str, Tensor]], temperature: float | None
    ) -> Iterator[dict[str, Any]]:
        """One record per document; the first ones with each token."""
        counts = self.data.frequencies("tokens")
        names = self.data.tokenizer.convert_ids_to_tokens
        documents, nothing = split.documents, {"nll": torch.empty(0)}
        limit = self.recipe.data.recorded_tokens
        recorded = np.searchsorted(np.cumsum(documents.lengths), limit, side="right")
        for index in range(len(documents)):
            tokens, nll = documents.tokens(index)[1:], rows.get(index, nothing)["nll"]
            record: dict[str, Any] = {
                "index": index,
                "name": documents.name(index),
                "tokens": len(nll),
                "bytes": int(documents.bytes[index]),
                "nll": float(f"{nll.double().sum():.9g}"),  # summed over the tokens
                "frequency": float(counts[tokens].mean()) if len(tokens) else 0.0,
            }
            if index < recorded and index in rows:
                labels = documents.labels(index)[1:]
                learned = names(labels[labels != IGNORED].tolist())
                record["forced"] = forced.forced_record(learned, rows[index], temperature)
            yield record

    def examples(self, model: nn.Module, split: str, accelerator: Accelerator) -> dict[str, Any]:
        chosen = self._held_out(split)
        blocks = max(1, _EXAMPLE_TOKENS // self.recipe.data.block)
        index = torch.arange(min(len(chosen.packing), blocks))
        batch = self._batch(chosen, index, 0).to(accelerator.device)
        places = ((int(d), int(t)) for d, t in chosen.target_places(index.tolist()))
        documents = chosen.documents
        return self.competing(
            model, batch, places, lambda d: (documents.tokens(d), documents.name(d), "")
        )


# ------------------------------------------------------------------ blocks


class _Packed:
    """A split, cut and packed; texts longer than a block are cut, examples are not used.

    Attributes:
        documents: its documents.
        packing: which pieces of them share a block.
        lengths: (B,) inputs of each block.
        targets: (B,) tokens of each block that are to be learned.
    """

    def __init__(self, documents: DocumentSplit, recipe: DocumentRecipe) -> None:
        options, whole = recipe.data, documents.masked
        self.documents = documents
        self.packing = pack(
            documents.lengths, options.block, recipe.seed, whole=whole, share=options.packing
        )
        self.lengths = self.packing.block_lengths()
        self.targets = self.lengths
        if documents.masked:
            blocks = range(len(self.packing))
            learned = (map(self.learned, self.packing.pieces(block)) for block in blocks)
            self.targets = np.array([sum(map(len, block)) for block in learned], dtype=np.int64)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text that is learned, of the documents that are used."""
        used = np.unique(self.packing.document)
        return int(self.documents.bytes[used].sum())

    def learned(self, piece: Piece) -> Ints:
        """(n,) the indices in their document of the tokens of a piece that are to be learned."""
        labels = self.documents.labels(piece.document, piece.first + 1, piece.length)
        return piece.first + 1 + np.flatnonzero(labels != IGNORED)

    def rows(self, blocks: Sequence[int], filler: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and targets of blocks, each (N, T)."""
        width = int(self.lengths[list(blocks)].max())
        ids = np.full((len(blocks), width), filler, dtype=np.int64)
        positions = np.zeros((len(blocks), width), dtype=np.int64)
        target = np.full((len(blocks), width), IGNORED, dtype=np.int64)
        for row, block in enumerate(blocks):
            column, length = 0, 0
            for document, first, length in self.packing.pieces(block):
                here = slice(column, column + length)
                ids[row, here] = self.documents.tokens(document, first, length)
                target[row, here] = self.documents.labels(document, first + 1, length)
                positions[row, here] = np.arange(length)
                column += length
            # Padding goes on from the last piece, which does not look ahead.
            positions[row, column:] = np.arange(length, length + width - column)
        return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(target)

    def target_places(self, blocks: Sequence[int]) -> Ints:
        """(n, 2) of the targets of blocks: the document, and the index of the token in it."""
        places = [np.empty((0, 2), dtype=np.int64)]
        for piece in chain.from_iterable(map(self.packing.pieces, blocks)):
            index = self.learned(piece)
            places.append(np.stack([np.full_like(index, piece.document), index], 1))
        return np.concatenate(places)


def _metrics(split: _Packed, rows: Mapping[int, Mapping[str, Tensor]]) -> dict[str, float]:
    """Scores under plain cross entropy, whatever the loss of the training."""
    means = forced.mean_metrics([*rows.values()])
    nll, tokens = means.pop("nll"), sum(len(row["nll"]) for row in rows.values())
    return {
        "nll": nll,
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "bits_per_byte": nll * tokens / math.log(2) / split.bytes,
        **means,
        **forced.calibration_errors([*rows.values()]),
    }


TASK = LanguageModelingTask


def _load(options: DocumentData) -> PreparedDocuments:
    if options.path is not None:
        return PreparedDocuments(options.path)
    from .manual import manual_data

    return manual_data(vocabulary=options.vocabulary, seed=options.data_seed)
