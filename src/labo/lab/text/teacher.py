"""``labo teacher``: the k most probable tokens of a model for every target, stored for training.

The training samples of a prepared folder are read once. For every token that is to be learned, the
indices and the log-probabilities of the k most probable tokens are written (see
:mod:`labo.lab.text.stored`). Training reads them by sample and token, so it may pack, shuffle and
batch the samples as it likes. The package of a task has a module ``teacher`` with a
:class:`TrainingPredictions` named ``PREDICTIONS``.
"""

from __future__ import annotations

import importlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..command_options import validated
from ..errors import DataError, LabError, RequestError
from ..pretrained import folder_digest
from ..run.files import Document, read_json, remove_folder, sha256
from ..tasks import TASKS, find_model
from .arrow import IGNORED
from .folder import MANIFEST, Maker, PreparedFolder, check_apart, was_made_by
from .forced import blocks
from .head import Head
from .model import to_accelerator
from .options import Sampling, TeacherOptions
from .pretrained_tokenizer import vocabulary_digest
from .stored import Rows, StoredSettings, StoredTeacher, StoredWriter

_PART_TARGETS = 1 << 17  # of a part, of which the last unfinished one is lost when interrupted


@dataclass(frozen=True)
class ClassSelection:
    """How k entries are taken from a prediction; what is left of k is padding, -1 and -inf.

    "top" takes the most probable tokens, no more than reach ``top_p`` together. "random" draws k
    times from the prediction; each token has the share of the draws that it got. The mean of these
    is the prediction, so that the gradient of a KL divergence to them is unbiased; the k most
    probable tokens lean to their own.
    """

    top_k: int
    top_p: float = 1.0
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling == "random" and self.top_p < 1:
            raise RequestError("--top-p goes with --sampling top")

    def __str__(self) -> str:
        if self.sampling == "random":
            return f"random, seed {self.seed}"
        return "top" if self.top_p == 1 else f"top, p {self.top_p:g}"

    def __call__(self, log_p: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Indices, int32, and log-probabilities, (N, k), of predictions (N, V)."""
        if self.sampling == "random":
            return self._drawn(log_p, rng)
        top = log_p.topk(self.top_k)
        return self.nucleus(top.indices, top.values)

    def nucleus(self, indices: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Of the most probable tokens, in order, those that are needed to reach top_p."""
        before = log_p.double().exp().cumsum(-1) - log_p.double().exp()
        beyond = before >= self.top_p
        return indices.int().masked_fill(beyond, -1), log_p.masked_fill(beyond, -math.inf)

    def _drawn(self, log_p: Tensor, rng: torch.Generator | None) -> tuple[Tensor, Tensor]:
        k = self.top_k
        draws = torch.multinomial(log_p.float().cpu().exp(), k, replacement=True, generator=rng)
        draws = draws.sort(-1).values
        new = torch.ones_like(draws, dtype=torch.bool)
        new[:, 1:] = draws[:, 1:] != draws[:, :-1]
        place = new.long().cumsum(-1) - 1  # of each draw among the different tokens of its row
        counts = torch.zeros(draws.shape).scatter_add_(-1, place, torch.ones(draws.shape))
        indices = torch.full_like(draws, -1).scatter_(-1, place, draws)
        return indices.int(), (counts / k).log()


class TrainingPredictions(ABC):
    """What a model predicts for the training samples of a prepared folder.

    ``block`` is the most tokens that the model may see at once; None leaves it to the model.

    Attributes:
        maker: what makes such prepared folders.
        fingerprint, vocabulary: of the prepared data, and of the vocabulary of the targets.
        types: the tokens that can be predicted; output layers may be padded with others.
        targets: (samples,), how many targets each sample has at most.
        model: in eval mode; None if a server answered.
        selection: which tokens are stored; set before :meth:`samples`, as ``rng`` of its draws.
    """

    maker: ClassVar[Maker]
    served: ClassVar[type[Any] | None] = None
    """What takes the place of this class for the answers of a server."""
    types: int
    block: int
    targets: npt.NDArray[np.int64]
    model: nn.Module | None = None
    selection: ClassSelection
    rng: torch.Generator

    @abstractmethod
    def __init__(self, folder: Path, data: Path, block: int | None) -> None: ...

    def take(self, data: PreparedFolder[Any, Any], tokenizer: Any) -> None:
        """Note which data and which tokenizer of the targets the predictions are for."""
        self.fingerprint, self.vocabulary = data.fingerprint, vocabulary_digest(tokenizer)

    @abstractmethod
    def samples(self, first: int, last: int) -> Iterator[Rows]:
        """The predictions for the samples from ``first`` to before ``last``, in order."""

    def most_probable(self, head: Head, target: Tensor) -> list[Rows]:
        """The most probable tokens at the targets (N, T) of each row; IGNORED is no target."""
        learned = target != IGNORED
        selected = []
        for logits, _ in blocks(head.at(learned.to(head.states.device)), target[learned]):
            indices, log_p = self.selection(logits.log_softmax(-1)[:, : self.types], self.rng)
            selected.append((indices.cpu(), log_p.cpu()))
        counts = learned.sum(-1).tolist()
        columns = [torch.cat(column).split(counts) for column in zip(*selected, strict=True)]
        return [(i.numpy(), v.numpy()) for i, v in zip(*columns, strict=True)]


def store(
    model: str | Path | None,
    data: str | Path,
    out: Path,
    *,
    served: Path | None = None,
    force: bool = False,
    part_targets: int = _PART_TARGETS,
    **options: Any,
) -> dict[str, Any]:
    """Write the predictions of a model for the training samples of a prepared folder.

    Args:
        model: a run, or a Hugging Face folder; None for ``served``.
        data: made by ``labo prepare-text`` or ``labo prepare``, with the tokenizer of the model.
        out: the folder to write.
        served: a file with the answers of a server in place of the model, see
            :mod:`labo.lab.language_modeling.served`.
        force: replace a finished folder.
        part_targets: targets of a part. A part is written as a whole.
        **options: fields of :class:`labo.lab.text.options.TeacherOptions`.

    Returns:
        What was written: targets, bytes, and seconds of this call.
    """
    chosen, data = validated(TeacherOptions, options), Path(data).expanduser()
    top_k, model = chosen.top_k, Path(model or "").expanduser()
    selection = ClassSelection(top_k, chosen.top_p, chosen.sampling, chosen.seed)
    task, kind = _find_predictions(data)
    predictions: TrainingPredictions
    if served is not None:
        if chosen.block is not None:
            raise RequestError("--block goes with a model, not with --from")
        if kind.served is None:
            raise RequestError(f"--from is for documents of `labo prepare-text`; {data} has none")
        check_apart(out, [data])
        served = served.expanduser()
        predictions = kind.served(served, data, selection)
        teacher, digest = served.name, sha256(served)
    else:
        folder, _ = find_model(model, task, foreign=True)
        check_apart(out, [data, folder])
        predictions = kind(folder, data, chosen.block)
        teacher, digest = model.name, folder_digest(str(folder))
        assert predictions.model is not None
        to_accelerator(predictions.model)
    if top_k > predictions.types:
        raise RequestError(f"--top-k {top_k}: the vocabulary has {predictions.types} types")
    settings = StoredSettings(
        data=predictions.fingerprint,
        vocabulary=predictions.vocabulary,
        model=digest,
        top_k=top_k,
        block=predictions.block,
        precision=chosen.precision,
        selection=str(selection),
    )
    predictions.selection = selection
    started = time.monotonic()
    try:
        with StoredWriter(out, settings, force=force) as writer:
            for first, last in _ranges(predictions.targets, writer.samples, part_targets):
                # The draws of a part do not depend on whether the work was interrupted.
                predictions.rng = torch.Generator().manual_seed(chosen.seed * 1_000_003 + first)
                writer.add(predictions.samples(first, last))
            writer.finish({"teacher": teacher})
    except DataError:
        remove_folder(writer.folder)  # of a file that is refused nothing is kept
        raise
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error
    stored = StoredTeacher(out)
    size = sum(path.stat().st_size for path in stored.path.glob("*.arrow"))
    seconds = time.monotonic() - started
    return {"targets": stored.about.targets, "bytes": size, "seconds": seconds}


def _find_predictions(data: Path) -> tuple[str, type[TrainingPredictions]]:
    """The task that a folder was prepared for, and its class."""
    modules = {task: f"{package}.teacher" for task, package in TASKS.items()}
    kinds: dict[str, type[TrainingPredictions]] = {
        task: importlib.import_module(module).PREDICTIONS
        for task, module in modules.items()
        if find_spec(module) is not None
    }
    for task, kind in kinds.items():
        if was_made_by(kind.maker, data):
            return task, kind
    if (data / MANIFEST).is_file():
        read_json(data / MANIFEST, Document)  # says what is wrong with it
    commands = " or ".join(f"`{kind.maker.command}`" for kind in kinds.values())
    raise DataError(f"{data}: no prepared text here; {commands} makes it")


def _ranges(
    targets: npt.NDArray[np.int64], first: int, part_targets: int
) -> Iterator[tuple[int, int]]:
    """First and last sample of each part from ``first`` on; depends on the lengths alone."""
    ends = np.cumsum(targets)
    while first < len(targets):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + part_targets, side="right"))
        last = max(last, first + 1)
        yield first, last
        first = last
