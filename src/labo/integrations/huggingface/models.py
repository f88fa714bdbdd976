"""What has to be known about a model: its labels, its output layer, the losses that it adds."""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..._checks import is_dtensor
from ...calibration.folding import evaluating
from ...heads.low_rank import LowRankWeight
from ...linear import LinearLossOptions, TeacherHead, linear_loss
from ...metrics import LossMetrics
from .losses import IGNORED

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


def unwrapped(model: nn.Module) -> Any:
    """The model inside PEFT's wrapper, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


# ------------------------------------------------------------------ labels


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def trainer_counts_shifted(model: nn.Module) -> bool:
    """Whether the Trainer leaves the first label of each row out of its count of targets."""
    own_loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    return own_loss is ForCausalLMLoss and not is_encoder_decoder(model)


def set_counted(model: Any, shift: bool) -> None:
    """Let a Trainer that is made with the model count the targets as they are.

    It counts them by ``loss_type``, which GPT-2 does not have. It would count the first label of
    each row, and the loss would be too small.
    """
    if trainer_counts_shifted(model) != shift:
        model.loss_type = "ForCausalLM" if shift else None


def shifts(model: nn.Module) -> bool:
    """Whether the logits at a position predict the label of the next position.

    Raises:
        ValueError: this cannot be derived from the class of the model.
    """
    model = unwrapped(model)
    if is_encoder_decoder(model):
        return False
    causal = is_causal(model)
    # Some old decoders (MarianForCausalLM) expect labels that are shifted already.
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    own_way = code is not None and "CrossEntropyLoss" in code.co_names
    if (causal and own_way) or (not causal and getattr(model, "loss_type", None) is None):
        raise ValueError(
            f"it is not known whether a position of {type(model).__name__} predicts its own label "
            "or the next one: pass shift=False or shift=True to regularize"
        )
    return causal


def is_causal(model: nn.Module) -> bool:
    names = {cls.__name__ for cls in type(model).__mro__}  # MyLlama(LlamaForCausalLM) is causal
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return not names.isdisjoint(listed) or trainer_counts_shifted(model)


def checked_shift(model: nn.Module, given: bool | None) -> bool:
    """``given``, or what the class of the model says, compared with the model's own loss.

    Raises:
        ValueError: the model's own loss contradicts its class.
    """
    base = unwrapped(model)
    shift = shifts(base) if given is None else given
    if not (is_causal(base) or is_encoder_decoder(base)):
        return shift  # a classifier has other labels
    if _own_loss_shifts(base) is not (not shift):
        return shift
    name, own = type(base).__name__, "the label of its own position" if shift else "the next label"
    found = f"the loss of {name} on four tokens is that of logits that predict {own}"
    if given is None:
        raise ValueError(f"{found}: pass shift={not shift} to regularize")
    warnings.warn(
        f"{found}, and shift={shift} was given. This is right only if the labels of your batches "
        "are shifted already",
        stacklevel=3,
    )
    return shift


@torch.no_grad()
def _own_loss_shifts(model: Any) -> bool | None:
    """Whether the model's own loss on four tokens shifts the labels; None if it is neither case."""
    inputs = four_tokens(model)
    if inputs is None or any(is_dtensor(p) or p.numel() == 0 for p in model.parameters()):
        return None
    try:
        with evaluating(model):
            outputs = model(**inputs)
        logits, own = outputs.logits.float(), outputs.loss.float()
        added = added_loss(model, outputs, logits)
        own = own if added is None else own - added.to(own)
        labels = inputs["labels"].to(logits.device)
        next_one = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        same = nn.functional.cross_entropy(logits[0], labels[0])
    except Exception:  # it takes more than tokens, or returns something else
        return None
    off = [float((value.to(own) - own).abs() / own.abs()) for value in (same, next_one)]
    # half precision may be off by a per cent; logits that are all equal do not tell
    if not min(off) < 0.03 or min(off) > 0.1 * max(off):
        return None
    return off[1] < off[0]


def four_tokens(model: Any) -> dict[str, Any] | None:
    """Inputs with labels to try a language model on, or None if it takes others."""
    if not hasattr(model, "main_input_name") or model.device.type == "meta":
        return None
    classes = getattr(model.config.get_text_config(decoder=True), "vocab_size", 4)
    tokens = torch.arange(4, device=model.device).remainder(classes).unsqueeze(0)
    inputs: dict[str, Any] = {"labels": tokens, "use_cache": False, "return_dict": True}
    if model.main_input_name == "input_ids":
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **inputs}
    if not is_encoder_decoder(model):
        return None
    # Speech or images: the decoder is tried on encoder states that are made up.
    config = model.config
    encoder = getattr(config, "encoder", getattr(config, "vision_config", config))
    shape = (1, 4, encoder.hidden_size)
    states = torch.linspace(-1, 1, 4 * shape[-1], device=model.device, dtype=model.dtype)
    made_up = BaseModelOutput(states.reshape(shape))
    made_up.attention_mask = None  # Moonshine reads it
    return {"encoder_outputs": made_up, **inputs}


