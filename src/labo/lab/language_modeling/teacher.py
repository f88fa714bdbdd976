"""``labo teacher``: the k most probable tokens of a language model, stored for training.

The training documents of a prepared folder are read once. For every token that is to be learned,
the indices and the log-probabilities of the k most probable tokens are written (see
:mod:`labo.lab.text.stored`). Training reads them by document and token, so it may pack and shuffle
the documents as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import LabError, RequestError
from ..pretrained import folder_digest
from ..run.checksums import verify_folder
from ..run.files import Document, read_json
from ..text.folder import check_apart
from ..text.forced import blocks
from ..text.pretrained_tokenizer import pretrained_tokenizer, vocabulary_digest
from ..text.stored import Precision, Rows, StoredSettings, StoredTeacher, StoredWriter
from .model import LanguageModel, check_head, load_causal
from .packing import cut
from .prepared import IGNORED, TASK, DocumentSplit, PreparedDocuments

__all__ = ["store", "stored_rows"]

_PART_TARGETS = 1 << 17  # of a part, of which the last unfinished one is lost when interrupted
_TOKENS_AT_ONCE = 4096


def store(
    model: str | Path,
    data: str | Path,
    out: Path,
    *,
    top_k: int = 64,
    block: int | None = None,
    precision: Precision = "float16",
    force: bool = False,
    part_targets: int = _PART_TARGETS,
) -> dict[str, Any]:
    """Write the predictions of a model for the training documents of a prepared folder.

    Args:
        model: a run, or a Hugging Face folder with a causal language model.
        data: a folder made by ``labo prepare-text``, with the tokenizer of the model.
        out: the folder to write.
        top_k: tokens that are stored for each target.
        block: the most tokens the model sees at once; all its positions by default.
        precision: of the log-probabilities.
        force: replace a finished folder.
        part_targets: targets of a part. A part is written as a whole.

    Returns:
        What was written: targets, bytes, and seconds of this call.

    Raises:
        RequestError: the model and the data do not fit, or the folder exists or is an input.
    """
    folder = _model_folder(Path(model))
    check_apart(out, [data, folder])
    documents = PreparedDocuments(data)
    tokenizer = pretrained_tokenizer(str(folder))
    vocabulary = vocabulary_digest(documents.tokenizer)
    if vocabulary_digest(tokenizer) != vocabulary:
        raise RequestError(
            f"{data} was not prepared with the tokenizer of {model}: "
            f"`labo prepare-text ... --tokenizer {folder}` does that"
        )
    if not 1 <= top_k <= len(tokenizer):
        raise RequestError(f"--top-k {top_k}: the vocabulary has {len(tokenizer)} types")
    language_model = LanguageModel(load_causal(folder)).eval()
    check_head(language_model)
    positions = getattr(language_model.causal.config, "max_position_embeddings", None)
    block = block or positions
    if block is None or (positions is not None and block > positions):
        raise RequestError(f"--block: the model has {positions or 'no limit of'} positions")
    if torch.accelerator.is_available():
        language_model.to(torch.accelerator.current_accelerator())
    settings = StoredSettings(
        data=documents.fingerprint,
        vocabulary=vocabulary,
        model=folder_digest(str(folder)),
        top_k=top_k,
        block=block,
        precision=precision,
    )
    split, started = documents.split("train"), time.monotonic()
    reader = _Reader(language_model, split, top_k, len(tokenizer), block)
    try:
        with StoredWriter(out, settings, force=force) as writer:
            for first, last in _ranges(split, writer.samples, part_targets):
                writer.add(reader.documents(first, last))
            writer.finish({"teacher": Path(model).name})
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error
    stored = StoredTeacher(out)
    size = sum(path.stat().st_size for path in stored.path.glob("*.arrow"))
    seconds = time.monotonic() - started
    return {"targets": stored.about.targets, "bytes": size, "seconds": seconds}


def _model_folder(model: Path) -> Path:
    """The model folder of a run, or the folder itself; a model for another task is refused."""
    found = [folder for folder in (model / "best", model) if (folder / "config.json").is_file()]
    if not found:
        raise RequestError(f"{model} is neither a run nor a model folder: it has no config.json")
    verify_folder(found[0])
    facts = read_json(found[0] / "config.json", Document).model_dump()
    task = facts.get("labo", facts).get("task", TASK)
    if task != TASK:
        raise RequestError(f"{model} holds a model for {task}, not for {TASK}")
    return found[0]


def _ranges(split: DocumentSplit, first: int, part_targets: int) -> list[tuple[int, int]]:
    """First and last document of each part from ``first`` on; depends on the lengths alone."""
    ends = np.cumsum(np.maximum(split.lengths - 1, 0))
    ranges = []
    while first < len(split):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + part_targets, side="right"))
        last = max(last, first + 1)
        ranges.append((first, last))
        first = last
    return ranges


class _Reader:
    """Predictions of a model for documents.

    Args:
        model: the model, in eval mode.
        split: the documents.
        top_k: predictions for each target.
        types: the tokens that can be predicted; output layers may be padded with others.
        block: the most tokens the model sees at once.
    """

    def __init__(
        self, model: LanguageModel, split: DocumentSplit, top_k: int, types: int, block: int
    ) -> None:
        self.model, self.split = model, split
        self.top_k, self.types, self.block = top_k, types, block
        pad = getattr(model.causal.config, "pad_token_id", None)
        self.filler = 0 if pad != 0 else 1

    def documents(self, first: int, last: int) -> Iterator[Rows]:
        """The rows of the documents from ``first`` to before ``last``, in order."""
        columns = cut(self.split.lengths[first:last], self.block, whole=False)
        pieces = sorted(zip(*(c.tolist() for c in columns), strict=True), key=lambda x: x[2])
        found: list[list[tuple[int, Rows]]] = [[] for _ in range(first, last)]
        at_once = max(1, _TOKENS_AT_ONCE // self.block)
        for start in range(0, len(pieces), at_once):
            part = [(first + d, begin, length) for d, begin, length in pieces[start:][:at_once]]
            for (document, begin, _), rows in zip(part, self._pieces(part), strict=True):
                found[document - first].append((begin, rows))
        for parts in found:
            in_order = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
            none = np.empty((0, self.top_k))
            indices, log_p = zip(*in_order, strict=True) if in_order else ((none,), (none,))
            yield np.concatenate(indices), np.concatenate(log_p)

    @torch.inference_mode()
    def _pieces(self, pieces: list[tuple[int, int, int]]) -> list[Rows]:
        width = max(length for _, _, length in pieces)
        device = next(self.model.parameters()).device
        ids = torch.full((len(pieces), width), self.filler)
        target = torch.full((len(pieces), width), IGNORED)
        for row, (document, begin, length) in enumerate(pieces):
            ids[row, :length] = _tensor(self.split.tokens(document, begin, length))
            target[row, :length] = _tensor(self.split.labels(document, begin + 1, length))
        learned = target != IGNORED
        positions = torch.arange(width, device=device).expand(len(pieces), -1)
        head = self.model(ids.to(device), positions)
        head = head._replace(states=head.states[learned.to(device)])
        found = []
        for logits, _ in blocks(head, target[learned]):
            top = logits.log_softmax(-1)[:, : self.types].topk(self.top_k)
            found.append((top.indices.int().cpu(), top.values.cpu()))
        counts = learned.sum(-1).tolist()
        columns = [torch.cat(column).split(counts) for column in zip(*found, strict=True)]
        return [(i.numpy(), v.numpy()) for i, v in zip(*columns, strict=True)]


def _tensor(tokens: Any) -> Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64))


def stored_rows(
    stored: StoredTeacher, split: DocumentSplit, places: np.ndarray[Any, np.dtype[np.int64]]
) -> tuple[Tensor, Tensor]:
    """The stored predictions of targets: indices and log-probabilities, each (n, k).

    Args:
        stored: the predictions.
        split: the training documents.
        places: (n, 2), the document of each target, and the index of the token in it.
    """
    shape = (len(places), stored.top_k)
    indices, log_p = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
    changes = np.flatnonzero(np.diff(places[:, 0], prepend=-1, append=-1))
    for start, stop in pairwise(changes.tolist()):
        document = int(places[start, 0])
        number = places[start:stop, 1] - 1
        if split.masked:  # predictions are stored for the learned tokens only
            number = np.searchsorted(np.flatnonzero(split.labels(document)[1:] != IGNORED), number)
        found = stored.sample(document)
        indices[start:stop], log_p[start:stop] = (column[number] for column in found)
    return torch.from_numpy(indices), torch.from_numpy(log_p)
