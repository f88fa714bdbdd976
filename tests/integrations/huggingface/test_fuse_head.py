"""fuse_head on real model classes: values, gradients, memory, copies, adapters, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import accelerate
import peft
import pytest
import torch
import torch._dynamo.testing
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import labo
from labo.integrations import huggingface as hf
from labo.integrations.huggingface import head as head_module
from labo.integrations.huggingface.head import is_fused
from labo.integrations.huggingface.losses import take_used
from probes import LargestTensor
from tiny_models import (
    FAMILIES,
    V,
    adapted,
    arguments,
    assert_same,
    build,
    by_hand,
    collate,
    examples,
    gradients,
    is_seq2seq,
    make_trainer,
)

each_family = pytest.mark.parametrize("family", FAMILIES)


# ------------------------------------------------------------------ the fused head


@each_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fused_model_equals_the_model_and_the_loss_apart(family, tied):
    plain = build(family, tied).train()
    batch = collate(examples(3, is_seq2seq(plain)))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    expected = by_hand(plain, batch, labo.LABOLoss())
    output = fused(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients(fused, output.loss), gradients(plain, expected), rtol=1e-3, atol=1e-5)
    head = plain.get_output_embeddings().weight
    assert (head is plain.get_input_embeddings().weight) == tied


@each_family
@torch.no_grad()
def test_evaluation_is_the_models_own_with_its_logits(family):
    plain = build(family).eval()
    batch = collate(examples(3, is_seq2seq(plain)))
    expected = plain(**batch)
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    output = fused(**batch)
    torch.testing.assert_close(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(output[0], expected.loss)
    as_tuple = fused(**batch, return_dict=False)
    assert torch.equal(as_tuple[1], expected.logits)


def test_a_forgotten_cap_would_be_noticed(monkeypatch):
    """With Gemma's cap of 30, although untrained logits are far below it."""
    model = build("Gemma2")
    model.config.final_logit_softcapping = 30.0
    known = head_module.output_layer
    monkeypatch.setattr(
        head_module, "output_layer", lambda *x: dataclasses.replace(known(*x), softcap=None)
    )
    with pytest.raises(ValueError, match="the loss of Gemma2ForCausalLM is not the cross entropy"):
        hf.fuse_head(model, labo.LABOLoss())


@pytest.mark.parametrize("family", ["GPT2", "Marian"])
def test_generation_and_undoing(family):
    model = build(family).eval()
    ids = collate(examples(2, True))["input_ids"][:, :3]
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before, kind, kind_of_loss = model.generate(ids, **settings), type(model), model.loss_type
    names = set(vars(model))
    hf.fuse_head(model, labo.LABOLoss())
    assert isinstance(model, kind)
    assert torch.equal(model.generate(ids, **settings), before)
    hf.unfuse_head(model)
    assert type(model) is kind
    assert model.loss_type == kind_of_loss
    assert set(vars(model)) == names
    assert not model.get_output_embeddings()._forward_pre_hooks
    with pytest.raises(ValueError, match="not fused"):
        hf.unfuse_head(model)


def test_fused_training_stores_no_logits():
    """Not even in the model's own code, such as a bias that is added to every row."""
    for family in ("Llama", "Gemma2", "Marian"):
        model = build(family, tied=False, vocabulary=500)
        batch = collate(examples(40, is_seq2seq(model)))
        hf.fuse_head(model, labo.LABOLoss(), options=labo.LinearLossOptions(batch_chunk_size=16))
        with LargestTensor() as seen:
            model(**batch).loss.backward()
        assert seen.largest < batch["labels"].numel() * 500 / 4, family


def test_num_items_and_labels_that_are_shifted_already():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    batch = collate(examples(3))
    mean = model(**batch).loss
    count = int((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(model(**batch, num_items_in_batch=7).loss, mean * count / 7)
    items = torch.tensor(7)
    torch.testing.assert_close(model(**batch, num_items_in_batch=items).loss, mean * count / 7)
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert torch.equal(model(**batch, shift_labels=shifted).loss, mean)


def test_positional_inputs_and_leading_tuple():
    model = hf.fuse_head(build("GPT2"), labo.LABOLoss())
    batch = collate(examples(2))
    loss = model(batch["input_ids"], labels=batch["labels"], return_dict=False)[0]
    assert torch.equal(loss, model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)


def test_warmup_inside_a_fused_model():
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    plain = build("Llama")
    fused, batch = hf.fuse_head(copy.deepcopy(plain), loss), collate(examples(3))
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, loss.before))
    loss.step()
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, loss.after))
    assert not any("loss" in name for name in fused.state_dict())