def shifted(labels: Tensor) -> Tensor:
    """For each position the label of the next one, and ``IGNORED`` for the last position."""
    if labels.is_floating_point():
        raise ValueError(f"the labels of a causal model must be token indices, got {labels.dtype}")
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def with_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with decoder inputs made from the labels, as an encoder-decoder makes them.

    The model makes them itself only if it receives the labels. BART without labels decodes the
    source instead, without a warning.
    """
    if (
        not is_encoder_decoder(model)
        or inputs.get("labels") is None
        or any(inputs.get(name) is not None for name in DECODER_INPUTS)
    ):
        return inputs
    return {**inputs, "decoder_input_ids": _decoder_inputs(model, inputs["labels"])}


def _decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):  # the latter: Pix2Struct
        make = getattr(model, name, None)
        if make is not None:
            return make(labels)
    config = model.config
    parts = (config, config.get_text_config(decoder=True))
    for cls in type(model).__mro__:  # Whisper and other speech models have a function beside them
        shift = getattr(sys.modules[cls.__module__], "shift_tokens_right", None)
        found = [
            next((x for part in parts if (x := getattr(part, name, None)) is not None), None)
            for name in ("pad_token_id", "decoder_start_token_id")
        ]
        if shift is not None and None not in found:
            return shift(labels, *found)
    raise ValueError(
        f"{type(model).__name__} cannot make decoder inputs from labels: let the collator add "
        "decoder_input_ids to the batch"
    )


# ------------------------------------------------------------------ tasks and their logits


def check_task(model: nn.Module) -> None:
    """Raise an error for a model that does not choose one of several classes."""
    base = unwrapped(model)
    config, name = getattr(base, "config", None), type(base).__name__
    task = getattr(config, "problem_type", None)
    if task in ("multi_label_classification", "regression"):
        raise ValueError(
            f"{name} has problem_type={task!r}, and the losses of labo are for one class per "
            "label: train it with its own loss, or set problem_type='single_label_classification'"
        )
    if is_segmentation(base) and getattr(config, "use_auxiliary_head", False):
        raise ValueError(
            f"{name} adds the loss of an auxiliary head, whose logits it does not return: load it "
            "with use_auxiliary_head=False"
        )


def is_segmentation(model: nn.Module) -> bool:
    """Whether the logits are maps, (N, K, H, W), for labels (N, H, W)."""
    return any("ForSemanticSegmentation" in cls.__name__ for cls in type(unwrapped(model)).__mro__)


def without_ignored_pixels(model: nn.Module, labels: Any) -> Any:
    """Labels with ``IGNORED`` in the place of the number that the model has for it (255)."""
    base = unwrapped(model)
    if not is_segmentation(base) or not isinstance(labels, Tensor):
        return labels
    config, names = base.config, ("semantic_loss_ignore_index", "loss_ignore_index")
    for number in (getattr(config, name) for name in names if hasattr(config, name)):
        labels = labels.masked_fill(labels == number, IGNORED)
    return labels


def classes_last(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Logits in the shape of the labels and a last dimension of classes.

    The maps of a segmentation model are enlarged to the size of the labels, as in its own loss.
    """
    if logits.dim() != 4 or labels.dim() != 3:
        return logits
    size = labels.shape[1:]
    if is_segmentation(model) and logits.shape[2:] != size:
        logits = nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    known = is_segmentation(model) or labels.shape != logits.shape[:-1]
    return logits.movedim(1, -1) if known and logits.shape[2:] == size else logits


