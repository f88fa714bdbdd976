"""Export an image classifier to ONNX, for runtimes without PyTorch.

The exported model takes pixels, uint8 (N, C, H, W) with any N, and returns logits and
probabilities. It normalizes the pixels itself and divides the logits by the temperature of ``labo
calibrate``. Its metadata hold the names of the classes, the temperature, and how an image of
another size is brought to H x W.
"""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import LabError, RequestError
from ..run import files as atomic
from .predict import Predictor

try:
    import onnx
    import onnxscript  # noqa: F401  # the exporter of PyTorch needs it
except ModuleNotFoundError as error:
    raise RequestError("to export an image classifier, install torch-labo[onnx]") from error


class _FromPixels(nn.Module):
    """Pixels (N, C, H, W) uint8 to logits and probabilities (N, K)."""

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.model, self.temperature = predictor.model, predictor.temperature
        self.register_buffer("mean", torch.tensor(predictor.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(predictor.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model((images.float() / 255 - self.mean) / self.std) / self.temperature
        return logits, logits.softmax(-1)


def export(run: str | Path, out: str | Path) -> str:
    """Write the model of a run as an ONNX file.

    Args:
        run: a run directory or a model folder.
        out: the file to write; it must not exist.

    Returns:
        The Python lines that classify with it.

    Raises:
        RequestError: there is no image classifier, or the file exists.
        LabError: PyTorch cannot export this model.
    """
    out = Path(out)
    if out.exists():
        raise RequestError(f"{out} exists: choose another --out")
    predictor = Predictor(run, device="cpu")
    shape = (predictor.channels, predictor.view.height, predictor.view.width)
    # Two: PyTorch takes a size of 1 for one that never changes.
    example = torch.zeros(2, *shape, dtype=torch.uint8)
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    try:
        exporter.setLevel(logging.ERROR)  # it warns about what is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # and about itself
            program = torch.onnx.export(
                _FromPixels(predictor).eval(),
                (example,),
                input_names=["images"],
                output_names=["logits", "probabilities"],
                dynamic_shapes={"images": {0: "batch"}},
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise LabError(f"{run}: PyTorch cannot export this model to ONNX: {reason}") from error
    finally:
        exporter.setLevel(level)
    assert program is not None
    model = program.model_proto
    facts = {
        "classes": list(predictor.classes),
        "input": asdict(predictor.view),
        "temperature": predictor.temperature,
        "calibrated": predictor.calibrated,
    }
    onnx.helper.set_model_props(model, {"labo": json.dumps(facts)})
    with atomic.explained("write", out, atomic.temporary(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic.create(atomic.temporary(out)).close()
        onnx.save(model, atomic.temporary(out))
        atomic.put_in_place(out)
    return usage(out, shape)


def usage(out: Path, shape: tuple[int, int, int]) -> str:
    """Python lines that classify images with an exported model."""
    return "\n".join(
        [
            "import json, numpy, onnxruntime",
            f"session = onnxruntime.InferenceSession({str(out)!r})",
            'facts = json.loads(session.get_modelmeta().custom_metadata_map["labo"])',
            f"images = numpy.zeros((1, {', '.join(map(str, shape))}), dtype=numpy.uint8)",
            'logits, probabilities = session.run(None, {"images": images})',
            'print(facts["classes"][probabilities[0].argmax()], probabilities[0].max())',
        ]
    )
