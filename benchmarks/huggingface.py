"""A training step, and an evaluation, of a language model with and without a fused head.

Extra memory is measured in a fresh process, ``python -m benchmarks.huggingface``: the peak of a
step beyond the model, its gradients, and the memory that remains after a step on two tokens. With
``--evaluate`` it is the peak of ``Trainer.evaluate(prediction_loss_only=True)`` instead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

import labo

from .measure import extra_at_peak


class Size(NamedTuple):
    """Sequences, their length, and the dimensions of a Llama with tied embeddings."""

    batch: int
    length: int
    width: int
    layers: int
    vocabulary: int


FULL = Size(batch=8, length=256, width=256, layers=4, vocabulary=32768)
EVALUATION = Size(batch=16, length=256, width=64, layers=2, vocabulary=50257)
SMOKE = Size(batch=2, length=8, width=16, layers=1, vocabulary=512)
# The loss of each contender. The first two store the logits.
CONTENDERS = {
    "transformers CE": None,
    "LABO on logits": labo.LABOLoss,
    "fuse_head LABO": labo.LABOLoss,
    "fuse_head CE": labo.CrossEntropyLoss,
}


def llama(size: Size) -> Any:
    """The model, untrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _model(name: str, size: Size) -> Any:
    from labo.integrations.huggingface import fuse_head

    model, loss = llama(size), CONTENDERS[name]
    return fuse_head(model, loss()) if loss is not None and _is_fused(name) else model


def _is_fused(name: str) -> bool:
    return name.startswith("fuse_head")


def step(name: str, size: Size) -> Callable[[int], None]:
    """Forward and backward pass on the first tokens of each sequence."""
    model, loss = _model(name, size), CONTENDERS[name]
    tokens = torch.randint(size.vocabulary, (size.batch, size.length))

    def run(length: int) -> None:
        ids = tokens[:, :length]
        if loss is None or _is_fused(name):
            value = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            logits = model(input_ids=ids, use_cache=False).logits
            target = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            value = loss()(logits, target)
        value.backward()

    return run


def evaluation(name: str, size: Size) -> Callable[[int], None]:
    """``Trainer.evaluate`` on one batch of the first tokens of each sequence."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_eval_batch_size=size.batch,
        prediction_loss_only=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=_model(name, size), args=arguments)
    trainer.remove_callback(PrinterCallback)
    tokens = torch.randint(size.vocabulary, (size.batch, size.length))

    def run(length: int) -> None:
        trainer.evaluate([{"input_ids": row, "labels": row} for row in tokens[:, :length]])

    return run


def steps(names: Iterable[str], size: Size) -> dict[str, Callable[[], None]]:
    """Whole steps."""
    return {name: partial(step(name, size), size.length) for name in names}


def extra_bytes(name: str, size: Size, evaluate: bool = False) -> int:
    """Extra bytes at the peak of one step or one evaluation, in this process."""
    run = evaluation(name, size) if evaluate else step(name, size)
    run(2)
    return extra_at_peak(lambda: run(size.length))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    for field in Size._fields:
        parser.add_argument(field, type=int)
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    sizes = Size(*(getattr(arguments, field) for field in Size._fields))
    print(extra_bytes(arguments.name, sizes, arguments.evaluate))
