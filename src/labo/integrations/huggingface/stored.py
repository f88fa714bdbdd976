"""The predictions that ``labo teacher`` stored, as a data set and a collator for a ``Trainer``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .losses import IGNORED, Columns


class StoredTeacherDataset(Dataset[dict[str, Any]]):
    """Training documents with the predictions of a teacher for :class:`labo.TopKDistillationLoss`.

    An item has ``input_ids``, ``labels``, and for each label k ``teacher_indices`` and
    ``teacher_log_probabilities``; -1 and 0 where there is no prediction. Give it to a ``Trainer``
    with :class:`StoredTeacherCollator` and ``remove_unused_columns=False``. TRL's ``SFTTrainer``
    takes ``datasets.Dataset.from_list(list(data))`` and the same collator.

    Args:
        stored: the folder that ``labo teacher`` made.
        data: the folder that ``labo prepare-text`` made, for which it was made.
        max_length: the most tokens of an item; the rest of a document is left out.

    Raises:
        RequestError: the two folders do not belong together.
    """

    def __init__(
        self, stored: str | Path, data: str | Path, *, max_length: int | None = None
    ) -> None:
        from ...lab.language_modeling.prepared import PreparedDocuments
        from ...lab.text.pretrained_tokenizer import vocabulary_digest
        from ...lab.text.stored import StoredTeacher

        documents = PreparedDocuments(data)
        self.split, self.teacher = documents.split("train"), StoredTeacher(stored)
        self.max_length = max_length
        self.teacher.check(
            data=documents.fingerprint,
            vocabulary=vocabulary_digest(documents.tokenizer),
            samples=len(self.split),
        )

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.asarray(self.split.tokens(index), dtype=np.int64)
        labels = np.asarray(self.split.labels(index), dtype=np.int64)
        learned = np.flatnonzero(labels[1:] != IGNORED) + 1
        shape = (len(tokens), self.teacher.top_k)
        indices, log_p = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        indices[learned], log_p[learned] = self.teacher.sample(index)
        columns: tuple[Any, ...] = (tokens, labels, indices, log_p)
        names = ("input_ids", "labels", *Columns._fields[1:])
        cut = slice(self.max_length)
        return {name: x[cut].tolist() for name, x in zip(names, columns, strict=True)}


class StoredTeacherCollator:
    """Pads items of :class:`StoredTeacherDataset` on the right.

    Args:
        pad_token_id: of the tokenizer.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        fillers: dict[str, float] = {"input_ids": self.pad_token_id, "labels": IGNORED}
        fillers |= {"teacher_indices": -1, "teacher_log_probabilities": 0.0}
        batch = {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.as_tensor(item[name]) for item in items],
                batch_first=True,
                padding_value=filler,
            )
            for name, filler in fillers.items()
        }
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        places = torch.arange(batch["input_ids"].shape[1])
        return batch | {"attention_mask": (places < lengths[:, None]).long()}
