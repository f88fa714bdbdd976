"""Translation models: Marian encoder-decoders of ``transformers``, built from a config.

Nothing is downloaded and no architecture is home-made: a :class:`TranslationModel` holds a
``MarianMTModel`` and ends in hidden states and output layer, for :func:`labo.linear_loss` to finish
without ever storing the logits of a batch. What it saves is a plain Marian model, which
``AutoModelForSeq2SeqLM`` loads anywhere.

``MODEL_PRESETS`` has the dimensions: ``iwslt`` and ``base`` are the paper's, ``small`` and ``tiny``
are for two cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel
from transformers.models.marian.modeling_marian import MarianAttention

from ..._checks import Registry
from ..text.dropout import FastDropout
from ..text.head import Head

BOS, PAD, EOS, UNK = range(4)  # fairseq's order
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
    """The config of a Marian model trained from scratch, with fairseq's special tokens.

    Args:
        vocabularies: sizes of source and target vocabulary.
        width, ffn, heads, encoder_layers, decoder_layers: the dimensions.
        dropout: on embeddings and the outputs of sublayers.
        attention_dropout, activation_dropout: on attention weights and inside the feed-forward.
        embeddings: "shared" (source, target and output layer are one matrix), "decoder" (target and
            output layer are) or "separate" (three matrices).
        positions: the longest sentence in tokens.
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
    """A Marian model that stops before its output layer.

    Args:
        marian: the model.
        fixnorm: divide every word embedding by its length at use, on the way in and on the way out
            (Nguyen and Chiang 2018). The saved model has the divided embeddings and is a plain one.

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

    def forward(self, source: Tensor, mask: Tensor | None, prefix: Tensor) -> Head:
        """Hidden states for the next target token after each prefix.

        Args:
            source: (N, S) token ids.
            mask: (N, S), 0 where the source is padding; None if nothing is.
            prefix: (N, T) target ids, beginning with </s>. What follows the end of a target is
                never looked back on, so it needs no mask.
        """
        body = self.marian.model
        if self.fixnorm:
            embed = {
                "inputs_embeds": F.embedding(source, _unit(body.encoder.embed_tokens.weight))
                * body.encoder.embed_scale,
                # Marian scales what the decoder is given, but not what the encoder is given.
                "decoder_inputs_embeds": F.embedding(
                    prefix, _unit(body.decoder.embed_tokens.weight)
                ),
            }
        else:
            embed = {"input_ids": source, "decoder_input_ids": prefix}
        with FastDropout():
            states = body(attention_mask=mask, use_cache=False, **embed).last_hidden_state
        weight = self.marian.lm_head.weight
        return Head(states, _unit(weight) if self.fixnorm else weight)

    def plain_weights(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What a plain Marian folder holds: no fixed positions, and tied matrices once.

        Args:
            weights: a ``state_dict()`` of this model, or of an average of such; else its own.
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

    @torch.no_grad()
    def plain(self) -> MarianMTModel:
        """The Marian model to decode with; shares memory with this one where it can."""
        if not self.fixnorm:
            return self.marian
        model = MarianMTModel(self.marian.config)
        model.load_state_dict(self.plain_weights(), strict=False)
        model.tie_weights()
        return model.to(self.marian.device)


def fresh_translator(config: MarianConfig, *, fixnorm: bool = False) -> TranslationModel:
    """A model to train from scratch, from PyTorch's generator."""
    marian = MarianMTModel(config)
    _initialise(marian, fixnorm)
    return TranslationModel(marian, fixnorm=fixnorm)


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings, dim=-1)


@torch.no_grad()
def _initialise(model: MarianMTModel, fixnorm: bool) -> None:
    """fairseq's start, or FixNorm's small uniform embeddings."""
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
    # Tied ones are drawn once.
    for weight in {id(matrix.weight): matrix.weight for matrix in matrices}.values():
        if fixnorm:
            nn.init.uniform_(weight, -0.01, 0.01)
        else:
            nn.init.normal_(weight, std=model.config.d_model**-0.5)
    if not fixnorm:  # a row of zeros has no direction
        for embedding in (body.encoder.embed_tokens, body.decoder.embed_tokens):
            embedding.weight[PAD].zero_()
