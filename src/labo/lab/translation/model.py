"""Translation models: Marian encoder-decoders of ``transformers``, built from a config.

Nothing is downloaded. A :class:`TranslationModel` wraps a ``MarianMTModel`` and returns hidden
states and the output layer, so that :func:`labo.linear_loss` can compute the loss without storing
the logits of a batch. A saved model is a plain Marian model, which ``AutoModelForSeq2SeqLM`` loads.

``MODEL_PRESETS`` has the dimensions. ``iwslt`` and ``base`` are those of the paper, ``small`` and
``tiny`` are for CPUs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel, PretrainedConfig
from transformers.models.marian.modeling_marian import MarianAttention

from ..._names import Registry
from ...calibration import fold_temperature
from ..errors import LabError, RequestError
from ..pretrained import check_finite
from ..run.files import Document, read_json, read_tensors
from ..text.dropout import FastDropout
from ..text.head import Head, mean_of_layers

BOS, PAD, EOS, UNK = range(4)  # the order of fairseq
NUM_SPECIAL = 4

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


def positions_of(config: PretrainedConfig) -> int:
    """The longest sequence that a model takes, in tokens."""
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return int(next(filter(None, found), _POSITIONS))


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

    Args:
        vocabularies: sizes of source and target vocabulary.
        width, ffn, heads, encoder_layers, decoder_layers: the dimensions.
        dropout: dropout on embeddings and on the outputs of sublayers.
        attention_dropout, activation_dropout: dropout on attention weights and inside the
            feed-forward layers.
        embeddings: "shared" (one matrix for source, target and output layer), "decoder" (one for
            target and output layer) or "separate" (three matrices).
        positions: the longest sentence, in tokens.
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


class TranslationModel(nn.Module):
    """A Marian model without the multiplication by its output layer.

    Args:
        marian: the model.
        fixnorm: normalize every word embedding to length 1 when it is used, in the input and in
            the output layer (Nguyen and Chiang 2018). The saved model is a plain Marian model with
            normalized embeddings.

    Example:
        >>> config = marian_config((50, 50), width=8, ffn=16, heads=2, encoder_layers=1,
        ...                        decoder_layers=1)
        >>> model = fresh_translator(config)
        >>> states, weight, *_ = model(torch.tensor([[7, 8, 2]]), None, torch.tensor([[2, 9]]))
        >>> states.shape, weight.shape
        (torch.Size([1, 2, 8]), torch.Size([50, 8]))
    """

    def __init__(self, marian: MarianMTModel, *, fixnorm: bool = False) -> None:
        super().__init__()
        self.marian = marian
        self.fixnorm = fixnorm

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return int(self.marian.config.d_model)

    def forward(
        self, source: Tensor, mask: Tensor | None, prefix: Tensor, inner_layers: int = 0
    ) -> Head:
        """Hidden states for the next target token after each prefix.

        Args:
            source: (N, S) token ids.
            mask: (N, S), 0 where the source is padding; None if there is no padding.
            prefix: (N, T) target ids, starting with </s>. Padding at the end needs no mask, since
                attention looks only to the left.
            inner_layers: also return the mean of the outputs of so many decoder layers, from the
                first one on.
        """
        body = self.marian.model
        if self.fixnorm:
            embed = {
                "inputs_embeds": F.embedding(source, _unit(body.encoder.embed_tokens.weight))
                * body.encoder.embed_scale,
                # Marian scales given embeddings of the decoder, but not those of the encoder.
                "decoder_inputs_embeds": F.embedding(
                    prefix, _unit(body.decoder.embed_tokens.weight)
                ),
            }
        else:
            embed = {"input_ids": source, "decoder_input_ids": prefix}
        if inner_layers:
            embed["output_hidden_states"] = True
        with FastDropout():
            found = body(attention_mask=mask, use_cache=False, **embed)
        inner = None
        if inner_layers:
            inner = mean_of_layers(found.decoder_hidden_states, inner_layers)
        weight = self.marian.lm_head.weight
        states = found.last_hidden_state
        return Head(states, _unit(weight) if self.fixnorm else weight, inner=inner)

    def plain_weights(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights of a plain Marian model, without fixed positions; tied matrices once.

        Args:
            weights: a ``state_dict()`` of this model or an average of several. Default: its own.
        """
        weights = self.state_dict() if weights is None else weights
        left_out = {*self.marian._keys_to_ignore_on_save, *self.marian.all_tied_weights_keys}
        plain = {}
        for name, tensor in weights.items():
            name = name.removeprefix("marian.")
            if name not in left_out:
                embeds = self.fixnorm and name.endswith(("embed_tokens.weight", "shared.weight"))
                head = self.fixnorm and name == "lm_head.weight"
                plain[name] = _unit(tensor) if embeds or head else tensor
        return plain

    def plain_config(self) -> dict[str, Any]:
        """The config with which plain transformers loads the model."""
        config: dict[str, Any] = json.loads(self.marian.config.to_json_string(use_diff=False))
        return config | {"architectures": ["MarianMTModel"]}

    @torch.no_grad()
    def fold_temperature(self, temperature: float) -> None:
        """Divide the logits by a temperature for good.

        An output layer that is tied to the embeddings stays as it is. The states it is given are
        divided instead: they come out of the normalization of the last decoder layer, and go
        nowhere else.
        """
        if self.fixnorm:
            raise ValueError("fold the temperature into the saved model, which is a plain one")
        if not self.marian.config.tie_word_embeddings:
            fold_temperature(self.marian, temperature)
            return
        last = self.marian.model.decoder.layers[-1].final_layer_norm
        for part in (last.weight, last.bias, self.marian.final_logits_bias):
            part.div_(temperature)

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