def test_half_precision():
    plain = build("Llama").bfloat16()
    batch = collate(examples(3))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    torch.testing.assert_close(
        fused(**batch).loss, by_hand(plain, batch, labo.LABOLoss()), rtol=1e-2, atol=1e-2
    )


def test_gradient_checkpointing_changes_nothing():
    plain = build("Llama").train()
    batch = collate(examples(3))
    expected = gradients(plain, by_hand(plain, batch, labo.LABOLoss()))
    fused = hf.fuse_head(plain, labo.LABOLoss())
    fused.gradient_checkpointing_enable()
    assert_same(gradients(fused, fused(**batch).loss), expected)


def test_compiled_with_ignored_rows_equals_eager():
    """And is compiled once, although a Trainer checks in each step that the loss was used."""
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(3))
    expected = model(**batch, num_items_in_batch=20).loss
    slopes = gradients(model, expected)
    torch._dynamo.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert take_used(model._labo.loss)
        value = compiled(**batch, num_items_in_batch=20).loss
        torch.testing.assert_close(value, expected)
        assert_same(gradients(model, value), slopes)
    assert backend.frame_count == 1


def test_copies_are_models_of_their_own():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    batch = collate(examples(3))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(twin(**batch).loss, model(**batch).loss)
        with torch.no_grad():
            twin.get_output_embeddings().weight.zero_()
        assert not torch.equal(twin(**batch).loss, model(**batch).loss)


def test_saved_as_the_class_it_was(tmp_path):
    model = hf.fuse_head(build("Marian"), labo.LABOLoss())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.MarianMTModel
    assert_same(loaded.state_dict().values(), model.state_dict().values(), rtol=0, atol=0)


def test_a_resized_vocabulary_is_followed():
    plain = build("Llama", tied=False)
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    for model in (plain, fused):
        torch.manual_seed(3)
        model.resize_token_embeddings(V + 8, mean_resizing=False)
    batch = collate(examples(3))
    torch.testing.assert_close(fused(**batch).loss, by_hand(plain, batch, labo.LABOLoss()))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (labo.DistillationLoss(), "needs a teacher"),
        (labo.CSKDLoss(), "needs a second sample"),
        (labo.KRLSLoss(V), "has trainable parameters"),
        (labo.OnlineLabelSmoothingLoss(V), "OnlineLabelSmoothingLoss is not one"),
        (nn.CrossEntropyLoss(), r"torch.nn.CrossEntropyLoss is not.*use labo.CrossEntropyLoss\(\)"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), r"use labo.LabelSmoothingLoss\(alpha=0.1\)"),
        (
            labo.Warmup(nn.CrossEntropyLoss(), labo.LABOLoss(), 3),
            "torch.nn.CrossEntropyLoss is not",
        ),
        (nn.NLLLoss(), "needs a loss of labo, got NLLLoss"),
        (labo.LABOLoss(reduction="sum"), 'must have reduction="mean"'),
        (labo.LABOLoss(ignore_index=0), "counts every label except -100"),
        (labo.LABOLoss(dim=1), "the classes are the last dimension"),
        (
            labo.Warmup(labo.FocalLoss(reduction="none"), labo.LABOLoss(), 3),
            'must have reduction="mean"',
        ),
    ],
)
def test_fuse_head_refuses_a_loss(loss, sentence):
    with pytest.raises(ValueError, match=sentence):
        hf.fuse_head(build("Llama"), loss)


def test_fuse_head_refuses_a_model():
    own_way = build("Llama")
    own_way.loss_function = lambda logits, labels, *_, **__: 2 * logits.logsumexp(-1).mean()
    with pytest.raises(ValueError, match="the loss of LlamaForCausalLM is not the cross entropy"):
        hf.fuse_head(own_way, labo.LABOLoss())
    config = build("Marian").config
    config.is_decoder, config.is_encoder_decoder = True, False
    unshifted = transformers.MarianForCausalLM(config)
    with pytest.raises(ValueError, match="not known whether a position of Marian"):
        hf.fuse_head(unshifted, labo.LABOLoss())
    with pytest.raises(ValueError, match="have its weights in memory"):
        hf.fuse_head(build("Llama").to("meta"), labo.LABOLoss())
    replaced = build("Llama")
    replaced.forward = replaced.forward
    with pytest.raises(ValueError, match="was replaced by transformers"):
        hf.fuse_head(replaced, labo.LABOLoss())
    dispatched = accelerate.hooks.add_hook_to_module(build("Llama"), accelerate.hooks.ModelHook())
    with pytest.raises(ValueError, match=r"was replaced by accelerate\.hooks.*device_map"):
        hf.fuse_head(dispatched, labo.LABOLoss())
    with pytest.raises(TypeError, match="needs a model of transformers, got Linear"):
        hf.fuse_head(nn.Linear(2, 2), labo.LABOLoss())
    twice = hf.fuse_head(build("Llama"), labo.LABOLoss())
    with pytest.raises(ValueError, match="fused already"):
        hf.fuse_head(twice, labo.LABOLoss())


