"""compute_loss_func inside the real Trainer: the step of the whole batch, as by regularize."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import labo
from labo.integrations import huggingface as hf
from tiny_models import (
    SIZES,
    V,
    arguments,
    assert_step,
    build,
    by_hand,
    collate,
    examples,
)


class MyLlama(transformers.LlamaForCausalLM):
    """As people subclass a model. Its loss_type is derived from the name, and is None."""


def made(name: str):
    if name != "MyLlama":
        return build(name)
    torch.manual_seed(0)
    return MyLlama(transformers.LlamaConfig(vocab_size=V, **SIZES))


def make(model, loss, args, data, **settings):
    function = hf.compute_loss_func(model, loss)
    shared = {"train_dataset": data, "data_collator": collate} | settings
    return transformers.Trainer(model=model, args=args, compute_loss_func=function, **shared)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "MyLlama"])
def test_a_step_is_that_of_the_whole_batch(name, tmp_path):
    model, data = made(name), examples(8)
    trainer = assert_step(make, model, labo.LABOLoss(), data, tmp_path, accumulate=4)
    with torch.no_grad():
        nll = by_hand(model.eval(), collate(data), nn.CrossEntropyLoss()).item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-5)


def test_a_subclass_can_be_fused(tmp_path):
    assert_step("fused", made("MyLlama"), labo.LABOLoss(), examples(4), tmp_path, accumulate=2)


def test_a_warmup_needs_its_callback(tmp_path):
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    args, data = arguments(tmp_path, max_steps=8), examples(12)
    with pytest.warns(UserWarning, match=r"callbacks=\[RegularizationCallback\(loss\)\]"):
        make(build("Llama"), loss, args, data).train()
    assert loss.steps_done == 0
    make(build("Llama"), loss, args, data, callbacks=[hf.RegularizationCallback(loss)]).train()
    assert loss.steps_done == 8


def test_labels_that_are_not_shifted_are_warned_about():
    with pytest.warns(UserWarning, match="LlamaForCausalLM .* shift=False was given"):
        hf.compute_loss_func(build("Llama"), labo.LABOLoss(), shift=False)


def test_refused(tmp_path):
    loss = labo.LABOLoss()
    for family in ("T5", "Bart"):  # BART would decode the source, without a warning
        with pytest.raises(ValueError, match="makes its decoder inputs from the labels"):
            hf.compute_loss_func(build(family), loss)
    with pytest.raises(ValueError, match="the model computes the loss already"):
        hf.compute_loss_func(hf.fuse_head(build("Llama"), loss), loss)
    with pytest.raises(ValueError, match="DistillationLoss needs a teacher"):
        hf.compute_loss_func(build("Llama"), labo.DistillationLoss())
    with pytest.raises(TypeError, match="first argument must be the model, got LABOLoss"):
        hf.compute_loss_func(loss, build("Llama"))
    trainer = make(build("Llama"), loss, arguments(tmp_path), [])
    with pytest.raises(ValueError, match=r"a loss of labo already \(compute_loss_func\)"):
        hf.regularize(trainer, loss)
