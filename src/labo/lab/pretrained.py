"""Starting from a model that exists: loading a Hugging Face folder, freezing, LoRA.

Only safetensors are read, and no code of a folder is run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .config import Names, Section
from .errors import RequestError
from .run.files import Document, open_regular, read_json, sha256

_BASE = "base_layer."  # PEFT's name for the layer that an adapter belongs to


class Lora(Section):
    """Low-rank adapters (Hu et al. 2022), through PEFT."""

    rank: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: float | None = Field(
        None, gt=0, description="The adapters are scaled by alpha / rank. By default 2 rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of the adapters.")
    targets: Names = Field(
        (),
        description="Names of the layers that get an adapter, such as `q_proj`. By default all "
        "linear layers except the output layer.",
    )
    save: Literal["merged", "both"] = Field(
        "merged",
        description="What the run saves: the model with the adapters merged into it, or also the "
        "adapters by themselves, in `best/adapter`, as PEFT does.",
    )


class StartingModel(Section):
    """A model from a preset, or one to start from."""

    preset: str | None = None
    pretrained: str | None = Field(
        None,
        description="A Hugging Face folder with a model to start from, instead of `preset`. Only "
        "safetensors are read.",
    )
    freeze: Names = Field(
        (),
        description="Modules or parameters that are not trained, such as `model.encoder` or "
        "`transformer.wte`; `*` matches anything.",
    )
    lora: Lora | None = Field(None, description="Train low-rank adapters only.")

    @model_validator(mode="after")
    def _one_start(self) -> StartingModel:
        if (self.preset is None) == (self.pretrained is None):
            raise ValueError("give preset or pretrained, and not both (preset=null leaves it out)")
        return self


def load_folder(
    kind: Any, folder: str | Path, *, classes: int | None = None, whole: bool = False
) -> Any:
    """A model from a folder on this machine, in float32, on the CPU.

    Args:
        kind: a class of transformers with ``from_pretrained``.
        folder: the folder.
        classes: of a classifier, whose output layer is new if it is missing or has other classes.
        whole: whether every weight in the folder must be part of the model.
    """
    from transformers.utils import logging

    folder = _checked(folder)
    options = {} if classes is None else {"num_labels": classes}
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a new output layer is told by a note
    try:
        model, found = kind.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are told below
            **options,
        )
    except Exception as error:  # of many kinds, from several libraries
        reason = first_line(error)
        raise RequestError(f"{folder}: cannot be loaded as {kind.__name__}: {reason}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    other = [name if isinstance(name, str) else name[0] for name in found["mismatched_keys"]]
    for name in sorted([*found["missing_keys"], *other]):
        if classes is None or name.startswith(f"{model.base_model_prefix}."):
            raise RequestError(f"{folder}: its weights lack {name}, or have another shape of it")
    if whole and found["unexpected_keys"]:
        name = sorted(found["unexpected_keys"])[0]
        raise RequestError(f"{folder}: its weights have {name}, which is no part of the model")
    check_finite(model, folder)
    return model


def first_line(error: Exception) -> str:
    """What a library says is wrong; a heading and the line below it."""
    heading, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{heading} {others[0]}" if heading.endswith(":") and others else heading


def check_finite(model: nn.Module, folder: Path) -> None:
    """Refuse a model with a weight that is infinite or no number."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise RequestError(f"{folder}: its weights {name} are not all finite")
    for name, buffer in model.named_buffers():
        if bool(buffer.isnan().any()):
            raise RequestError(f"{folder}: its weights {name} are not all finite")


# Keys of a config that count layers, and others that are sizes of tensors.
_LAYERS = re.compile(r"(^|_)(layers?|depths?|blocks?)$")
_SIZES = re.compile(r"(_size|_dim|_labels|_classes|_heads?|d_model|d_ff|n_embd|n_inner|width|ffn)$")


def check_sizes(path: Path, config: Mapping[str, Any], weights: Iterable[Path]) -> None:
    """Refuse a config with sizes that its weights cannot have, before a model is built from it."""
    sizes = [size for file in weights for size in _tensor_sizes(file)]
    # A config may count what the weights do not have. Small numbers do no harm.
    most_layers, most = max(1000, len(sizes)), max(1_000_000, sum(sizes))
    for key, value in _numbers(config):
        layers = _LAYERS.search(key) is not None
        if value > (most_layers if layers else most) and (layers or _SIZES.search(key)):
            raise RequestError(
                f"{path}: {key} is {value}, but the weights have {len(sizes)} tensors of "
                f"{sum(sizes)} numbers in all"
            )


def _tensor_sizes(file: Path) -> list[int]:
    """How many numbers each tensor of a safetensors file has."""
    try:
        with open_regular(file), safe_open(file, "pt") as content:
            names = list(content.keys())
            return [math.prod(content.get_slice(name).get_shape()) for name in names]
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise RequestError(f"{file}: cannot be read ({error})") from error


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All whole numbers in a config, with the key that they or their list have."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int:
                yield key, number


