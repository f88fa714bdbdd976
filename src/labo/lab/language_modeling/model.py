"""Language models: causal models of ``transformers``, from a preset or from a folder.

Nothing is downloaded, and no architecture is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..._names import Registry
from ...calibration.folding import evaluating
from ..errors import RequestError
from ..pretrained import load_folder
from ..run.calibration import divisor_of
from ..tasks import find_model
from ..text.folder import load_tokenizer
from ..text.head import Head, mean_of_layers
from ..text.model import FastDropout, TokenModel, to_accelerator
from .prepared import TASK

# The type of model, and what its config has. Sizes count the embeddings of 50,257 types.
PRESETS = Registry(
    "preset",
    {
        "gpt2-tiny": {"model_type": "gpt2", "width": 128, "layers": 4, "heads": 4},
        "gpt2-mini": {"model_type": "gpt2", "width": 256, "layers": 6, "heads": 4},
        "gpt2-small": {"model_type": "gpt2", "width": 512, "layers": 8, "heads": 8},
        "gpt2-124m": {"model_type": "gpt2", "width": 768, "layers": 12, "heads": 12},
        "llama-tiny": {"model_type": "llama", "width": 128, "layers": 4, "heads": 4, "ffn": 344},
        "llama-mini": {"model_type": "llama", "width": 256, "layers": 6, "heads": 4, "ffn": 688},
        "llama-small": {"model_type": "llama", "width": 512, "layers": 8, "heads": 8, "ffn": 1368},
        "llama-124m": {
            "model_type": "llama",
            "width": 768,
            "layers": 12,
            "heads": 12,
            "ffn": 2048,
        },
    },
)
# Ours -> that of transformers' configs, which translate it further (n_embd of GPT-2).
_NAMES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
}
_FFN = {"gpt2": "n_inner"}  # elsewhere intermediate_size
_DROPOUTS = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}  # elsewhere attention_dropout


def causal_config(
    preset: str,
    vocabulary: int,
    *,
    positions: int,
    dropout: float = 0.0,
    begin: int | None = None,
    end: int | None = None,
    pad: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """The config of a model to train from scratch.

    ``dimensions`` (width, layers, heads, ffn) differ from the preset; ``settings`` are further keys
    of the transformers config.
    """
    values = {**PRESETS[preset], **(dimensions or {}), "positions": positions}
    kind = str(values.pop("model_type"))
    ffn = values.pop("ffn", None)
    keys: dict[str, Any] = {_NAMES[name]: value for name, value in values.items()}
    if ffn is not None:
        keys[_FFN.get(kind, "intermediate_size")] = ffn
    keys |= dict.fromkeys(_DROPOUTS.get(kind, ("attention_dropout",)), dropout)
    keys |= {
        "vocab_size": vocabulary,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
        "tie_word_embeddings": True,
    }
    known = AutoConfig.for_model(kind)
    unknown = [key for key in settings or {} if not hasattr(known, key)]
    if unknown:
        raise RequestError(f"model.config: {', '.join(unknown)}: no such key in a {kind} config")
    try:
        return AutoConfig.for_model(kind, **(keys | dict(settings or {})))
    except Exception as error:  # each config checks its own values
        reason = str(error).strip().splitlines()[-1].strip()
        raise RequestError(f"model.config: {reason}") from error


class LanguageModel(TokenModel):
    """A causal model that stops before its output layer.

    Example:
        >>> config = causal_config("gpt2-tiny", 50, positions=16)
        >>> model = fresh_model(config)
        >>> head = model(torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 2]]))
        >>> head.states.shape, head.weight.shape
        (torch.Size([1, 3, 128]), torch.Size([50, 128]))
    """

    stem = "causal"
    causal: PreTrainedModel

    def forward(self, ids: Tensor, positions: Tensor, inner_layers: int = 0) -> Head:
        """Hidden states for the token after each token (N, T).

        Where positions, those of tokens in their documents, do not go on by one another document
        begins, and attention does not look back beyond it. ``inner_layers`` asks for the mean of
        the outputs of so many layers, from the first one on.
        """
        body = getattr(self.causal, self.causal.base_model_prefix)
        asked = {"output_hidden_states": True} if inner_layers else {}
        with FastDropout():
            outputs = body(input_ids=ids, position_ids=positions, use_cache=False, **asked)
        inner = mean_of_layers(outputs.hidden_states, inner_layers) if inner_layers else None
        layer = self.causal.get_output_embeddings()
        softcap = getattr(self.causal.config, "final_logit_softcapping", None)
        bias = getattr(layer, "bias", None)
        return Head(outputs.last_hidden_state, layer.weight, bias, softcap, inner)


def fresh_model(config: PretrainedConfig) -> LanguageModel:
    """A model to train from scratch, from PyTorch's generator."""
    return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def load_causal(folder: str | Path) -> PreTrainedModel:
    """A causal model from a folder on this machine, see :func:`labo.lab.pretrained.load_folder`."""
    return load_folder(AutoModelForCausalLM, folder)


class SavedModel:
    """The language model of a run, or of its model folder, ready to be used."""

    def __init__(self, run: str | Path) -> None:
        folder, self.facts = find_model(run, TASK)
        self.divisor = divisor_of(folder)  # of the logits, see ``labo calibrate``
        self.tokenizer = load_tokenizer(folder)
        self.model = LanguageModel(load_causal(folder)).eval()
        self.positions = int(self.model.causal.config.max_position_embeddings)
        to_accelerator(self.model)


# ------------------------------------------------------------------ what a model must be like


@torch.no_grad()
def check_head(model: LanguageModel) -> None:
    """Refuse a model whose logits are not those of its output layer on its hidden states.

    Some models scale or shift their logits afterwards. Their loss would be another one.
    """
    ids, positions = _probe(model)
    with evaluating(model):
        head = model(ids, positions)
        expected = model.causal(input_ids=ids, use_cache=False).logits
    if not torch.allclose(head.logits(head.states), expected, rtol=1e-3, atol=1e-3):
        raise RequestError(
            f"a model of type {model.causal.config.model_type} changes its logits after its output "
            "layer: it cannot be trained here"
        )


@torch.no_grad()
def check_packing(model: LanguageModel) -> None:
    """Refuse a model that sees other documents of a block.

    Attention is kept within documents by their positions. A model without attention, or one that
    ignores positions, would carry on from one document to the next.
    """
    ids, positions = _probe(model)
    with evaluating(model):
        alone = model(ids[:, 3:], positions[:, :5]).states
        packed = model(ids, torch.cat([positions[:, :3], positions[:, :5]], 1)).states[:, 3:]
    if not torch.allclose(alone, packed, rtol=1e-3, atol=1e-3):
        raise RequestError(
            f"a model of type {model.causal.config.model_type} does not keep the documents of a "
            "block apart: set data.packing=false"
        )


def _probe(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """Ids and positions to try a model with."""
    ids = model.probe_ids(8)
    return ids, torch.arange(8, device=ids.device).unsqueeze(0)
