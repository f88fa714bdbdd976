"""A temperature becomes part of a model: its logits come out divided.

Only a linear output layer whose weight is used nowhere else can be divided; a tied one gets a
weight of its own first, if that is asked for. Where a model does more
with its logits (a scale, a soft cap, an added bias), that is changed along with it, and the result
is compared with the logits from before. What cannot be done exactly is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..fields import POSITIVE
from ..linear import LinearLoss

_Model = TypeVar("_Model", bound=nn.Module)

# Numbers that language models of transformers multiply or divide their logits by ...
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
# ... and c of the soft cap c tanh(z / c).
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@torch.no_grad()
def fold_temperature(model: _Model, temperature: float, *, untie: bool = False) -> _Model:
    r"""Divide the logits of a model by a temperature for good, in place.

    .. math:: \mathrm{softmax}(W' h + b') = \mathrm{softmax}((W h + b) / T), \qquad
        W' = W / T, \quad b' = b / T

    Every later user of the model gets the calibrated probabilities, and ``temperature`` must not be
    applied again. Fold once, after training. In half precision the divided weights are rounded.

    Args:
        model: one of

            - the output layer, an ``nn.Linear``, whose weight is used nowhere else and whose output
              is the logits;
            - a :class:`labo.LinearLoss`, with or without a soft cap;
            - an ``nn.Sequential`` that ends in one of these;
            - a language model of transformers. If its embeddings are tied to the output layer, its
              own logit scale is changed instead (Cohere, Granite, Falcon-H1 and others). A soft cap
              (Gemma) and an added bias (Marian, BART) are divided as well. The model is run on four
              tokens before and after, to be sure.
        temperature: T, as from :func:`labo.calibration.fit_temperature`.
        untie: give the output layer a weight of its own if it is tied to the embeddings and the
            model has no logit scale. In a language model of transformers every tied weight gets its
            own copy, and ``tie_word_embeddings`` becomes False, so that the model is saved and
            loaded that way. It is larger by these copies.

    Returns:
        ``model``.

    Raises:
        ValueError: the division would change more or less than the logits: tied embeddings without
            a logit scale (and without ``untie``), an adapter or another layer type in place of
            ``nn.Linear``, weights that are quantized, sharded or computed, or an unknown use of the
            logits. Nothing is changed.
        TypeError: it cannot be told which layer makes the logits.

    Example:
        >>> layer = torch.nn.Linear(3, 4)
        >>> h = torch.ones(1, 3)
        >>> calibrated = (layer(h) / 2.5).softmax(-1)
        >>> torch.testing.assert_close(fold_temperature(layer, 2.5)(h).softmax(-1), calibrated)
    """
    POSITIVE.check("temperature", temperature)
    if callable(getattr(model, "get_output_embeddings", None)):
        _fold_language_model(model, temperature, untie)
        return model
    head = _output_layer(model)
    layer = head.linear if isinstance(head, LinearLoss) else head
    _must_be_divisible(layer)
    if untie and _tied_to(layer, model) is not None:
        layer.weight = nn.Parameter(layer.weight.clone(), layer.weight.requires_grad)
    _must_be_untied(layer, model)
    _divide(layer, temperature)
    if isinstance(head, LinearLoss) and head.softcap is not None:
        # (c / T) tanh((z / T) / (c / T)) = c tanh(z / c) / T
        head.softcap /= temperature
    return model


def _output_layer(model: nn.Module) -> nn.Linear | LinearLoss:
    """The layer that makes the logits of a model that is no language model of transformers."""
    if isinstance(model, nn.Sequential) and len(model):
        return _output_layer(model[-1])
    if not isinstance(model, nn.Linear | LinearLoss):
        raise TypeError(
            f"cannot tell which layer of {type(model).__name__} makes the logits: give that layer, "
            "as in fold_temperature(model.fc, T)"
        )
    return model


def _must_be_divisible(layer: nn.Module) -> None:
    """Refuse a layer that is more than ``x @ weight.T + bias`` with the numbers at hand."""
    name = type(layer).__name__
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"the output layer is a {name}, not an nn.Linear: an adapter must be merged into the "
            "model, and quantized weights cannot be divided exactly"
        )
    if layer._parameters.get("weight") is None:
        raise ValueError(
            "the weight of the output layer is computed from other parameters (weight_norm?): "
            "remove that first"
        )
    shapes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    for part, parameter in layer._parameters.items():
        if parameter is None:
            continue
        if parameter.is_meta:
            raise ValueError(f"the {part} of the output layer is not in memory (meta device)")
        if type(parameter) is not nn.Parameter or parameter.shape != shapes[part]:
            raise ValueError(
                f"the {part} of the output layer is sharded or quantized "
                f"({type(parameter).__name__} of shape {tuple(parameter.shape)}): gather or "
                "dequantize the model first"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"the {part} of the output layer is quantized ({parameter.dtype})")


def _tied_to(layer: nn.Linear, model: nn.Module) -> str | None:
    """The name of another module of the model that has the same weight."""
    for name, module in model.named_modules():
        if module is layer:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and (
                parameter is layer.weight or parameter.data_ptr() == layer.weight.data_ptr() != 0
            ):
                return name or type(module).__name__
    return None


def _must_be_untied(layer: nn.Linear, model: nn.Module) -> None:
    other = _tied_to(layer, model)
    if other is not None:
        raise ValueError(
            f"the weight of the output layer is also that of {other} (tied embeddings), and the "
            "model has no logit scale: dividing it would change the inputs as well. Pass "
            "untie=True to give it a weight of its own, or divide the logits where they are used"
        )


def _divide(layer: nn.Linear, temperature: float) -> None:
    layer.weight.div_(temperature)
    if layer.bias is not None:
        layer.bias.div_(temperature)


# ------------------------------------------------------------------ language models


@dataclass(frozen=True)
class _Number:
    """A number of a model's config, with the modules that keep a copy of it."""

    name: str
    value: float
    owners: tuple[Any, ...]
    multiplied: bool = False  # whether T multiplies it, because the model divides by it

    def fold(self, temperature: float) -> None:
        folded = self.value * temperature if self.multiplied else self.value / temperature
        for owner in self.owners:
            setattr(owner, self.name, folded)


