"""Models of transformers that stop before their output layer.

A :class:`TokenModel` returns hidden states and the output layer, so that :func:`labo.linear_loss`
computes the loss without storing the logits of a batch. What it saves is a plain model folder that
``from_pretrained`` loads anywhere. On a CPU it runs with a faster dropout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...calibration import fold_temperature
from ..errors import RequestError
from ..pretrained import merged, published

_VALUES = 1 << 16  # values of the 16 random bits of an element


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


def to_accelerator(model: nn.Module) -> None:
    """Move a model to the GPU of this machine, if there is one."""
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())


# ------------------------------------------------------------------ dropout


def fast_dropout(input: Tensor, p: float) -> Tensor:
    """``F.dropout(input, p)`` with ``p`` rounded to 16 bits and PyTorch's generator.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> kept = fast_dropout(torch.ones(100_000), 0.25)
        >>> round(kept.mean().item(), 2), kept.unique()
        (1.0, tensor([0.0000, 1.3333]))
    """
    size, dropped = input.numel(), round(p * _VALUES)
    draws = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)
    keep = draws.view(torch.int16)[:size].view(input.shape) >= dropped - _VALUES // 2
    noise = torch.empty(input.shape, dtype=input.dtype)
    torch.mul(keep, _VALUES / (_VALUES - dropped), out=noise)
    return input * noise


class FastDropout(TorchFunctionMode):
    """Context manager in which ``F.dropout`` on a CPU is :func:`fast_dropout`.

    PyTorch draws one random number per element, in a single thread. In a small Transformer this
    takes a tenth of a training step. Here four elements share one draw of 64 bits.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and _replaced(*args, **kwargs):
            return fast_dropout(args[0], kwargs["p"])
        return func(*args, **kwargs)


def _replaced(*args: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether ``fast_dropout`` can replace this call of ``F.dropout``."""
    return (
        len(args) == 1 and args[0].device.type == "cpu" and training and not inplace and 0 < p < 1
    )
