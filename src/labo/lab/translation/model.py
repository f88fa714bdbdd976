"""Translation models: encoder-decoders of ``transformers``, from a preset or from a folder.

Those from a preset are Marian models; nothing is downloaded. A saved model is a plain one, which
``AutoModelForSeq2SeqLM`` loads.

``MODEL_PRESETS`` has the dimensions. ``iwslt`` and ``base`` are those of the paper, ``small`` and
``tiny`` are for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.marian.modeling_marian import MarianAttention

from ..._names import Registry
from ...calibration.folding import evaluating
from ..errors import RequestError
from ..pretrained import load_config, load_folder
from ..text.head import Head, mean_of_layers
from ..text.model import FastDropout, TokenModel
from ..text.pretrained_tokenizer import vocabulary_digest, vocabulary_size
from .framing import folder_tokenizers
from .prepared import Pair, Prepared

NUM_SPECIAL = 4
BOS, PAD, EOS, _UNK = range(NUM_SPECIAL)  # the order of fairseq

MODEL_PRESETS = Registry(
    "preset",
    {
        "tiny": {"width": 128, "ffn": 512, "heads": 4, "layers": 2},
        "small": {"width": 256, "ffn": 1024, "heads": 4, "layers": 3},
        "iwslt": {"width": 512, "ffn": 1024, "heads": 4, "layers": 6},
        "base": {"width": 512, "ffn": 2048, "heads": 8, "layers": 6},
    },
)
_POSITIONS = 1024  # of a model whose positions are relative, so that it has no limit


def marian_config(
    vocabularies: tuple[int, int],
    *,
    width: int,
    ffn: int,
    heads: int,
    encoder_layers: int,
    decoder_layers: int,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
    embeddings: str = "shared",
    positions: int = 1024,
) -> MarianConfig:
    """The config of a Marian model trained from scratch, with the special tokens of fairseq.

    ``vocabularies`` are the sizes of source and target. ``embeddings`` is "shared" (one matrix for
    source, target and output layer), "decoder" (one for target and output layer) or "separate".
    """
    source, target = vocabularies
    return MarianConfig(
        vocab_size=source,
        decoder_vocab_size=target,
        share_encoder_decoder_embeddings=embeddings == "shared",
        tie_word_embeddings=embeddings != "separate",
        d_model=width,
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        num_hidden_layers=encoder_layers,
        dropout=dropout,
        attention_dropout=attention_dropout,
        activation_dropout=activation_dropout,
        activation_function="relu",
        max_position_embeddings=positions,
        scale_embedding=True,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
    )


class EncoderDecoder(TokenModel):
    """An encoder-decoder of transformers without the multiplication by its output layer.

    It knows no architecture. It calls the encoder and the decoder, and compares the logits with
    those of the model when it is made.
    """

    network: PreTrainedModel

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__(network)
        shift = getattr(network, "final_logits_bias", None)  # Marian, BART, mBART; mostly zeros
        self._shifted = shift is not None and bool(shift.any())
        self.scale = 1.0  # of the hidden states; T5 has another one
        self.scale = self._find_scale()

    def forward(
        self, source: Tensor, mask: Tensor | None, prefix: Tensor, inner_layers: int = 0
    ) -> Head:
        """Hidden states for the next target token after each prefix (N, T).

        ``mask`` (N, S) is 0 where the source is padding; None if there is no padding. Padding at
        the end of a prefix needs no mask, since attention looks only to the left. ``inner_layers``
        asks for the mean of the outputs of so many decoder layers, from the first one on.
        """
        encoder, decoder = self.inside.get_encoder(), self.inside.get_decoder()
        asked = {"output_hidden_states": True} if inner_layers else {}
        with FastDropout():
            encoded = encoder(attention_mask=mask, **self._embedded(source, encoder))
            found = decoder(
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=mask,
                use_cache=False,
                **self._embedded(prefix, decoder),
                **asked,
            )
        inner = mean_of_layers(found.hidden_states, inner_layers) if inner_layers else None
        states = found.last_hidden_state
        if self.scale != 1:
            states = states * self.scale
        return Head(states, self._output_weight(), self._bias(), inner=inner)

    def _embedded(self, ids: Tensor, part: Any) -> dict[str, Tensor]:
        """What the encoder or the decoder takes for token ids."""
        return {"input_ids": ids}

    def _output_weight(self) -> Tensor:
        weight: Tensor = self.inside.get_output_embeddings().weight
        return weight

    def _bias(self) -> Tensor | None:
        parts = [self.inside.get_output_embeddings().bias]
        parts += [self.inside.final_logits_bias] if self._shifted else []
        given = [part.reshape(-1) for part in parts if part is not None]
        return torch.stack(given).sum(0) if given else None

    def _find_scale(self) -> float:
        """What the hidden states are multiplied by: 1, or 1 / sqrt(width) for T5."""
        expected, head = self._probe()
        scales = (1.0, self.width**-0.5)
        errors = [(head.logits(head.states * s) - expected).abs().max().item() for s in scales]
        error, scale = min(zip(errors, scales, strict=True))
        if not error <= 1e-3 * (1 + expected.abs().max().item()):
            raise RequestError(
                f"a model of type {self.inside.config.model_type} changes its logits after its "
                "output layer: it cannot be trained here"
            )
        return scale

    @torch.no_grad()
    def _probe(self) -> tuple[Tensor, Head]:
        """Logits of the model for a few tokens, and what this module has for them."""
        ids = self.probe_ids(16)
        with evaluating(self.inside):
            expected = self.inside(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
            return expected, self(ids, None, ids)

    def plain(self) -> PreTrainedModel:
        """The model for decoding. It shares memory with this one."""
        return self.inside

    @torch.no_grad()
    def fold_temperature(self, temperature: float) -> None:
        """Divide the logits by a temperature for good; refused if that is not exact.

        The output layer is mostly tied to the embeddings and stays as it is. The states it is given
        come out of the last normalization of the decoder, which is divided instead.
        """
        decoder = self.inside.get_decoder()
        last = getattr(decoder, "layer_norm", None) or getattr(decoder, "final_layer_norm", None)
        if last is None and hasattr(decoder, "layers"):
            last = getattr(decoder.layers[-1], "final_layer_norm", None)
        before, _ = self._probe()
        bias = getattr(self.inside, "final_logits_bias", None)
        parts = [getattr(last, "weight", None), getattr(last, "bias", None), bias]
        for part in parts:
            if part is not None:
                part.div_(temperature)
        after, _ = self._probe()
        if not torch.allclose(after * temperature, before, rtol=1e-3, atol=1e-3):
            raise RequestError(
                f"a temperature cannot be folded into a model of type "
                f"{self.inside.config.model_type}"
            )


class TranslationModel(EncoderDecoder):
    """A Marian model that is trained from scratch.

    ``fixnorm`` normalizes every word embedding to length 1 when it is used, in the input and in the
    output layer (Nguyen and Chiang 2018). The saved model is a plain Marian model with normalized
    embeddings.

    Example:
        >>> config = marian_config((50, 50), width=8, ffn=16, heads=2, encoder_layers=1,
        ...                        decoder_layers=1)
        >>> model = fresh_translator(config)
        >>> states, weight, *_ = model(torch.tensor([[7, 8, 2]]), None, torch.tensor([[2, 9]]))
        >>> states.shape, weight.shape
        (torch.Size([1, 2, 8]), torch.Size([50, 8]))
    """

    stem = "marian"
    marian: MarianMTModel

    def __init__(self, marian: MarianMTModel, *, fixnorm: bool = False) -> None:
        self.fixnorm = fixnorm
        super().__init__(marian)

    def _find_scale(self) -> float:
        return 1.0

    def _embedded(self, ids: Tensor, part: Any) -> dict[str, Tensor]:
        if not self.fixnorm:
            return super()._embedded(ids, part)
        embedded = F.embedding(ids, _unit(part.embed_tokens.weight))
        # Marian scales given embeddings of the decoder, but not those of the encoder.
        scaled = part is self.marian.get_decoder()
        return {"inputs_embeds": embedded if scaled else embedded * part.embed_scale}

    def _output_weight(self) -> Tensor:
        weight = super()._output_weight()
        return _unit(weight) if self.fixnorm else weight

    def plain_weights(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights of a plain Marian model, without fixed positions; tied matrices once."""
        plain = super().plain_weights(self.state_dict() if weights is None else weights)
        embeddings = ("embed_tokens.weight", "shared.weight", "lm_head.weight")
        for name in plain if self.fixnorm else ():
            if name.endswith(embeddings):
                plain[name] = _unit(plain[name])
        return plain

    @torch.no_grad()
    def plain(self) -> MarianMTModel:
        """The Marian model for decoding. It shares memory with this one unless fixnorm is on."""
        if not self.fixnorm:
            return self.marian
        model = MarianMTModel(self.marian.config)
        model.load_state_dict(self.plain_weights(), strict=False)
        model.tie_weights()
        return model.to(self.marian.device)


