"""Models of transformers that stop before their output layer.

A :class:`TokenModel` returns hidden states and the output layer, so that :func:`labo.linear_loss`
computes the loss without storing the logits of a batch. What it saves is a plain model folder that
``from_pretrained`` loads anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...calibration import fold_temperature
from ..errors import RequestError
from ..pretrained import merged, published


class TokenModel(nn.Module):
    """A model of transformers without the multiplication by its output layer.

    Attributes:
        stem: the name of the model in a ``state_dict()`` of this module.
    """

    stem: ClassVar[str] = "network"

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.add_module(self.stem, network)

    @property
    def inside(self) -> PreTrainedModel:
        """The model of transformers. It shares memory with this one."""
        return self.get_submodule(self.stem)

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return int(self.inside.get_output_embeddings().weight.shape[1])

    @property
    def head_name(self) -> str:
        """The name of the output layer."""
        layer = self.inside.get_output_embeddings()
        return next(n for n, module in self.inside.named_modules() if module is layer)

    def network_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A ``state_dict()`` of this module as one of the model of transformers."""
        return {name.removeprefix(f"{self.stem}."): tensor for name, tensor in weights.items()}

    def plain_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a plain model folder holds of a ``state_dict()``: tied matrices once."""
        network = self.inside
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
        network = self.inside
        config: dict[str, Any] = json.loads(network.config.to_json_string(use_diff=False))
        return config | {"architectures": [type(network).__name__]}

    def fold_temperature(self, temperature: float) -> None:
        """Divide the logits by a temperature for good; refused if that is not exact.

        An output layer that is tied to the embeddings gets a weight of its own first, since the
        embeddings must stay as they are. The saved model is larger by that weight.
        """
        try:
            fold_temperature(self.inside, temperature, untie=True)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error)) from error

    def probe_ids(self, length: int) -> Tensor:
        """(1, length) token ids to try the model with; no padding among them."""
        config, layer = self.inside.config, self.inside.get_output_embeddings().weight
        pad, types = getattr(config, "pad_token_id", None), min(config.vocab_size, len(layer))
        usable = [i for i in range(min(types, 4 * length)) if i != pad]
        return torch.tensor([(usable * length)[:length]], device=layer.device)