def _numbers(model: Any, names: tuple[str, ...]) -> list[_Number]:
    """The settable numbers of these names in the config. What is only in a module is not saved."""
    whole = model.config
    text = whole.get_text_config(decoder=True)
    numbers = []
    for name in names:
        value = getattr(text, name, None)
        derived = isinstance(getattr(type(text), name, None), property)
        if isinstance(value, int | float) and not derived:
            holders = {id(holder): holder for holder in (whole, text, *model.modules())}.values()
            same = tuple(holder for holder in holders if getattr(holder, name, None) == value)
            numbers.append(_Number(name, value, same))
    return numbers


def _fold_language_model(model: Any, temperature: float, untie: bool) -> None:
    layer = model.get_output_embeddings()
    if layer is None:
        raise TypeError(
            f"{type(model).__name__} names no output layer: give the layer that makes the logits, "
            "as in fold_temperature(model.classifier, T)"
        )
    _must_be_divisible(layer)
    caps, scales = _numbers(model, _CAPS), _numbers(model, _SCALES)
    with ExitStack() as undo:
        if untie and not scales and _tied_to(layer, model) is not None:
            before = _logits(model, layer)
            _untie(model, undo)
            if _tied_to(layer, model) is None and not torch.equal(before, _logits(model, layer)):
                raise ValueError(
                    f"the logits of {type(model).__name__} change if its embeddings are not tied: "
                    "divide them where they are used"
                )
        divided: nn.Linear | None = layer
        trials = [caps]
        if _tied_to(layer, model) is not None:
            if not scales:
                _must_be_untied(layer, model)
            # The same name multiplies in some families and divides in others: try both.
            scales += [replace(scale, multiplied=True) for scale in scales]
            divided, trials = None, [[*caps, scale] for scale in scales]
        bias = None if divided is None else getattr(model, "final_logits_bias", None)
        for numbers in trials:
            if _halves_logits(model, layer, divided, bias, numbers):
                for number in numbers:
                    number.fold(temperature)
                if bias is not None:
                    bias.div_(temperature)
                if divided is not None:
                    _divide(divided, temperature)
                undo.pop_all()
                return
    raise ValueError(
        f"the logits of {type(model).__name__} do not come out divided: it does something with "
        "them that fold_temperature does not know. Divide them where they are used"
    )


def _untie(model: Any, undo: ExitStack) -> None:
    """Give every tied weight of a model of transformers a copy of its own."""

    def change(owner: Any, name: str, value: Any) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name, None))
        setattr(owner, name, value)

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for path in base.all_tied_weights_keys:
        owner, _, name = path.rpartition(".")
        module = base.get_submodule(owner)
        shared = getattr(module, name)
        change(module, name, nn.Parameter(shared.detach().clone(), shared.requires_grad))
    for config in (base.config, base.config.get_text_config(decoder=True)):
        change(config, "tie_word_embeddings", False)
    change(base, "all_tied_weights_keys", {})


def _halves_logits(
    model: Any,
    layer: nn.Linear,
    divided: nn.Linear | None,
    bias: Tensor | None,
    numbers: list[_Number],
) -> bool:
    """Try T = 2, which is exact in binary, and undo it."""
    before = _logits(model, layer)
    with ExitStack() as undo:
        for number in numbers:
            undo.callback(number.fold, 1.0)
            number.fold(2.0)
        if bias is not None:
            undo.callback(bias.copy_, bias.clone())
            bias.div_(2.0)
        if divided is not None:
            undo.enter_context(divided.register_forward_hook(lambda _, args, output: output / 2))
        after = _logits(model, layer)
    tolerance = 1e-4 if before.dtype in (torch.float32, torch.float64) else 3e-2
    expected = before / 2
    finite = expected.isfinite()
    if not torch.equal(finite, after.isfinite()):
        return False
    largest = expected[finite].abs().max()
    return bool((after[finite] - expected[finite]).abs().max() <= tolerance * largest)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode; every module inside gets its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


# The largest logit of a trial. A function that changes logits, such as a cap, changes these too.
_LARGE = 60.0


def enlarged(hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden states whose largest logit is about that."""
    logits = nn.functional.linear(hidden, weight)
    return hidden * (_LARGE / logits.abs().max().clamp(min=1e-3))


def _logits(model: Any, layer: nn.Linear) -> Tensor:
    """The logits of four tokens, with hidden states so large that a cap would show."""
    name = type(model).__name__
    device = model.get_input_embeddings().weight.device
    if model.main_input_name != "input_ids" or device.type == "meta":
        raise ValueError(
            f"fold_temperature must try {name} on tokens, and cannot: give the output layer itself "
            "if its output is the logits"
        )
    tokens = torch.arange(4, device=device).remainder(layer.out_features).unsqueeze(0)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    seen = []

    def enlarge(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args)
        return (enlarged(args[0], layer.weight),)

    with evaluating(model), layer.register_forward_pre_hook(enlarge):
        logits: Tensor | None = model(**inputs, use_cache=False, return_dict=True).logits
    if logits is None or len(seen) != 1:
        raise ValueError(f"{name} does not make its logits with its output layer alone")
    return logits