class _Dimensions(Document):
    """What is read of a Marian model's ``config.json``; all models here share the rest."""

    vocab_size: int = Field(ge=1)
    decoder_vocab_size: int = Field(ge=1)
    share_encoder_decoder_embeddings: bool
    tie_word_embeddings: bool
    d_model: int = Field(ge=2)
    encoder_ffn_dim: int = Field(ge=1)
    encoder_attention_heads: int = Field(ge=1)
    decoder_attention_heads: int = Field(ge=1)
    encoder_layers: int = Field(ge=1)
    decoder_layers: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=2, le=1 << 20)

    @model_validator(mode="after")
    def _consistent(self) -> _Dimensions:
        for heads in (self.encoder_attention_heads, self.decoder_attention_heads):
            if self.d_model % heads:
                raise ValueError(f"d_model {self.d_model} is not divisible by {heads} heads")
        if self.decoder_attention_heads != self.encoder_attention_heads:
            raise ValueError("encoder and decoder have different numbers of heads")
        return self

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """A ValueError if no such weights are there, before any memory is taken for them."""
        sizes = {size for tensor in weights.values() for size in tensor.shape}
        needed = {self.vocab_size, self.decoder_vocab_size, self.d_model, self.encoder_ffn_dim}
        if not needed <= sizes or self.encoder_layers + self.decoder_layers > len(weights):
            raise ValueError("other dimensions")

    def config(self) -> MarianConfig:
        if self.share_encoder_decoder_embeddings:
            embeddings = "shared"
        else:
            embeddings = "decoder" if self.tie_word_embeddings else "separate"
        return marian_config(
            (self.vocab_size, self.decoder_vocab_size),
            width=self.d_model,
            ffn=self.encoder_ffn_dim,
            heads=self.encoder_attention_heads,
            encoder_layers=self.encoder_layers,
            decoder_layers=self.decoder_layers,
            embeddings=embeddings,
            positions=self.max_position_embeddings,
        )


def load_marian(folder: Path) -> MarianMTModel:
    """The Marian model of a folder, on the CPU and in evaluation mode.

    Only ``config.json`` and ``model.safetensors`` are read. Nothing is unpickled, no adapter and no
    code in the folder is looked at, and nothing is downloaded.

    Raises:
        RequestError: there is no such model in the folder, or it is incomplete.
    """
    weights = folder / "model.safetensors"
    if not weights.is_file():
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        if pickled:
            raise RequestError(
                f"{folder} has {pickled[0]}, a pickle, which can run code and is not read; if you "
                'trust it, convert it: python -c "from transformers import MarianMTModel as M; '
                f'M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"'
            )
        raise RequestError(f"{folder} has no model.safetensors")
    try:
        found = read_tensors(weights)
    except LabError as error:
        raise RequestError(str(error)) from error
    dimensions = read_json(folder / "config.json", _Dimensions)
    try:
        dimensions.check(found)
        model = MarianMTModel(dimensions.config())
        missing, unknown = model.load_state_dict(found, strict=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise RequestError(f"{weights} does not fit {folder / 'config.json'}") from error
    model.tie_weights()
    expected = {*model._keys_to_ignore_on_save, *model.all_tied_weights_keys, "final_logits_bias"}
    if lost := sorted({*missing} - expected):
        raise RequestError(f"{weights} lacks {lost[0]}")
    if unknown:
        raise RequestError(f"{weights} has {unknown[0]}, which is no part of a Marian model")
    check_finite(model, folder)
    return model.eval()


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
