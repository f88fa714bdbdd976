"""``calibration.json``: the temperature that was fitted to a model, in the folder of the model.

It lies in ``best`` of a run, written by ``labo calibrate``, and goes with a copy of that folder. It
names the model by its checksum, so that it is never applied to another one, and has a checksum of
its own content.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ConfigDict, Field

from ..errors import RequestError
from . import files as atomic
from .directory import MODEL

FILE = "calibration.json"


class Calibration(atomic.Document):
    """A fitted temperature, and what it was fitted on."""

    model_config = ConfigDict(protected_namespaces=())

    temperature: float = Field(gt=0)  # T, which divides the logits of the model as it was trained
    folded: bool  # whether the saved model is divided by it already
    split: str  # what it was fitted on
    data: str  # the fingerprint of that data
    targets: int  # how many targets that has
    nll_before: float  # mean negative log-likelihood there at T = 1, in nats
    nll_after: float  # the same at T
    model: str  # the SHA-256 of the model file it belongs to
    made_with: dict[str, str | None]  # versions of labo, torch and Python

    @property
    def divisor(self) -> float:
        """What the logits of the saved model are still to be divided by; 1 if T is folded in."""
        return 1.0 if self.folded else self.temperature

    def as_json(self) -> str:
        """The content of the file, with a checksum of it."""
        sealed = atomic.sealed(self.model_dump(mode="json"))
        return json.dumps(sealed, indent=2, allow_nan=False) + "\n"


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration of the model in a folder; None if there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    again = "run `labo calibrate` again, or remove it"
    try:
        calibration = atomic.read_json(path, Calibration)
    except RequestError as error:
        raise RequestError(f"{error}: {again}") from error
    document = calibration.model_dump()
    if atomic.CHECKSUM not in document or not atomic.seal_fits(document):
        raise RequestError(
            f"{path} was changed after it was written (its checksum does not fit): {again}"
        )
    try:
        model = atomic.sha256(folder / MODEL)
    except OSError as error:
        raise RequestError(f"{folder / MODEL} cannot be read: {error.strerror}") from error
    if model != calibration.model:
        raise RequestError(f"{path} belongs to another model than {MODEL} beside it: {again}")
    return calibration


def divisor_of(folder: Path) -> float:
    """What the logits of the model in a folder are to be divided by: 1 if it is not calibrated."""
    calibration = read_calibration(folder)
    return 1.0 if calibration is None else calibration.divisor