def load_config(folder: str | Path) -> Any:
    """The config of a folder, without its weights."""
    from transformers import AutoConfig

    folder = _checked(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, from several libraries
        reason = first_line(error)
        raise RequestError(f"{folder / 'config.json'}: cannot be used: {reason}") from error


def _checked(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; a pre-trained model is a local folder")
    if not (folder / "config.json").is_file():
        raise RequestError(f"{folder}: holds no model (there is no config.json)")
    if not list(folder.glob("*.safetensors")):
        raise RequestError(
            f"{folder}: holds no *.safetensors; other formats can run code and are not read "
            "(save_pretrained of a current transformers writes safetensors)"
        )
    if (folder / "adapter_config.json").is_file():  # transformers would load another model
        raise RequestError(
            f"{folder}: holds adapters (adapter_config.json) beside the model: merge them into it, "
            "or remove them"
        )
    path = folder / "config.json"
    config = read_json(path, Document).model_dump()
    _refuse_kernels(path, config)
    check_sizes(path, config, folder.glob("*.safetensors"))
    return folder


def _refuse_kernels(path: Path, value: Any, name: str = "") -> None:
    """Refuse a config that names code of a hub: ``attn_implementation: OWNER/REPOSITORY``."""
    if isinstance(value, dict):
        for key, inside in value.items():
            _refuse_kernels(path, inside, key if "implementation" in key else name)
    elif name and isinstance(value, str) and "/" in value:
        raise RequestError(f"{path}: {name}: {value} is code from elsewhere, which is not run")


def folder_digest(folder: str | Path) -> str:
    """12 hex digits that name the weights and the config of a folder."""
    folder = _checked(folder)
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    listing = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()[:12]


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Keep parameters as they are: by the names of modules or parameters; * stands for anything."""
    parameters = dict(model.named_parameters())
    for name in names:
        found = [key for key in parameters if fnmatch(key, name) or fnmatch(key, f"{name}.*")]
        if not found:
            known = ", ".join(dict.fromkeys(_stem(key) for key in parameters))
            raise RequestError(f"model.freeze: {name} fits no parameter (there are {known})")
        for key in found:
            parameters[key].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RequestError("model.freeze: no parameter is left to train")


def _stem(name: str) -> str:
    return ".".join(name.split(".")[:2])


def add_lora(model: nn.Module, options: Lora, heads: Sequence[str], *, train_heads: bool) -> None:
    """Add low-rank adapters to the layers of a model, in place, and freeze the rest.

    The output layers get none. ``train_heads`` is whether these are trained, as new ones must be.
    """
    try:
        from peft import inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise RequestError("model.lora needs PEFT: pip install 'torch-labo[lora]'") from error
    layers = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    for target in options.targets:
        if any(f".{head}".endswith(f".{target}") for head in heads):
            raise RequestError(f"model.lora.targets: {target} is the output layer, which gets none")
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise RequestError(f"model.lora.targets: no layer {target} (there are {known})")
    targets = list(options.targets) or "all-linear"
    config = _lora_config(model, options, target_modules=targets, exclude_modules=list(heads))
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise RequestError(f"model.lora.targets: {first_line(error)}") from error
    if train_heads:
        for head in heads:
            model.get_submodule(head).requires_grad_(True)


def _lora_config(model: nn.Module, options: Lora, **more: Any) -> Any:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha or 2 * options.rank,
        lora_dropout=options.dropout,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        **more,
    )


def adapter_files(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    options: Lora | None,
    base: str | None,
    *,
    trained_heads: Sequence[str] = (),
) -> dict[str, str | bytes]:
    """The adapters of a model as PEFT saves them, by file name, if they are to be saved apart.

    ``PeftModel.from_pretrained(base_model, folder)`` loads them. ``base`` is the folder that the
    model started from. Output layers that were trained whole are saved with the adapters.
    """
    adapted = sorted(_adapted(model))
    if options is None or options.save == "merged" or not adapted:
        return {}
    from safetensors.torch import save

    heads = tuple(f"{head}." for head in trained_heads)
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in weights.items()
        if ".lora_" in name or name.startswith(heads)
    }
    config = _lora_config(
        model,
        options,
        target_modules=adapted,
        modules_to_save=list(trained_heads) or None,
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    plain = {key: sorted(x) if isinstance(x, set) else x for key, x in config.items()}
    return {
        "adapter/adapter_config.json": json.dumps(plain, indent=2, sort_keys=True) + "\n",
        "adapter/adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have an adapter."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without adapters: each is added to the layer that it belongs to."""
    adapted = _adapted(model)
    if not adapted:
        return dict(weights)
    plain = {}
    for name, tensor in weights.items():
        layer, _, last = name.rpartition(_BASE)
        layer = layer.removesuffix(".")
        if layer in adapted:
            if last == "weight":
                tensor = tensor + _delta(adapted[layer], layer, weights)
            name = f"{layer}.{last}"
        elif ".lora_" in name:
            continue
        plain[name] = tensor
    return plain


def published(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that ``save_pretrained`` gives them.

    In memory transformers may have other names, or several matrices as one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(weights)))


def _delta(module: Any, layer: str, weights: Mapping[str, Tensor]) -> Tensor:
    """What the adapter of a layer adds to its weight."""
    down, up = (weights[f"{layer}.lora_{half}.default.weight"] for half in "AB")
    delta = up @ down * module.scaling["default"]
    return delta.T if module.fan_in_fan_out else delta