# ------------------------------------------------------------------ a replaced forward pass


def test_a_replaced_forward_pass_is_noticed():
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(2))
    own = transformers.LlamaForCausalLM.forward
    model.forward = own.__get__(model)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(ValueError, match=r"no effect.*by transformers"):
            model(**batch)
    with pytest.raises(ValueError, match="fuse_head has no effect"):
        model(batch["input_ids"], None, None, None, None, batch["labels"])
    assert model(input_ids=batch["input_ids"]).logits is not None  # no labels, no loss
    hf.unfuse_head(model)
    assert model.forward.__func__ is own


def test_a_wrapped_forward_pass_is_not_refused():
    """As by accelerate, and with copies that use their own weights."""
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(2))
    expected, inner = model(**batch).loss, model.forward.__func__
    model.forward = (lambda self, *args, **kwargs: inner(self, *args, **kwargs)).__get__(model)
    bound = model.forward
    model.forward = lambda *args, **kwargs: bound(*args, **kwargs)  # around the first one
    assert torch.equal(model(**batch).loss, expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).loss, expected)


@pytest.fixture
def _fresh_accelerator():
    """Accelerators share their state, which other tests have set."""
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("_fresh_accelerator")
def test_accelerate_may_wrap_but_not_unwrap():
    """When it removes its mixed precision, accelerate installs the forward pass of the class."""
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(2))
    expected = model(**batch).loss
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model)
    torch.testing.assert_close(prepared(**batch).loss, expected, rtol=1e-2, atol=1e-2)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    with pytest.raises(ValueError, match="fuse_head has no effect"):
        plain(**batch)


def test_liger_replaces_the_forward_pass(tmp_path):
    """Its loss only: the other kernels do not run on a CPU."""
    data, only_loss = examples(4), {"rope": False, "rms_norm": False, "swiglu": False}

    def trainer(**config):
        args = arguments(tmp_path, max_steps=1, use_liger_kernel=True, liger_kernel_config=config)
        model = hf.fuse_head(build("Llama"), labo.LABOLoss())
        return make_trainer(None, model, None, args, data)

    with pytest.raises(ValueError, match=r"by liger_kernel.*fused_linear_cross_entropy.: False"):
        trainer(**only_loss).train()
    allowed = trainer(**only_loss, fused_linear_cross_entropy=False)
    with torch.no_grad():
        nll = allowed.model(**collate(data)).loss.item()
    assert allowed.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-5)
    loss = by_hand(build("Llama"), collate(data), labo.LABOLoss()).item()
    assert allowed.train().training_loss == pytest.approx(loss, rel=1e-5)


def test_a_class_that_is_patched(monkeypatch):
    """Liger's forward pass computes logits if it gets no labels, so it can be fused."""
    from liger_kernel.transformers.model.llama import lce_forward

    fused, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(2))
    expected = fused(**batch).loss
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lce_forward)
    assert torch.equal(fused(**batch).loss, expected)
    with pytest.raises(ValueError, match="is not the cross entropy of its output layer"):
        hf.fuse_head(build("Llama").train(), labo.LABOLoss())

    def without_the_layer(self, input_ids, **kwargs):
        return self.model(input_ids).last_hidden_state @ self.lm_head.weight.T

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", without_the_layer)
    with pytest.raises(ValueError, match="does not call its output layer"):
        fused(**batch)


# ------------------------------------------------------------------ the output layer


def test_an_output_layer_that_is_missing_or_not_linear():
    missing = build("Llama")
    missing.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="LlamaForCausalLM has no output layer"):
        hf.fuse_head(missing, labo.LABOLoss())
    other = build("Llama", tied=False)
    other.lm_head = nn.Bilinear(32, 32, V)
    with pytest.raises(ValueError, match=r"is torch's Bilinear and not torch\.nn\.Linear"):
        hf.fuse_head(other, labo.LABOLoss())


