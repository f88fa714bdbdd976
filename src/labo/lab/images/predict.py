"""The class of image files: ``labo predict``.

:class:`Predictor` is the way in from Python. An image is resized, cropped and normalized as in
evaluation, and the logits are divided by the temperature of ``labo calibrate`` if there is one.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor

from ..errors import DataError, RequestError, printable, printable_on
from ..run.calibration import read_calibration
from ..run.files import read_bytes
from ..tasks import find_model
from .augment import normalize
from .folders import SUFFIXES
from .task import ImageTask
from .windows import View, read_image, stacked

Format = Literal["csv", "jsonl"]

_TASK = "image_classification"
_IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image."""

    file: Path
    classes: tuple[str, ...]  # most probable first
    probabilities: tuple[float, ...]  # of these classes, calibrated if the model is

    def record(self) -> dict[str, Any]:
        """As a line of JSON."""
        top = zip(self.classes, self.probabilities, strict=True)
        return {
            "file": str(self.file),
            "class": self.classes[0],
            "probability": self.probabilities[0],
            "top": [{"class": name, "probability": p} for name, p in top],
        }


class Predictor:
    """A trained image classifier.

    Args:
        run: a run directory, or a model folder itself.
        device: where to compute; by default the accelerator of this machine, or its CPU.

    Attributes:
        classes: the names of the classes, in the order of the logits.
        temperature: what the logits of the saved model are divided by; 1 without ``labo
            calibrate``, and if the temperature is folded into the model.
        calibrated: whether a temperature was fitted.

    Raises:
        RequestError: there is no image classifier in it.

    Example::

        for prediction in Predictor("runs/digits-labo-s0").predict(["seven.png"]):
            print(prediction.classes[0], prediction.probabilities[0])
    """

    def __init__(self, run: str | Path, *, device: str | None = None) -> None:
        folder, facts = find_model(run, _TASK)
        try:
            self.view = View(**facts["input"])
        except (KeyError, TypeError) as error:
            raise RequestError(
                f"{folder / 'config.json'} does not say the size of the images; it is of an older "
                "version of labo: train the model again"
            ) from error
        self.classes: tuple[str, ...] = tuple(facts["classes"])
        self.channels: int = facts["in_channels"]
        if self.channels not in (1, 3):
            raise RequestError(
                f"{run} takes images of {self.channels} channels; files are read as grey (1) or "
                "RGB (3)"
            )
        self.mean, self.std = facts["mean"], facts["std"]
        calibration = read_calibration(folder)
        self.calibrated = calibration is not None
        self.temperature = 1.0 if calibration is None else calibration.divisor
        self.device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
        self.model = ImageTask.load_model(folder).eval().to(self.device)

    def predict(
        self, files: Iterable[str | Path], *, top: int = 5, problems: list[str] | None = None
    ) -> Iterator[Prediction]:
        """The most probable classes of each image.

        Args:
            files: image files.
            top: how many classes, at most all of them.
            problems: gets a line for each file that is no image, which is then left out; None
                raises an error at the first one.

        Raises:
            DataError: a file is no image, and ``problems`` is None.
        """
        paths = map(Path, files)
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            while chunk := list(islice(paths, _IMAGES_AT_ONCE)):
                read = []
                for path, image in zip(chunk, workers.map(self._read, chunk), strict=True):
                    if isinstance(image, Tensor):
                        read.append((path, image))
                    elif problems is None:
                        raise image
                    else:
                        problems.append(str(image))
                if read:
                    yield from self._predict(read, top)

    def probabilities(self, images: Tensor) -> Tensor:
        """Calibrated probabilities (N, K) of images (N, C, H, W) uint8, on the CPU."""
        with torch.inference_mode():
            inputs = normalize(images.to(self.device), self.mean, self.std)
            logits: Tensor = self.model(inputs)
            return (logits.double() / self.temperature).softmax(-1).cpu()

    def _read(self, path: Path) -> Tensor | DataError:
        """The image as the model takes it, or what is wrong with the file."""
        try:
            return read_image(path, self.view, self.channels)
        except DataError as error:
            return error

    def _predict(self, read: Sequence[tuple[Path, Tensor]], top: int) -> Iterator[Prediction]:
        probabilities = self.probabilities(stacked(image for _, image in read))
        best = probabilities.topk(min(top, len(self.classes)))
        rows = zip(read, best.values.tolist(), best.indices.tolist(), strict=True)
        for (file, _), p, index in rows:
            yield Prediction(file, tuple(self.classes[i] for i in index), tuple(p))


def find_files(names: Iterable[str | Path]) -> Iterator[Path]:
    """The files of these names; of a folder all images in it and in its folders, sorted."""
    for path in map(Path, names):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not inside:
            raise RequestError(f"{path}: no image in it ({', '.join(SUFFIXES)})")
        yield from inside


def read_list(name: str) -> list[str]:
    """The names in a list of files (- is stdin), one per line; empty lines are left out."""
    content = sys.stdin.buffer.read() if name == "-" else read_bytes(Path(name))
    return [line for line in os.fsdecode(content).splitlines() if line.strip()]


def write_predictions(predictions: Iterable[Prediction], file: TextIO, form: Format) -> None:
    """Write a line for each prediction.

    A table (``csv``) has the columns ``file``, ``class`` and ``probability``, then ``class_2``,
    ``probability_2`` and so on. A name that begins like a formula of a spreadsheet has an
    apostrophe before it, and control characters are escaped.
    """
    if form == "jsonl":
        for prediction in predictions:
            line = json.dumps(prediction.record(), ensure_ascii=False) + "\n"
            file.write(printable_on(file, line))
        return
    table = csv.writer(file, lineterminator="\n")
    for number, prediction in enumerate(predictions):
        if number == 0:
            more = range(2, len(prediction.classes) + 1)
            further = [name for i in more for name in (f"class_{i}", f"probability_{i}")]
            table.writerow(["file", "class", "probability", *further])
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        cells = [str(prediction.file), *(cell for pair in pairs for cell in pair)]
        table.writerow([_harmless(cell) if isinstance(cell, str) else cell for cell in cells])


def _harmless(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula, and no terminal for a command."""
    text = printable(cell).replace("\n", "\\x0a").replace("\t", "\\x09")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