def has_prompt_positions(model: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens before the inputs, so that there are more logits."""
    config: Any = getattr(model, "active_peft_config", None)
    prompts = getattr(config, "is_prompt_learning", False)
    return prompts and config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE")


def check_whole(model: nn.Module, logits: Tensor) -> None:
    """Raise an error for logits that are one process's part of the classes."""
    head = getattr(unwrapped(model), "get_output_embeddings", lambda: None)()
    weight: Any = getattr(head, "weight", None)
    part = "a DTensor" if is_dtensor(logits) else None
    if is_dtensor(weight) and logits.shape[-1] == len(weight.to_local()) < len(weight):
        part = f"those of {logits.shape[-1]} classes out of {len(weight)}"
    if part is not None:
        raise ValueError(
            f"the logits are {part}: each process holds a part of the classes. Let the output "
            "layer gather them (colwise_gather_output in the tensor-parallel plan)"
        )


# ------------------------------------------------------------------ a teacher


def check_pair(teacher: Any, model: nn.Module) -> None:
    """Raise an error for a teacher that cannot be frozen, or cannot take the model's inputs."""
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"teacher must be a model, got {teacher!r}")
    learned = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in learned for parameter in teacher.parameters()):
        raise ValueError(
            "the teacher shares parameters with the model, and freezing it would freeze the model: "
            "give a copy of it (copy.deepcopy)"
        )
    if is_encoder_decoder(unwrapped(teacher)) != is_encoder_decoder(unwrapped(model)):
        raise ValueError(
            f"one of {type(unwrapped(teacher)).__name__}, the teacher, and "
            f"{type(unwrapped(model)).__name__} is an encoder-decoder and the other one is not: "
            "both must take the same inputs"
        )


def check_tokenizers(teacher: nn.Module, model: nn.Module, processor: Any = None) -> None:
    """Raise an error if the indices of teacher and model stand for other tokens.

    The tokenizers are that of the Trainer (``processor``), and those of the folders that the models
    were loaded from, as far as these are on this machine. What is not known is not compared.
    """
    ours = _vocabulary(getattr(processor, "tokenizer", processor)) or _saved_vocabulary(model)
    theirs = _saved_vocabulary(teacher)
    common = ours.keys() & theirs.keys()
    other = [index for index in sorted(common) if ours[index] != theirs[index]]
    if len(other) > len(common) // 100:  # reserved tokens get new names in later versions
        index = other[0]
        raise ValueError(
            "the teacher has another tokenizer than the model, so their classes are different: "
            f"index {index} is {theirs[index]!r} for the teacher and {ours[index]!r} for the model"
        )