def test_a_quantized_output_layer():
    class Linear8bit(nn.Linear):
        """As in bitsandbytes: the weight is made of integers."""

        def __init__(self):
            super().__init__(32, V, bias=False)
            self.weight = nn.Parameter(torch.ones(V, 32, dtype=torch.int8), requires_grad=False)

    class QuantLinear(nn.Module):
        """As for GPTQ: there is no weight."""

    class Quantized(torch.Tensor):
        """As in torchao: a tensor in an ordinary layer."""

    ordinary = nn.Linear(32, V, bias=False)
    ordinary.weight = nn.Parameter(torch.randn(V, 32).as_subclass(Quantized), requires_grad=False)
    for layer in (Linear8bit(), QuantLinear(), ordinary):
        model = build("Llama", tied=False)
        model.lm_head = layer
        name = type(layer).__name__
        with pytest.raises(ValueError, match=rf"is quantized \(.*{name}\).*skip_modules"):
            hf.fuse_head(model, labo.LABOLoss())


@pytest.fixture
def mesh():
    """A process group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_an_output_layer_that_is_sharded_before_it_is_fused(mesh):
    model = build("Llama", tied=False)
    torch.distributed.fsdp.fully_shard(model.lm_head, mesh=mesh)
    with pytest.raises(ValueError, match=r"is sharded \(a DTensor\).*before FSDP shards it"):
        hf.fuse_head(model, labo.LABOLoss())


@pytest.mark.parametrize("group", ["root", "own", "with the last norm"])
def test_an_output_layer_in_any_group_of_fsdp2(group, mesh):
    """Two steps and an evaluation; the weight is sharded again after each use."""
    model = hf.fuse_head(build("Llama", tied=False), labo.LABOLoss(), eval_logits=True)
    batch, plain = collate(examples(2)), build("Llama", tied=False)
    if group != "root":
        grouped = [model.lm_head] if group == "own" else [model.model.norm, model.lm_head]
        torch.distributed.fsdp.fully_shard(grouped, mesh=mesh, reshard_after_forward=True)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    steps = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    for _ in range(2):
        value, expected = model(**batch).loss, by_hand(plain, batch, labo.LABOLoss())
        torch.testing.assert_close(value, expected)
        for step, loss in zip(steps, (value, expected), strict=True):
            step.zero_grad()
            loss.backward()
            step.step()
    ours = [parameter.full_tensor() for parameter in model.parameters()]
    assert_same(ours, plain.parameters())
    with torch.no_grad():
        outputs, expected = model(**batch), plain(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.logits, expected.logits)


def test_a_weight_that_is_elsewhere():
    model = hf.fuse_head(build("Llama", tied=False), labo.LABOLoss())
    head = model.lm_head
    head.register_forward_hook(
        lambda *_: setattr(head.weight, "data", torch.empty(0)), prepend=True
    )
    with pytest.raises(ValueError, match=r"is sharded \(shape \(0,\)\)"):
        model(**collate(examples(2)))


def test_hidden_states_in_parts(mesh):
    model = hf.fuse_head(build("Llama", tied=False), labo.LABOLoss())
    placement = [torch.distributed.tensor.Replicate()]

    def distribute(module, args, output):
        return torch.distributed.tensor.DTensor.from_local(output, mesh, placement)

    model.model.norm.register_forward_hook(distribute)
    model.lm_head.register_forward_pre_hook(lambda layer, args: (args[0].to_local(),))
    with pytest.raises(ValueError, match="the hidden states are a DTensor"):
        model(**collate(examples(2)))


def test_logits_in_parts(mesh, tmp_path):
    trainer = make_trainer("regularized", build("Llama"), labo.LABOLoss(), arguments(tmp_path))
    parts = [torch.distributed.tensor.Shard(2)]
    logits = torch.distributed.tensor.distribute_tensor(torch.randn(2, 5, V), mesh, parts)
    with pytest.raises(ValueError, match="the logits are a DTensor"):
        trainer.compute_loss_func({"logits": logits}, torch.zeros(2, 5, dtype=torch.long))


# ------------------------------------------------------------------ PEFT


HEAD = ("q_proj", "lm_head")
ADAPTERS = {
    "attention": (("q_proj", "v_proj"), {}),
    "and the head": (("q_proj", "v_proj"), {"modules_to_save": ["lm_head"]}),
    "lora": (HEAD, {}),
    "rslora": (HEAD, {"use_rslora": True}),
    "dora": (HEAD, {"use_dora": True}),
}
OF_THE_HEAD = {"attention": 0, "and the head": 1, "lora": 2, "rslora": 2, "dora": 3}


@pytest.mark.parametrize("first", ["fuse", "adapt"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("Llama", kind) for kind in ADAPTERS),
        *(("Gemma2", kind) for kind in ("lora", "dora")),
        *(("Cohere", kind) for kind in ("rslora", "dora")),
    ],
)
def test_adapted_models(family, kind, first):
    """The gradients of A, B and the magnitude are those of the PEFT model; so is evaluation."""
    modules, settings = ADAPTERS[kind]
    plain, batch = adapted(build(family, tied=False), *modules, **settings), collate(examples(3))
    if first == "adapt":
        fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    else:
        base = hf.fuse_head(build(family, tied=False), labo.LABOLoss())
        fused = adapted(base, *modules, **settings)
    expected, value = by_hand(plain, batch, labo.LABOLoss()), fused(**batch).loss
    torch.testing.assert_close(value, expected)
    learning = [name for name, p in fused.named_parameters() if p.requires_grad]
    assert all("lora" in name or "modules_to_save" in name for name in learning)
    assert sum("lm_head" in name for name in learning) == OF_THE_HEAD[kind]
    assert_same(gradients(fused, value), gradients(plain, expected), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        ours, theirs = fused(**batch), plain(**batch)
        torch.testing.assert_close(ours.loss, theirs.loss)
        torch.testing.assert_close(ours.logits + 0, theirs.logits)
        if modules == HEAD:
            ours = fused(**batch)
            fused.get_base_model().lm_head.lora_B["default"].weight.mul_(2)
            with pytest.raises(ValueError, match="has changed by now"):
                ours.logits.sum()
    assert not is_fused(hf.unfuse_head(fused))


def test_an_adapted_output_layer_that_is_switched_off_or_merged():
    fused = hf.fuse_head(adapted(build("Llama", tied=False), *HEAD), labo.LABOLoss())
    plain, batch = build("Llama", tied=False), collate(examples(3))
    adapted_value, base = fused(**batch).loss, by_hand(plain, batch, labo.LABOLoss())
    assert not torch.allclose(adapted_value, base)
    with fused.disable_adapter():
        torch.testing.assert_close(fused(**batch).loss, base)
    torch.testing.assert_close(fused(**batch).loss, adapted_value)
    fused.merge_adapter()
    torch.testing.assert_close(fused(**batch).loss, adapted_value)
    fused.unmerge_adapter()
    torch.testing.assert_close(fused(**batch).loss, adapted_value)


def test_the_dropout_of_an_adapted_output_layer():
    """In training only, and not in the comparison on four tokens."""
    model = adapted(build("Llama", tied=False), "lm_head", lora_dropout=0.5).train()
    plain, batch = copy.deepcopy(model).eval(), collate(examples(8))
    fused = hf.fuse_head(model, labo.LABOLoss())
    assert model.get_base_model().lm_head.lora_dropout["default"].training
    values = {fused(**batch).loss.item() for _ in range(3)}
    assert len(values) == 3
    expected = by_hand(plain, batch, labo.LABOLoss())
    torch.testing.assert_close(fused.eval()(**batch).loss, expected)


@pytest.mark.parametrize("group", ["root", "own"])
def test_an_adapted_output_layer_under_fsdp2(group, mesh):
    plain, batch = adapted(build("Llama", tied=False), *HEAD), collate(examples(2))
    model = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss())
    if group == "own":
        head = model.get_base_model().lm_head
        torch.distributed.fsdp.fully_shard(head, mesh=mesh, reshard_after_forward=True)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    expected = by_hand(plain, batch, labo.LABOLoss())
    for _ in range(2):
        model.zero_grad()
        value = model(**batch).loss
        torch.testing.assert_close(value, expected)
        value.backward()
    ours = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
    assert_same(ours, gradients(plain, expected))


def test_adapted_output_layers_that_are_refused():
    batch = collate(examples(2))
    dropped = adapted(build("Llama", tied=False), *HEAD, use_dora=True, lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"does not know \(DoRA with dropout\).*modules_to_save"):
        hf.fuse_head(dropped, labo.LABOLoss())
    several = hf.fuse_head(adapted(build("Llama", tied=False), *HEAD), labo.LABOLoss())
    several.add_adapter("other", LoraConfig(r=2, target_modules=["lm_head"]))
    several.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"has 2 active adapters \(default, other\)"):
        several(**batch)
    several.set_adapter("other")
    several(**batch)
    config = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    other = get_peft_model(build("Llama", tied=False), config)
    with pytest.raises(ValueError, match=r"is adapted \(peft's Linear\), and not by LoRA or DoRA"):
        hf.fuse_head(other, labo.LABOLoss())
    loss, teacher = labo.DistillationLoss(), adapted(build("Llama", tied=False), *HEAD)
    with pytest.raises(ValueError, match="the output layer of the teacher has an adapter"):
        hf.fuse_head(build("Llama", tied=False), loss, teacher=teacher)
