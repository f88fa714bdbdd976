"""Translation models from a Hugging Face folder: Marian, T5, BART, mBART, M2M100, NLLB.

A :class:`FolderTranslator` stands where a
:class:`labo.lab.translation.model.TranslationModel` stands: it returns hidden states and the output
layer. It knows no architecture. It calls the encoder and the decoder of an
``AutoModelForSeq2SeqLM``, and compares the logits with those of the model when it is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from ..errors import RequestError
from ..pretrained import load_config, load_folder, merged, published
from ..text.dropout import FastDropout
from ..text.head import Head, mean_of_layers
from ..text.pretrained_tokenizer import vocabulary_digest, vocabulary_size
from .framing import folder_tokenizers
from .model import TranslationModel, load_marian
from .prepared import Pair, Prepared

__all__ = [
    "AnyTranslator",
    "FolderTranslator",
    "fitting_config",
    "load_saved",
    "load_translator",
    "start_tokens",
    "target_types",
    "translation_config",
]


class FolderTranslator(nn.Module):
    """An encoder-decoder of transformers without the multiplication by its output layer.

    Args:
        network: the model.

    Raises:
        RequestError: its logits are not those of its output layer.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self.scale = 1.0  # of the hidden states; T5 has another one
        self.scale = self._find_scale()

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return int(self.network.get_output_embeddings().weight.shape[1])

    def forward(
        self, source: Tensor, mask: Tensor | None, prefix: Tensor, inner_layers: int = 0
    ) -> Head:
        """Hidden states for the next target token after each prefix.

        Arguments as for :class:`labo.lab.translation.model.TranslationModel`. The prefix starts
        with :func:`start_tokens`.
        """
        network = self.network
        asked = {"output_hidden_states": True} if inner_layers else {}
        with FastDropout():
            encoded = network.get_encoder()(input_ids=source, attention_mask=mask)
            found = network.get_decoder()(
                input_ids=prefix,
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=mask,
                use_cache=False,
                **asked,
            )
        inner = mean_of_layers(found.hidden_states, inner_layers) if inner_layers else None
        states = found.last_hidden_state
        if self.scale != 1:
            states = states * self.scale
        return Head(states, network.get_output_embeddings().weight, self._bias(), inner=inner)

    def _bias(self) -> Tensor | None:
        parts = [
            self.network.get_output_embeddings().bias,
            getattr(self.network, "final_logits_bias", None),  # Marian, BART, mBART
        ]
        given = [part.reshape(-1) for part in parts if part is not None]
        return torch.stack(given).sum(0) if given else None

    @torch.no_grad()
    def _find_scale(self) -> float:
        """What the hidden states are multiplied by: 1, or 1 / sqrt(width) for T5."""
        expected, head = self._probe()
        scales = (1.0, self.width**-0.5)
        errors = [(head.logits(head.states * s) - expected).abs().max().item() for s in scales]
        error, scale = min(zip(errors, scales, strict=True))
        if not error <= 1e-3 * (1 + expected.abs().max().item()):
            raise RequestError(
                f"a model of type {self.network.config.model_type} changes its logits after its "
                "output layer: it cannot be trained here"
            )
        return scale

    def _probe(self) -> tuple[Tensor, Head]:
        """Logits of the model for a few tokens, and what this module has for them."""
        config, training = self.network.config, self.network.training
        usable = [i for i in range(min(config.vocab_size, 16)) if i != config.pad_token_id]
        ids = torch.tensor([usable], device=self.network.device)
        self.network.eval()
        expected = self.network(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        head = self(ids, None, ids)
        self.network.train(training)
        return expected, head

    def plain(self) -> PreTrainedModel:
        """The model for decoding. It shares memory with this one."""
        return self.network

    @property
    def head_name(self) -> str:
        """The name of the output layer."""
        layer = self.network.get_output_embeddings()
        return next(name for name, module in self.network.named_modules() if module is layer)

    @staticmethod
    def network_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A ``state_dict()`` of this module as one of the model of transformers."""
        return {name.removeprefix("network."): tensor for name, tensor in weights.items()}

    def plain_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a plain model folder holds of a ``state_dict()``: tied matrices once."""
        network = self.network
        own = dict(network.named_parameters(remove_duplicate=False))
        tied = {
            name
            for name, origin in network.all_tied_weights_keys.items()
            if name in own and own[name] is own.get(origin)
        }
        left_out = {*(network._keys_to_ignore_on_save or ()), *tied}
        plain = merged(network, self.network_weights(weights))
        kept = {name: tensor for name, tensor in plain.items() if name not in left_out}
        return published(network, kept)

    def plain_config(self) -> dict[str, Any]:
        """The config with which plain transformers loads the model."""
        config: dict[str, Any] = json.loads(self.network.config.to_json_string(use_diff=False))
        return config | {"architectures": [type(self.network).__name__]}

    @torch.no_grad()
    def fold_temperature(self, temperature: float) -> None:
        """Divide the logits by a temperature for good.

        The output layer is mostly tied to the embeddings and stays as it is. The states it is given
        come out of the last normalization of the decoder, which is divided instead.

        Raises:
            RequestError: the logits cannot be divided exactly.
        """
        decoder = self.network.get_decoder()
        last = getattr(decoder, "layer_norm", None) or getattr(decoder, "final_layer_norm", None)
        if last is None and hasattr(decoder, "layers"):
            last = getattr(decoder.layers[-1], "final_layer_norm", None)
        before, _ = self._probe()
        bias = getattr(self.network, "final_logits_bias", None)
        parts = [getattr(last, "weight", None), getattr(last, "bias", None), bias]
        for part in parts:
            if part is not None:
                part.div_(temperature)
        after, _ = self._probe()
        if not torch.allclose(after * temperature, before, rtol=1e-3, atol=1e-3):
            raise RequestError(
                f"a temperature cannot be folded into a model of type "
                f"{self.network.config.model_type}"
            )


AnyTranslator = TranslationModel | FolderTranslator


# ------------------------------------------------------------------ folders


def translation_config(folder: str | Path) -> PretrainedConfig:
    """The config of a folder.

    Raises:
        RequestError: it holds no encoder-decoder.
    """
    config = load_config(folder)
    if not config.is_encoder_decoder:
        raise RequestError(
            f"{folder}: holds a model of type {config.model_type}, which is no encoder-decoder and "
            "cannot be trained to translate"
        )
    return config


def load_translator(folder: str | Path) -> FolderTranslator:
    """A translation model from a folder, on the CPU and in evaluation mode.

    What its own ``generation_config.json`` says is not used: search follows the recipe.

    Raises:
        RequestError: it holds none, or an incomplete one.
    """
    translation_config(folder)
    network = load_folder(AutoModelForSeq2SeqLM, folder)
    network.generation_config = GenerationConfig()
    for part in (network.get_encoder(), network.get_decoder()):
        if hasattr(part, "layerdrop"):
            part.layerdrop = 0.0  # processes must use the same layers
    return FolderTranslator(network)


def load_saved(folder: Path, pair: Pair) -> AnyTranslator:
    """A model that a run saved, on the CPU and in evaluation mode.

    Args:
        folder: the folder.
        pair: one of its directions, which shows where it started from.
    """
    if pair.frame is None:
        return TranslationModel(load_marian(folder))
    return load_translator(folder)


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

    Raises:
        RequestError: the model has no start token.
    """
    frame = pair.frame
    if frame is not None and frame.target_after and config.model_type == "mbart":
        return tuple(frame.target_after)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise RequestError("config.json of the model has no decoder_start_token_id")
    return (start,) if frame is None else (start, *frame.target_before, *frame.target_after)


def fitting_config(folder: str | Path, data: Prepared) -> PretrainedConfig:
    """The config of a folder whose model fits prepared data.

    Raises:
        RequestError: it holds no encoder-decoder, or the data was prepared with another tokenizer.
    """
    config = translation_config(folder)
    theirs, ours = folder_tokenizers(folder), (data.tokenizer, data.target_tokenizer)
    fits = list(map(vocabulary_digest, theirs)) == list(map(vocabulary_digest, ours))
    # Subwords that `labo prepare` learned are those of its own models.
    if not fits or not (data.pretrained or hasattr(config, "labo")):
        raise RequestError(
            f"{data.path} was not prepared with the tokenizer of {folder}: "
            f"`labo prepare ... --tokenizer {folder}` does that"
        )
    _check_tokens(folder, config, data.target_tokenizer)
    return config


def _check_tokens(folder: str | Path, config: PretrainedConfig, tokenizer: Any) -> None:
    """Refuse a folder whose model and tokenizer disagree.

    Raises:
        RequestError: a special token has another id, or the model has too few types.
    """
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(config, name) != getattr(tokenizer, name):
            raise RequestError(
                f"{folder}: {name} is {getattr(config, name)} in config.json and "
                f"{getattr(tokenizer, name)} in the tokenizer"
            )
    if target_types(config) < vocabulary_size(tokenizer):
        raise RequestError(f"{folder}: its tokenizer has more types than its output layer")