def fresh_translator(config: MarianConfig, *, fixnorm: bool = False) -> TranslationModel:
    """A model with random weights, drawn from the generator of PyTorch."""
    marian = MarianMTModel(config)
    _initialise(marian, fixnorm)
    return TranslationModel(marian, fixnorm=fixnorm)


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings, dim=-1)


@torch.no_grad()
def _initialise(model: MarianMTModel, fixnorm: bool) -> None:
    """Initialize as fairseq does; with FixNorm the embeddings are small and uniform."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, MarianAttention):
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
    body = model.model
    matrices = (body.encoder.embed_tokens, body.decoder.embed_tokens, model.lm_head)
    # Tied matrices are drawn once.
    for weight in {id(matrix.weight): matrix.weight for matrix in matrices}.values():
        if fixnorm:
            nn.init.uniform_(weight, -0.01, 0.01)
        else:
            nn.init.normal_(weight, std=model.config.d_model**-0.5)
    if not fixnorm:  # a row of zeros cannot be normalized
        for embedding in (body.encoder.embed_tokens, body.decoder.embed_tokens):
            embedding.weight[PAD].zero_()


# ------------------------------------------------------------------ from a folder


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

    Marian, T5, BART, mBART, M2M100 and NLLB, for example.

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


def positions_of(config: PretrainedConfig) -> int:
    """The longest sequence that a model takes, in tokens."""
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return int(next(filter(None, found), _POSITIONS))


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
