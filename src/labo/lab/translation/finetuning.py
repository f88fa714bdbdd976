"""Translation models from a Hugging Face folder: Marian, T5, BART, mBART, M2M100, NLLB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PretrainedConfig

from ..errors import RequestError
from ..pretrained import load_config, load_folder
from ..text.pretrained_tokenizer import vocabulary_digest, vocabulary_size
from .framing import folder_tokenizers
from .model import EncoderDecoder
from .prepared import Pair, Prepared


def translation_config(folder: str | Path) -> PretrainedConfig:
    """The config of a folder, which must hold an encoder-decoder."""
    config = load_config(folder)
    if not config.is_encoder_decoder:
        raise RequestError(
            f"{folder}: holds a model of type {config.model_type}, which is no encoder-decoder and "
            "cannot be trained to translate"
        )
    return config


def load_translator(folder: str | Path, *, whole: bool = False) -> EncoderDecoder:
    """A translation model from a folder, on the CPU and in evaluation mode.

    What its own ``generation_config.json`` says is not used: search follows the recipe. ``whole``:
    every weight in the folder must be part of the model.
    """
    translation_config(folder)
    network = load_folder(AutoModelForSeq2SeqLM, folder, whole=whole)
    network.generation_config = GenerationConfig()
    for part in (network.get_encoder(), network.get_decoder()):
        if hasattr(part, "layerdrop"):
            part.layerdrop = 0.0  # processes must use the same layers
    return EncoderDecoder(network)


# ------------------------------------------------------------------ what a config says


def target_types(config: PretrainedConfig) -> int:
    """Rows of the output layer."""
    if getattr(config, "share_encoder_decoder_embeddings", True):
        return int(config.vocab_size)
    return int(config.decoder_vocab_size)


def start_tokens(config: PretrainedConfig, pair: Pair) -> tuple[int, ...]:
    """What the decoder is given before a translation.

    The start token of the model, and the token that its tokenizer puts before a target: the
    language of mBART-50, M2M100 and NLLB, <s> of BART. mBART starts with the language itself.
    """
    frame = pair.frame
    if frame is not None and frame.target_after and config.model_type == "mbart":
        return tuple(frame.target_after)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise RequestError("config.json of the model has no decoder_start_token_id")
    return (start,) if frame is None else (start, *frame.target_before, *frame.target_after)


def fitting_config(folder: str | Path, data: Prepared) -> PretrainedConfig:
    """The config of a folder whose model fits prepared data; refused if its tokenizer does not."""
    config = translation_config(folder)
    theirs, ours = folder_tokenizers(folder), (data.tokenizer, data.target_tokenizer)
    fits = list(map(vocabulary_digest, theirs)) == list(map(vocabulary_digest, ours))
    # Subwords that `labo prepare` learned are those of its own models.
    if not fits or not (data.pretrained or hasattr(config, "labo")):
        raise RequestError(
            f"{data.path} was not prepared with the tokenizer of {folder}: "
            f"`labo prepare ... --tokenizer {folder}` does that"
        )
    check_tokens(folder, config, data.target_tokenizer)
    return config


def check_tokens(folder: str | Path, config: PretrainedConfig, tokenizer: Any) -> None:
    """Refuse a folder whose model and tokenizer disagree."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(config, name) != getattr(tokenizer, name):
            raise RequestError(
                f"{folder}: {name} is {getattr(config, name)} in config.json and "
                f"{getattr(tokenizer, name)} in the tokenizer"
            )
    if target_types(config) < vocabulary_size(tokenizer):
        raise RequestError(f"{folder}: its tokenizer has more types than its output layer")
