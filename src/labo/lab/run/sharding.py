"""How a model is spread over the processes of a run.

:class:`DataParallel`: every process has the whole model. :class:`FullySharded`: every process has a
share of each parameter, of its gradient and of the state of the optimizer, and blocks are gathered
when they are needed (FSDP2, ``torch.distributed.fsdp.fully_shard``). The training loop uses one or
the other through the same methods.

accelerate finds the processes and devices for both. Its own FSDP plugin is not used: it needs GPUs,
and it takes over the model, the optimizer and their checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..._checks import is_dtensor
from ..errors import RequestError
from .distributed import has_batchnorm

_LISTS = (nn.ModuleList, nn.Sequential)
_PLUGINS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class DataParallel:
    """Every process has the whole model."""

    notes: Sequence[str] = ()  # what the user should know before the run begins

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def place(self, module: nn.Module) -> nn.Module:
        """Move a model to the devices, in place. Models that are only run are placed as well."""
        return module.to(self.accelerator.device)

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model to call in training steps, and its optimizer."""
        model, prepared = self.accelerator.prepare(module, optimizer)
        return model, prepared

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within, gradients are added up: this is not the last micro-batch of a step."""
        context: AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return context

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        """Scale the gradients down to a norm of ``most``; returns the norm they had."""
        norm: Tensor = self.accelerator.clip_grad_norm_(parameters, most)
        return norm

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights as they are saved, on the first process. All processes call it."""
        return dict(weights)


class FullySharded(DataParallel):
    """Every process has a share of the model: FSDP2.

    Each block of the model is gathered by itself, and all other parameters together: embeddings,
    norms and the output layer. The latter stay gathered from the forward to the backward pass,
    because the loss uses the output layer after the model has returned.

    With bf16 the blocks are gathered and computed in bfloat16, the rest is gathered in float32.
    Gradients are reduced and weights are kept in float32. (Under autocast alone the bfloat16 copies
    of all weights would stay in memory until the backward pass.)
    """

    def __init__(self, accelerator: Accelerator) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(accelerator)
        if not hasattr(checkpoint, "HuggingFaceStorageWriter"):
            raise RequestError(
                f"train.parallel: fsdp needs a newer PyTorch than {torch.__version__}, with "
                "torch.distributed.checkpoint.HuggingFaceStorageWriter"
            )
        self.mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.lowered = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None

    def place(self, module: nn.Module) -> nn.Module:
        """Split a model over the processes, in place.

        Its parameters become DTensors. They are moved to the device block by block, so the whole
        model is in the memory of the CPU only.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise RequestError(
                    f"train.parallel: fsdp cannot split the parameter {name}, which has no "
                    "dimensions: give it the shape (1,)"
                )
        for block in separate_blocks(module):
            # Running statistics are float32, and batch norm wants weights of the same type.
            lowered = None if has_batchnorm(block) else self.lowered
            policy = MixedPrecisionPolicy(param_dtype=lowered, reduce_dtype=torch.float32)
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        # As accelerate does for data parallelism, the outputs are raised to float32.
        raised = None if self.lowered is None else torch.float32
        module.register_forward_hook(_set_aside)
        fully_shard(module, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(output_dtype=raised))
        module.register_forward_hook(_put_back)
        return module

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        prepared: torch.optim.Optimizer = self.accelerator.prepare(optimizer)
        return module, prepared

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients are reduced after every micro-batch, so that no process has them whole."""
        return nullcontext()

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        trained = [parameter for parameter in parameters if parameter.grad is not None]
        # Parameters of the loss are not split. The two kinds cannot be mixed in one operation.
        parts = [[p for p in trained if is_dtensor(p) == split] for split in (True, False)]
        gradients = [[p.grad for p in part if p.grad is not None] for part in parts if part]
        norm = torch.linalg.vector_norm(torch.stack([_full(get_total_norm(g)) for g in gradients]))
        for part in parts:
            clip_grads_with_norm_(part, most, norm)
        return norm

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One tensor after the other is gathered; the first process keeps them, on its CPU."""
        gathered = {}
        for name, tensor in weights.items():
            full = _full(tensor.detach())
            if self.accelerator.is_main_process:
                gathered[name] = full.cpu()
        return gathered


def spread(parallel: str, accelerator: Accelerator) -> DataParallel:
    """How the model of a run is spread over its processes, for a value of ``train.parallel``."""
    if accelerator.distributed_type in _PLUGINS:
        raise RequestError(
            f"accelerate was told to use {accelerator.distributed_type.value}, which labo does not "
            "support; launch with --multi_gpu and set train.parallel=fsdp to split the model"
        )
    if parallel == "data":
        return DataParallel(accelerator)
    if accelerator.num_processes > 1:
        return FullySharded(accelerator)
    alone = DataParallel(accelerator)
    alone.notes = ["train.parallel=fsdp has no effect with one process"]
    return alone


# ------------------------------------------------------------------ blocks


def separate_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model that share no parameter with another part of it."""
    candidates = list(dict.fromkeys(blocks(module)))
    inside = {part for block in candidates for part in block.modules()}
    outside = {
        parameter
        for part in module.modules()
        if part not in inside
        for parameter in part.parameters(recurse=False)
    }
    holders = Counter([*outside, *(p for block in candidates for p in block.parameters())])
    return [block for block in candidates if all(holders[p] == 1 for p in block.parameters())]


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost elements of lists and sequences that have parameters and layers of their own.

    These are the layers of a transformer, and the residual blocks of a convolutional network.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> len(blocks(nn.TransformerEncoder(layer, 3)))
        3
        >>> blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        []
    """
    outermost = []
    for child in module.children():
        composed = any(True for _ in child.children()) and any(True for _ in child.parameters())
        if isinstance(module, _LISTS) and composed and not isinstance(child, _LISTS):
            outermost.append(child)
        else:
            outermost += blocks(child)
    return outermost


# ------------------------------------------------------------------ parameters in outputs


class _Aside:
    """A parameter among the outputs of a model. FSDP2 would look into a tuple or a dataclass."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


def _set_aside(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Hide the parameters in a NamedTuple of outputs, such as the weight of the output layer.

    FSDP2 registers a hook on each output. On a parameter it would stay, one more for every step.
    """
    if not hasattr(outputs, "_make"):
        return outputs
    return outputs._make(_Aside(x) if isinstance(x, nn.Parameter) else x for x in outputs)


def _put_back(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Undo :func:`_set_aside`."""
    if not hasattr(outputs, "_make"):
        return outputs
    return outputs._make(x.parameter if isinstance(x, _Aside) else x for x in outputs)


def _full(tensor: Tensor) -> Tensor:
    """A tensor that may be split over the processes, gathered by all of them."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
