"""Export a trained translation model for CTranslate2, which translates fast on a CPU.

CTranslate2's own converter for Marian expects the published models, which start from a row of zeros
and have their padding last. Models trained here start from ``</s>`` as fairseq's do, so they are
converted with the loader for BART that it is built on.

The exported folder stands by itself: the model, its tokenizers, and ``labo.json`` with what is done
to text before and after, and with the temperature of ``labo calibrate``. The exported weights are
those of the run: the scores of CTranslate2 are calibrated if the temperature is folded in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import MarianMTModel, PreTrainedTokenizerFast

from ..errors import LabError, RequestError
from ..run import files as atomic
from .model import BOS, PAD
from .translate import ModelFolder

try:
    from ctranslate2.converters import Converter
    from ctranslate2.converters.transformers import BartLoader
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
    from ctranslate2.specs.transformer_spec import TransformerSpec
except ModuleNotFoundError as error:
    raise RequestError("to export a model, install torch-labo[ctranslate2]") from error

# The logit of tokens that must not be generated; it fits in half precision.
_NEVER = -1e4


class _MarianConverter(Converter):  # type: ignore[misc]
    """A Marian model with its vocabularies, for CTranslate2."""

    def __init__(
        self,
        model: MarianMTModel,
        source: PreTrainedTokenizerFast,
        target: PreTrainedTokenizerFast,
    ) -> None:
        self.model, self.source, self.target = model, source, target

    def _load(self) -> TransformerSpec:
        model, config = self.model, self.model.config
        # Settings that the loader reads from a BART.
        config.normalize_before, config.normalize_embedding = False, False
        spec = BartLoader().get_model_spec(model)
        bias = model.final_logits_bias.squeeze(0).numpy().astype(np.float32)
        bias[[BOS, PAD]] = _NEVER
        spec.decoder.projection.bias = bias
        spec.register_source_vocabulary(_vocabulary(self.source))
        spec.register_target_vocabulary(_vocabulary(self.target))
        spec.config.bos_token = self.target.bos_token
        spec.config.eos_token = self.target.eos_token
        spec.config.unk_token = self.target.unk_token
        spec.config.decoder_start_token = self.target.eos_token
        return spec


def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [*tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]


def export(run: str | Path, out: str | Path, quantization: str | None = None) -> str:
    """Write the model of a run as a folder for CTranslate2; the Python lines that use it.

    ``quantization`` says how the weights are stored, such as int8; None keeps them as they are.
    """
    out = Path(out)
    if quantization is not None and quantization not in ACCEPTED_MODEL_TYPES:
        raise RequestError(
            f"--quantization {quantization}: choose from {', '.join(ACCEPTED_MODEL_TYPES)}"
        )
    if out.exists():
        raise RequestError(f"{out} exists: choose another --out")
    folder = ModelFolder(run)
    if folder.pretrained:
        raise RequestError(
            f"{folder.path} started from a pre-trained model; CTranslate2 has a converter for "
            f"those: ct2-transformers-converter --model {folder.path} --output_dir {out}"
        )
    model, tokenizers = folder.load().plain(), folder.tokenizers()
    unfinished = atomic.temporary(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic.remove_folder(unfinished)  # left by an export that was killed
        _MarianConverter(model, *tokenizers).convert(str(unfinished), quantization=quantization)
        _add_text(folder, unfinished)
        for file in sorted(unfinished.rglob("*")):
            atomic.flush(file)
        unfinished.rename(out)
        atomic.flush(out.parent)
    except OSError as error:
        raise LabError(f"cannot write {out}: {error.strerror or error}") from error
    except (ValueError, RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LabError(f"CTranslate2 cannot convert {folder.path}: {reason}") from error
    finally:
        atomic.remove_folder(unfinished)
    return usage(folder, out, model.config.max_position_embeddings)


def _add_text(folder: ModelFolder, out: Path) -> None:
    """Add the tokenizers, and what labo saved about the model."""
    source, target = folder.tokenizers()
    source.save_pretrained(out)
    if target is not source:
        target.save_pretrained(out / "target_tokenizer")
    facts: dict[str, Any] = {
        "pairs": [pair.entry() for pair in folder.pairs],
        "text": folder.text.model_dump(mode="json"),
        "decode": folder.decode.model_dump(mode="json"),
        "temperature": folder.temperature,
    }
    atomic.write_json(out / "labo.json", facts)


def usage(folder: ModelFolder, out: Path, positions: int) -> str:
    """Python lines that translate a sentence with an exported model."""
    pair, decode = folder.pairs[0], folder.decode
    options = ", ".join(f"{name}=True" for name, is_on in folder.text.model_dump().items() if is_on)
    source, result, pipeline = "text", "said", []
    if options:
        source, result = "pipeline.source(text)", "pipeline.restore(said)"
        pipeline = [
            "from labo.lab.translation.text import Pipeline, TextOptions",
            f"pipeline = Pipeline(TextOptions({options}), {pair.source!r}, {pair.target!r})",
        ]
    loaded = "transformers.AutoTokenizer.from_pretrained({!r})".format
    second = out / "target_tokenizer"
    tag = f"[{pair.tag!r}] + " if pair.tag else ""
    lines = [
        "import ctranslate2, transformers",
        *pipeline,
        f"translator = ctranslate2.Translator({str(out)!r})",
        f"tokenizer = {loaded(str(out))}",
        f"target_tokenizer = {loaded(str(second)) if second.is_dir() else 'tokenizer'}",
        "text = '...'",
        *(f"# {other}: {other.tag or 'no tag'}" for other in folder.pairs[1:]),
        f"tokens = {tag}tokenizer.convert_ids_to_tokens(tokenizer.encode({source}))",
        "best = translator.translate_batch(",
        f"    [tokens], beam_size={decode.beam}, length_penalty={decode.length_penalty},",
        f"    max_input_length={positions},",
        f"    min_decoding_length={decode.min_length}, max_decoding_length={positions - 1},",
        ")[0].hypotheses[0]",
        "said = target_tokenizer.decode(target_tokenizer.convert_tokens_to_ids(best))",
        f"print({result})",
    ]
    return "\n".join(lines)
