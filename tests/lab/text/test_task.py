"""What the tasks on text share: batches in another order, losses without logits, examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import labo
from labo.lab.errors import RequestError
from labo.lab.language_modeling.task import LanguageModelingTask
from labo.lab.methods import METHODS
from labo.lab.recipes import load_recipe
from labo.lab.tasks import Batch
from labo.lab.text.arrow import IGNORED
from labo.lab.text.head import Head
from labo.lab.text.task import TokenTask
from labo.lab.text.token_text import token_name
from labo.lab.translation.task import TranslationTask
from tiny_language import prepare_prompts

Make = Callable[..., TokenTask]
# A formula, LABO, a table, the vocabulary of translation, and a sum over the batch.
METHODS_HERE = ["base", "labo", "acls", "mls", "ger"]
PHRASES = ["data.size=300", "data.vocabulary=400", "model.width=16", "model.ffn=32"]
PHRASES += ["model.heads=2", "model.positions=128", "model.encoder_layers=1"]
PHRASES += ["model.decoder_layers=3", "model.dropout=0", "train.batch_tokens=256"]
DOCUMENTS = ["data.name=prepared", "data.block=64", "train.batch_tokens=128", "model.width=16"]
DOCUMENTS += ["model.layers=3", "model.heads=2", "model.dropout=0"]


@pytest.fixture(scope="module", params=["phrases", "fixnorm", "prompts"])
def make(request, tmp_path_factory) -> Iterator[Make]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "prompts":
        given = [*DOCUMENTS, f"data.path={prepare_prompts(folder / 'data')}"]
        kind, recipe = LanguageModelingTask, "lm-manual"
    else:
        given = [*PHRASES, f"model.fixnorm={str(request.param == 'fixnorm').lower()}"]
        kind, recipe = TranslationTask, "cldr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABO_CACHE", str(folder))
        yield lambda *settings: kind(load_recipe(recipe, [*given, *settings]))


@pytest.fixture(scope="module")
def small(make) -> TokenTask:
    return make()


def all_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(N, T, V), with padding."""
    inputs = [getattr(batch.inputs, field.name) for field in fields(batch.inputs)]
    head = model(*inputs)
    return head.states @ head.weight.T


def test_an_epoch_has_the_batches_of_the_others_in_another_order(small):
    first, second = (
        [tuple(small.global_batch(epoch, i).tolist()) for i in range(small.steps_per_epoch)]
        for epoch in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_the_loss_is_that_of_all_logits(method, make, small):
    if not METHODS[method].needs <= small.provides:
        with pytest.raises(RequestError, match=f"{method} needs"):
            make(f"method={method}")
        return
    small = make(f"method={method}")
    torch.manual_seed(0)
    model = small.build_model()
    facts = {"num_classes": small.num_classes, "epochs": 2, "task": small, "model": model}
    facts |= {"accelerator": None, "parallel": None}
    loss, _ = METHODS[method].build(small.recipe.method, facts)
    batch = small.batch(small.global_batch(0, 0), 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = small.loss(loss, small.outputs(model, batch), batch, ())
    found = torch.autograd.grad(value, parameters)
    expected = loss(all_logits(model, batch), batch.target)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
    wanted = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_teacher_gives_hidden_states_not_logits(small):
    torch.manual_seed(0)
    model, teacher = small.build_model(), small.build_model()
    batch = small.batch(small.global_batch(0, 0), 0)
    loss = labo.DistillationLoss(alpha=0.5, tau=1.0, reduction="sum")
    second = small.outputs(teacher, batch)
    assert isinstance(second, Head)
    value = small.loss(loss, small.outputs(model, batch), batch, (second,))
    expected = loss(all_logits(model, batch), batch.target, all_logits(teacher, batch))
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)


def test_inner_states_are_those_of_the_first_layers(small):
    """ConNet reads the mean of the outputs of the first layers, at the tokens to be learned."""
    model = small.build_model()
    batch = small.batch(small.global_batch(0, 0), 0)
    inside: Any = model.inside
    layers = inside.model.decoder.layers if hasattr(inside, "model") else inside.transformer.h
    outputs = []
    for layer in layers[:2]:
        layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    head = small.outputs(model, batch, inner_layers=2)
    expected = torch.stack([x[0] if isinstance(x, tuple) else x for x in outputs]).mean(0)
    torch.testing.assert_close(head.inner, expected[batch.target != IGNORED])
    assert small.outputs(model, batch).inner is None
    assert model.width == head.inner.shape[-1]
    draws, alone = small.token_draws(batch, "trust"), small.batch(batch.index[:1], 0)
    assert draws.shape == head.states.shape[:1]
    first = int((alone.target != IGNORED).sum())
    torch.testing.assert_close(small.token_draws(alone, "trust"), draws[:first])


def test_a_batch_without_targets_gives_zero_and_touches_every_weight(small):
    model = small.build_model()
    batch = small.batch(small.global_batch(0, 0), 0).without_targets()
    value = small.loss(labo.LABOLoss(reduction="sum"), small.outputs(model, batch), batch, ())
    value.backward()
    assert value == 0
    learned = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in learned)


def test_examples_have_all_their_logits(small):
    torch.manual_seed(0)
    found = small.examples(small.build_model(), "test", Accelerator(cpu=True))
    assert len(found["classes"]) == small.num_classes
    assert len(found["examples"]) == 5
    for example in found["examples"]:
        assert len(example["logits"]) == small.num_classes
        token = found["classes"][example["target"]]
        assert example["title"].endswith(f": {token_name(token)}")


def test_reference_tokens_are_measured_outside_of_autocast(small):
    class Half(Accelerator):
        def autocast(self):
            return torch.autocast("cpu", torch.bfloat16)

    heads = small._heads(small.build_model(), "valid", Half(cpu=True))
    within = [torch.is_autocast_enabled("cpu") for _ in heads]
    assert within
    assert not any(within)