def _vocabulary(tokenizer: Any) -> dict[int, str]:
    """Tokens by index; empty if this is not a tokenizer."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return {index: token for token, index in vocabulary.items()}


def _saved_vocabulary(model: nn.Module) -> dict[int, str]:
    """That of the folder or the cached repository that a model was loaded from."""
    name = getattr(unwrapped(model), "name_or_path", "")
    if not name:
        return {}
    try:
        return _vocabulary(
            AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        )
    except Exception:  # there is none, or it needs code or a package that is not there
        return {}


def check_flag(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


# ------------------------------------------------------------------ losses that a model adds


def added_loss(model: Any, outputs: Any, logits: Tensor | None = None) -> Tensor | None:
    """What the model adds to the cross entropy in its own loss, or None.

    The load-balancing and z-losses of the routers of a mixture of experts, if its router logits
    were asked for, and the z-loss of Bamba, if ``logits`` are given.

    Raises:
        ValueError: the model has a router loss that is not in its outputs.
    """
    config = getattr(model, "config", None)
    sources = (
        (model, "router_aux_loss_coef"),
        (model, "aux_loss_coef"),  # JetMoe
        (getattr(config, "text_config", None), "router_aux_loss_coef"),  # vision-language models
    )
    balance = next((getattr(*source) for source in sources if hasattr(*source)), None)
    weighted = {
        "aux_loss": balance,
        "encoder_aux_loss": balance,
        "decoder_aux_loss": balance,
        "encoder_z_loss": getattr(model, "router_z_loss_coef", None),
        "decoder_z_loss": getattr(model, "router_z_loss_coef", None),
    }
    parts = [
        coefficient * value.mean()  # nn.DataParallel returns one value per GPU
        for name, coefficient in weighted.items()
        if coefficient is not None and isinstance(value := getattr(outputs, name, None), Tensor)
    ]
    if not parts and balance is not None and _has_router_logits(config, outputs):
        raise ValueError(
            f"{type(model).__name__} does not return the loss of its routers unless it computes "
            "its own loss: set output_router_logits=False"
        )
    z_loss = getattr(model, "z_loss_coefficient", 0.0)  # Bamba
    if z_loss and logits is not None:
        parts.append(z_loss * logits.float().logsumexp(-1).square().mean())
    return torch.stack(parts).sum() if parts else None


def _has_router_logits(config: Any, outputs: Any) -> bool:
    if not isinstance(outputs, dict):  # a tuple has no names
        return bool(getattr(config, "output_router_logits", False))
    return any(name.endswith("router_logits") and len(outputs[name]) > 0 for name in outputs)


# ------------------------------------------------------------------ the output layer


@dataclass(frozen=True)
class OutputLayer:
    """How a model computes logits from hidden states. An ``adapter`` has ``weight`` as its base."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    adapter: LowRankWeight | None = None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weight, and those of the adapter."""
        if self.adapter is None:
            return (self.weight,)
        found = (self.weight, self.adapter.a, self.adapter.b, self.adapter.magnitude)
        return tuple(x for x in found if x is not None)

    def loss_and_metrics(
        self,
        hidden: Tensor,
        target: Tensor,
        loss: nn.Module,
        options: LinearLossOptions | None = None,
        *,
        measure: Literal[False, True, "rows"] = False,
        **extras: Any,
    ) -> tuple[Tensor, LossMetrics | None]:
        """The mean of ``loss`` without the logits, and if asked for the metrics, summed or per row.

        ``extras`` are ``token_weight``, ``z_loss`` and ``teacher_logits`` of ``linear_loss``.
        """
        result: Any = linear_loss(
            self._scaled(hidden),
            self.adapter or self.weight,
            target.to(self.weight.device),
            loss,
            linear_bias=self.bias,
            softcap=self.softcap,
            return_metrics=measure,
            options=options,
            **extras,
        )
        return result if measure else (result, None)

    def as_teacher(self, hidden: Tensor) -> TeacherHead:
        """The layer with its rows, for the loss of a student."""
        return TeacherHead(self._scaled(hidden), self.weight, self.bias, self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states to (..., V) logits."""
        hidden = self._scaled(hidden)
        if self.adapter is None:
            logits = nn.functional.linear(hidden, self.weight, self.bias)
        else:
            low, b = self.adapter.low_rank(hidden), self.adapter.b.to(hidden.dtype)
            logits = nn.functional.linear(hidden, self.weight) + nn.functional.linear(low, b)
            by_class = self.adapter.class_scale()
            logits = logits if by_class is None else logits * by_class.to(logits.dtype)
            logits = logits if self.bias is None else logits + self.bias
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def _scaled(self, hidden: Tensor) -> Tensor:
        """The hidden states where the weight is, times the factor of the logits."""
        hidden = hidden.to(self.weight.device)
        return hidden if self.scale == 1 else hidden * self.scale


_ADAPTED = (
    ". Leave it out of target_modules, train a full copy of it with modules_to_save, or use "
    "regularize(trainer, loss), which works on the logits"
)


def find_head(model: Any) -> Any:
    """The output layer of a model: an ``nn.Linear``, or PEFT's LoRA layer around one.

    Raises:
        ValueError: it is missing, quantized, not linear or adapted in another way.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy of the layer
        adapters = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[adapters[0]] if adapters else head.original_module
    name = type(model).__name__
    if head is None:
        raise ValueError(
            f"{name} has no output layer (get_output_embeddings() is None), so there is nothing to "
            "fuse. Use regularize(trainer, loss), which works on the logits"
        )
    if _own_type(head).__module__ == "peft.tuners.lora.layer" and hasattr(head, "lora_B"):
        base = head.get_base_layer()
        plain = is_dtensor(base.weight) or not _is_quantized(base, base.weight)
        if type(base) is nn.Linear and plain:
            return head  # output_layer() refuses what is sharded, or not LoRA or DoRA
    kind = f"{type(head).__module__.split('.')[0]}'s {type(head).__name__}"
    if any(cls.__module__.startswith("peft.") for cls in type(head).__mro__):
        raise ValueError(
            f"the output layer of {name} is adapted ({kind}), and not by LoRA or DoRA around "
            f"torch.nn.Linear{_ADAPTED}"
        )
    # not as an attribute: ZeRO-3 gathers what is read in a forward pass
    weight = getattr(head, "_parameters", {}).get("weight")
    weight = getattr(head, "weight", None) if weight is None else weight
    if is_dtensor(weight) and _own_type(head) is nn.Linear:
        return head  # output_layer() refuses it unless FSDP gathers it for the forward pass
    if _is_quantized(head, weight) and type(head) is nn.Linear and _by_rows(weight):
        return head  # linear_loss dequantizes it
    if _is_quantized(head, weight):
        raise ValueError(
            f"the output layer of {name} is quantized ({kind}), and not as a frozen tensor of "
            "torchao. Exclude it from quantization (llm_int8_skip_modules or "
            "modules_to_not_convert in the quantization config), use regularize(trainer, loss), "
            "which works on the logits, or give linear_loss a labo.QuantizedWeight"
        )
    if _own_type(head) is not nn.Linear:
        raise ValueError(
            f"the output layer of {name} is {kind} and not torch.nn.Linear, so it may do more than "
            "multiply by its weight. Use regularize(trainer, loss), which works on the logits"
        )
    return head


def in_fsdp_group(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was called with this module."""
    return type(module).__bases__[0].__name__ == "FSDPModule"


def gathers_again(head: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 gather the weight again when the gradient of the output arrives."""
    return in_fsdp_group(head) or any(hasattr(p, "ds_id") for p in head.parameters(recurse=False))


def _own_type(module: nn.Module) -> type:
    """The class of a module, without what FSDP2 puts before it."""
    kind = type(module)
    return kind.__bases__[1] if in_fsdp_group(module) else kind


def _is_quantized(head: nn.Module, weight: Any) -> bool:
    # Some libraries replace the layer (bitsandbytes, GPTQ), others the tensor in it (torchao).
    if "quant" in f"{type(head).__module__}.{type(head).__name__}".lower():
        return True
    if not isinstance(weight, Tensor):
        return False
    return not weight.is_floating_point() or type(weight.data) is not Tensor


def _by_rows(weight: Any) -> bool:
    """Whether this is a frozen tensor that can be dequantized, such as those of torchao."""
    own = type(weight.data).dequantize is not Tensor.dequantize
    return own and weight.is_floating_point() and not weight.requires_grad


def is_sharded(weight: Any) -> bool:
    """Whether FSDP or ZeRO-3 has to gather this weight of an output layer."""
    return is_dtensor(weight) or weight.dim() != 2 or weight.numel() == 0


def _sharded(name: str, how: str) -> ValueError:
    return ValueError(
        f"the output layer of {name} is sharded ({how}), and fuse_head needs the whole weight in "
        "each process. Fuse the model before FSDP shards it (with ZeRO-3 under "
        "deepspeed.zero.GatheredParameters), and keep the layer out of the tensor-parallel plan. "
        "Or use regularize(trainer, loss), which works on the logits"
    )


def _adapter(name: str, head: Any) -> LowRankWeight | None:
    """What PEFT adds to the output layer in a forward pass, or None."""
    if not hasattr(head, "lora_B") or head.disable_adapters or head.merged:
        return None
    active = [each for each in head.active_adapters if each in head.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise ValueError(
            f"the output layer of {name} has {len(active)} active adapters ({', '.join(active)}), "
            f"and fuse_head takes one. Activate one of them (set_adapter){_ADAPTED}"
        )
    (key,) = active
    a, b, dropout = head.lora_A[key], head.lora_B[key], head.lora_dropout[key]
    variant = type(head.lora_variant.get(key)).__name__
    dora = variant == "DoraLinearVariant"
    dropout = None if isinstance(dropout, nn.Identity) else dropout
    known = dora or variant == "NoneType"
    if not known or b.bias is not None or (dora and dropout is not None):
        how = variant if not known else "lora_bias" if b.bias is not None else "DoRA with dropout"
        raise ValueError(
            f"the output layer of {name} is adapted in a way that fuse_head does not know ({how})"
            f"{_ADAPTED}"
        )
    magnitude = head.lora_magnitude_vector[key].weight if dora else None
    tensors = (a.weight, b.weight, head.scaling[key], magnitude, dropout)
    return LowRankWeight(head.get_base_layer().weight, *tensors)


def output_layer(model: Any, head: Any) -> OutputLayer:
    """The output layer together with what some model families do to the logits.

    Raises:
        ValueError: the weight is sharded, or adapted in another way than by LoRA or DoRA.
    """
    name, adapted = type(model).__name__, hasattr(head, "lora_B")
    layer = head.get_base_layer() if adapted else head
    factors = [*head.lora_A.values(), *head.lora_B.values()] if adapted else []
    for weight in (layer.weight, *(factor.weight for factor in factors)):
        if is_sharded(weight):
            shape = f"shape {tuple(weight.shape)}"  # ZeRO-3, FSDP1
            raise _sharded(name, "a DTensor" if is_dtensor(weight) else shape)
    config = model.config.get_text_config(decoder=True)
    bias, adapter = layer.bias, _adapter(name, head)
    added = getattr(model, "final_logits_bias", None)  # Marian, BART and similar models
    if added is not None:
        added = added.reshape(-1).to(layer.weight.dtype)
        bias = added if bias is None else bias + added
    scale = getattr(model, "logit_scale", 1.0)  # Cohere
    scale /= getattr(config, "logits_scaling", 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputLayer(layer.weight, bias, scale, softcap, adapter)
