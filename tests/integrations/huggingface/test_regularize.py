"""regularize and fuse_head inside the real Trainer: steps, evaluation, resuming, teachers.

Each step is compared with the same step computed by hand. Known mistakes of other integrations are
tests here: gradients that grow with accumulation, labels shifted twice or not at all, a second
label smoothing that is ignored, evaluation by the training loss.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import torch.distributed.tensor
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments
from transformers.utils.import_utils import ACCELERATE_MIN_VERSION

import labo
from labo.integrations import huggingface as hf
from scripts import ROOT
from tiny_models import (
    V,
    adapted,
    arguments,
    assert_same,
    assert_step,
    bert,
    build,
    by_hand,
    collate,
    examples,
    gradients,
    is_seq2seq,
    kind_of_arguments,
    make_trainer,
    targets_and_logits,
    trained,
)

WAYS = ["regularized", "fused"]
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(
    ("way", "family", "accumulate"),
    [
        ("regularized", "GPT2", 4),
        ("regularized", "Marian", 4),
        ("regularized", "T5", 1),
        ("fused", "Llama", 4),
        ("fused", "T5", 4),
        ("fused", "GPT2", 1),
    ],
)
def test_a_step_is_that_of_the_whole_batch(way, family, accumulate, tmp_path):
    """One SGD step on 8 sequences of uneven lengths, in 1 or 4 micro-batches."""
    model = build(family)
    data = examples(8, is_seq2seq(model))
    assert_step(way, model, labo.LABOLoss(), data, tmp_path, accumulate=accumulate)


LOSSES = [("regularized", labo.LABOLoss), ("regularized", nn.CrossEntropyLoss)]


each_loss = pytest.mark.parametrize(("way", "kind"), [*LOSSES, ("fused", labo.LABOLoss)])


@each_loss
def test_a_step_without_targets_changes_nothing(way, kind, tmp_path):
    """The router losses of a mixture of experts go with the targets, so they are 0, too."""
    model, data = build("Mixtral", output_router_logits=True), examples(4)
    for row in data:
        row["labels"] = [-100] * len(row["labels"])
    before = copy.deepcopy(model.state_dict())
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
    args.gradient_accumulation_steps = 2
    trainer = make_trainer(way, model, kind(), args, data)
    assert trainer.train().training_loss == 0
    assert_same(model.state_dict().values(), before.values(), rtol=0, atol=0)
    assert trainer.evaluate(data)["eval_loss"] == 0


@each_loss
def test_a_micro_batch_without_targets_adds_nothing(way, kind, tmp_path):
    data = examples(6)
    for row in data[2:4]:
        row["labels"] = [-100] * len(row["labels"])
    assert_step(way, build("Llama"), kind(), data, tmp_path, accumulate=3)


@each_loss
def test_no_targets_in_any_form(way, kind, tmp_path):
    model, batch = build("Llama"), collate(examples(2))
    trainer = make_trainer(way, model, kind(), arguments(tmp_path))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for items in (None, 7, 0, torch.tensor(0), torch.tensor([0])):
        value = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items)
        assert not value.any()
        assert all(g is None or not g.any() for g in gradients(model, value.sum()))


@each_way
@pytest.mark.parametrize(
    ("family", "generate"), [("GPT2", False), ("Marian", False), ("Marian", True)]
)
def test_evaluation_loss_is_the_plain_nll(way, family, generate, tmp_path):
    model = build(family).eval()
    data = examples(6, is_seq2seq(model))
    with torch.no_grad():
        nll = by_hand(model, collate(data), nn.CrossEntropyLoss()).item()
    extra = {"predict_with_generate": True, "generation_max_length": 6} if generate else {}
    args = arguments(tmp_path, kind_of_arguments(model), **extra)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=5)
    metrics = make_trainer(way, model, loss, args).evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(nll, rel=1e-5)


def test_metrics_see_the_logits(tmp_path):
    seen = []
    trainer = make_trainer(
        "regularized",
        build("Llama"),
        labo.LABOLoss(),
        arguments(tmp_path),
        compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {},
    )
    trainer.evaluate(examples(3))
    assert [shape[-1] for shape in seen] == [V]


@each_way
def test_two_smoothings_are_refused(way, tmp_path):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 .* both set"):
        make_trainer(way, build("Llama"), labo.LABOLoss(), args)


@pytest.mark.parametrize("action", ["train", "evaluate"])
def test_a_second_smoothing_of_a_fused_model_without_the_callback(action, tmp_path):
    """Nothing sees the arguments, but the model sees that the labels are missing."""
    args = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    model = hf.fuse_head(build("Llama"), labo.LABOLoss())
    trainer = make_trainer(None, model, None, args, examples(4), eval_dataset=examples(4))
    with pytest.raises(ValueError, match="does not pass the labels to the model"):
        getattr(trainer, action)()


@torch.no_grad()
def test_a_fused_model_predicts_without_labels(tmp_path):
    data = [{"input_ids": row["input_ids"]} for row in examples(3)]
    model = build("Llama")
    expected = model(input_ids=torch.tensor([data[0]["input_ids"]])).logits
    trainer = transformers.Trainer(
        model=hf.fuse_head(model, labo.LABOLoss()),
        args=arguments(tmp_path, per_device_eval_batch_size=1),
        data_collator=transformers.default_data_collator,
    )
    predicted = torch.tensor(trainer.predict(data[:1]).predictions)
    torch.testing.assert_close(predicted, expected)


@each_way
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gradients_decide_which_loss_it_is(mode, way, tmp_path):
    """train() and eval() make no difference."""
    plain, model, batch = build("Llama"), build("Llama"), collate(examples(3))
    trainer = make_trainer(way, model, labo.LABOLoss(), arguments(tmp_path))
    getattr(model, mode)()
    value = trainer.compute_loss(model, batch)
    torch.testing.assert_close(value, by_hand(plain, batch, labo.LABOLoss()))
    nll = by_hand(plain, batch, nn.CrossEntropyLoss())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(trainer.compute_loss(model, batch), nll)


# ------------------------------------------------------------------ a model made by the Trainer


@pytest.mark.parametrize(("way", "family"), [("regularized", "GPT2"), ("fused", "Llama")])
def test_model_init_and_the_number_of_targets(way, family, tmp_path):
    """GPT-2 does not say that its labels are shifted, and each train() makes a new model."""

    def initialized(model, loss, args, data, **settings):
        def make():
            return hf.fuse_head(build(family), loss) if way == "fused" else build(family)

        trainer = transformers.Trainer(model_init=make, args=args, train_dataset=data, **settings)
        if way == "regularized":
            hf.regularize(trainer, loss)
        trainer.train()
        model.load_state_dict(trainer.model.state_dict())
        return trainer

    model = build(family)
    trainer = assert_step(initialized, model, labo.LABOLoss(), examples(8), tmp_path, accumulate=4)
    assert_same(trained(trainer.model), trained(model))  # of the second training, by assert_step


@each_way
def test_every_training_starts_with_its_warmup(way, tmp_path):
    """As its schedule of learning rates does. Afterwards the loss is still there."""
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=3)
    seen, model, plain, data = [], build("Llama"), build("Llama"), examples(8)
    trainer = make_trainer(way, model, loss, arguments(tmp_path, max_steps=4), data)
    watch = transformers.TrainerCallback()
    watch.on_step_begin = lambda *_, **__: seen.append(type(loss.active).__name__)
    trainer.add_callback(watch)
    for _ in range(2):
        trainer.train()
        assert loss.steps_done == 4
    assert seen == ["LabelSmoothingLoss", "LabelSmoothingLoss", "LABOLoss", "LABOLoss"] * 2
    plain.load_state_dict(model.state_dict())
    value = trainer.compute_loss(model, collate(data))
    torch.testing.assert_close(value, by_hand(plain, collate(data), labo.LABOLoss()))


# ------------------------------------------------------------------ another loss than the one given


def test_one_loss_only(tmp_path, monkeypatch):
    def trainer(model=None, **settings):
        return make_trainer(None, model or build("Llama"), None, arguments(tmp_path), **settings)

    with pytest.raises(ValueError, match="has a compute_loss_func"):
        hf.regularize(trainer(compute_loss_func=print), labo.LABOLoss())
    fused = hf.fuse_head(build("Llama"), labo.LABOLoss())
    with pytest.raises(ValueError, match="the model computes the loss already"):
        hf.regularize(trainer(fused), labo.LABOLoss())
    regularized = hf.regularize(trainer(), labo.LABOLoss())
    with pytest.raises(ValueError, match="has a loss of labo already"):
        hf.regularize(regularized, labo.LABOLoss())
    with pytest.raises(TypeError, match=r"needs a transformers\.Trainer, got LlamaForCausalLM"):
        hf.regularize(build("Llama"), labo.LABOLoss())
    with pytest.raises(TypeError, match="loss must be a Module"):
        hf.regularize(trainer(), print)
    parallel = trainer()
    config = SimpleNamespace(sp_enabled=True, sp_backend="deepspeed")
    monkeypatch.setattr(type(parallel.accelerator), "parallelism_config", config)
    with pytest.raises(ValueError, match="under DeepSpeed sequence parallelism"):
        hf.regularize(parallel, labo.LABOLoss())


def test_a_callback_without_its_loss_is_noticed(tmp_path):
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    args, callbacks = arguments(tmp_path, max_steps=1), [hf.RegularizationCallback(loss)]
    trainer = make_trainer(None, build("Llama"), None, args, examples(4), callbacks=callbacks)
    with pytest.raises(ValueError, match="Warmup was not computed in step 1"):
        trainer.train()


def test_a_trainer_that_does_not_use_the_loss_is_noticed(tmp_path):
    """What cannot be seen from its code is seen after the first step."""

    class Sometimes(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if self.state.global_step == 3:
                return super().compute_loss(model, inputs)
            return model(**inputs).loss

    args, data = arguments(tmp_path, max_steps=1), examples(4)
    trainer = Sometimes(model=build("Llama"), args=args, train_dataset=data, data_collator=collate)
    with pytest.raises(ValueError, match="LABOLoss was not computed in step 1"):
        hf.regularize(trainer, labo.LABOLoss()).train()


def test_a_fused_warmup_without_its_callback_warns():
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    fused, batch = hf.fuse_head(build("Llama"), loss), collate(examples(2))
    for _ in range(10):
        fused(**batch, num_items_in_batch=9)  # as the Trainer does
        loss.step()
    for _ in range(7):
        fused(**batch, num_items_in_batch=9)
    with pytest.warns(UserWarning, match=r"in 8 .* callbacks=\[RegularizationCallback\(loss\)\]"):
        fused(**batch, num_items_in_batch=9)
    fused(**batch)


def test_liger_and_a_loss_on_logits(tmp_path):
    """Liger's forward pass computes the logits if it gets no labels, also in evaluation."""
    data, model = examples(4), build("Llama")
    config = {"rope": False, "rms_norm": False, "swiglu": False}
    args = arguments(tmp_path, max_steps=1, use_liger_kernel=True, liger_kernel_config=config)
    trainer = make_trainer("regularized", model, labo.LABOLoss(), args, data)
    expected = by_hand(model, collate(data), labo.LABOLoss()).item()
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        nll = by_hand(model, collate(data), nn.CrossEntropyLoss()).item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-5)


# ------------------------------------------------------------------ labels


@pytest.mark.parametrize("family", ["Marian", "Bart"])
def test_decoder_inputs_are_made_from_the_labels(family, tmp_path, monkeypatch):
    """BART would make them from the source, without a warning."""
    model, batch = build(family), collate(examples(4, True))
    args = arguments(tmp_path, Seq2SeqTrainingArguments)
    trainer = make_trainer("regularized", model, labo.LABOLoss(), args)
    value = trainer.compute_loss(model, batch)
    torch.testing.assert_close(value, by_hand(model, batch, labo.LABOLoss()))
    assert "decoder_input_ids" not in batch
    monkeypatch.setattr(model, "prepare_decoder_input_ids_from_labels", None)
    torch.testing.assert_close(trainer.compute_loss(model, batch), value)
    monkeypatch.delattr(sys.modules[type(model).__module__], "shift_tokens_right")
    with pytest.raises(ValueError, match="cannot make decoder inputs from labels"):
        trainer.compute_loss(model, batch)


def test_the_usual_collator_of_translation(tmp_path):
    class Tokenizer:
        """As much of a tokenizer as DataCollatorForSeq2Seq needs."""

        padding_side = "right"

        def pad(self, rows, **_):
            return collate([{**row, "labels": row.get("labels", [-100])} for row in rows])

    model = build("Marian")
    data = examples(4, True)
    expected = by_hand(model, collate(data), labo.LABOLoss()).item()
    args = arguments(tmp_path, Seq2SeqTrainingArguments, max_steps=1)
    collator = DataCollatorForSeq2Seq(Tokenizer(), model=model)
    trainer = make_trainer(
        "regularized", model, labo.LABOLoss(), args, data, data_collator=collator
    )
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-5)


@each_way
def test_labels_that_the_collator_shifts(way, tmp_path):
    """As for context parallelism and for packed sequences."""
    data = examples(4)

    def shift(rows):
        batch = collate(rows)
        labels = batch["labels"]
        batch["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return batch

    expected = by_hand(build("Llama"), collate(data), labo.LABOLoss()).item()
    trainer = make_trainer(
        way,
        build("Llama"),
        labo.LABOLoss(),
        arguments(tmp_path, max_steps=1, remove_unused_columns=False),
        data,
        data_collator=shift,
    )
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-5)


def test_shift_is_known_or_asked_for(tmp_path):
    config = build("Marian").config
    config.is_decoder, config.is_encoder_decoder = True, False
    model, args = transformers.MarianForCausalLM(config), arguments(tmp_path, max_steps=1)
    data = examples(2)
    trainer = make_trainer(None, model, None, args, data)
    with pytest.raises(ValueError, match="pass shift=False or shift=True"):
        hf.regularize(trainer, labo.LABOLoss())
    hf.regularize(trainer, labo.LABOLoss(), shift=False)
    batch = collate(data)
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    kept = batch["labels"] != -100
    expected = labo.LABOLoss()(outputs.logits[kept], batch["labels"][kept])
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)
    assert trainer._get_num_items_in_batch([batch], "cpu") == kept.sum()


def test_inputs_are_checked(tmp_path):
    args = arguments(tmp_path)
    function = make_trainer("regularized", build("Llama"), labo.LABOLoss(), args).compute_loss_func
    logits = torch.randn(2, 5, V)
    with pytest.raises(ValueError, match='the batch has no "labels"'):
        function({"logits": logits}, None)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 4\) do not fit logits"):
        function({"logits": logits}, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="the labels of a causal model must be token indices"):
        function({"logits": logits}, logits.softmax(-1))


def test_a_part_of_the_classes_as_a_plain_tensor(tmp_path):
    """What ColwiseParallel returns without use_local_output=False: the first of two processes."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        model, batch = build("Llama", tied=False, vocabulary=V + 1), collate(examples(2))
        trainer = make_trainer("regularized", model, labo.LABOLoss(), arguments(tmp_path))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
        with pytest.raises(ValueError, match="those of 31 classes out of 62: each process holds a"):
            trainer.compute_loss(model, batch)
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------ classifiers


def sentences(count: int, soft: bool = False) -> list[dict]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, V, (count, 6), generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    if soft:
        labels = torch.rand(count, 5, generator=generator).softmax(-1)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("case", ["indices", "probabilities", "class weights", "torch's own"])
def test_a_classifier_under_accumulation(case, tmp_path):
    weight = torch.linspace(0.5, 2, 5)
    loss = labo.LABOLoss(weight=weight if case == "class weights" else None)
    if case == "torch's own":
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def by(model, batch, loss):
        labels = batch["labels"]
        mean = loss(model(input_ids=batch["input_ids"]).logits, labels)
        # with class weights the weighted sum over the number of targets
        return mean * weight[labels].sum() / 8 if case == "class weights" else mean

    data, rows = sentences(8, soft=case == "probabilities"), transformers.default_data_collator
    assert_step(
        "regularized", bert(num_labels=5), loss, data, tmp_path, accumulate=4, by=by, rows=rows
    )


# ------------------------------------------------------------------ resuming


@each_way
def test_resuming_goes_on_with_the_warmup(way, tmp_path):
    """20 steps are 10 and 10, with a switch of the loss at step 14."""
    data = examples(24)

    def run(resume=None, **settings):
        model = build("Llama")
        loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=14)
        args = arguments(
            tmp_path,
            max_steps=20,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            train_sampling_strategy="random",
            **settings,
        )
        make_trainer(way, model, loss, args, data).train(resume_from_checkpoint=resume)
        return model, loss

    straight, loss = run(save_strategy="steps", save_steps=10)
    assert loss.steps_done == 20
    resumed, again = run(str(tmp_path / "checkpoint-10"))
    assert again.steps_done == 20
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_resuming_with_another_loss_is_refused(tmp_path):
    def loss(steps=2, tau=1.25, before=None, **weighted):
        before, weight = before or labo.LabelSmoothingLoss(), weighted.get("weight", torch.ones(V))
        return labo.Warmup(before, labo.LABOLoss(tau=tau, weight=weight), steps=steps)

    def resume(loss):
        trainer = make_trainer("regularized", build("Llama"), loss, args, examples(8))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    make_trainer("regularized", build("Llama"), loss(), args, examples(8)).train()
    for other, message in (
        ({"steps": 9}, "its steps is 2 and that of Warmup is 9"),
        ({"tau": 1.5}, "its after.tau is 1.25 and that of Warmup is 1.5"),
        ({"before": labo.CrossEntropyLoss()}, "its before.class is 'LabelSmoothingLoss'"),
        ({"weight": torch.full((V,), 2.0)}, "its after.weight is 'a tensor"),
        ({"weight": None}, "its after.weight is 'a tensor .* is None"),
    ):
        with pytest.raises(ValueError, match=f"the state of another loss: {message}"):
            resume(loss(**other))
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    state.write_text(state.read_text().replace('"labo"', '"other"'))
    with pytest.raises(ValueError, match="checkpoint of step 1 has no state of the loss"):
        resume(loss())
    resume(labo.LABOLoss())  # a loss without a state does not need one


def test_resuming_restores_a_table(tmp_path):
    """Online label smoothing, from inside an epoch and from its last step (epochs have 6)."""
    data, collator = sentences(24), transformers.default_data_collator

    def run(resume=None):
        model, loss = bert(num_labels=5), labo.OnlineLabelSmoothingLoss(5)
        args = arguments(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=3)
        trainer = make_trainer("regularized", model, loss, args, data, data_collator=collator)
        trainer.train(resume_from_checkpoint=resume)
        return [*model.state_dict().values(), *loss.state_dict().values()]

    straight = run()
    for step in (3, 6, 9):
        for one, other in zip(straight, run(str(tmp_path / f"checkpoint-{step}")), strict=True):
            assert torch.equal(one, other), step


# ------------------------------------------------------------------ teachers


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Marian", labo.DistillationLoss), ("Llama", labo.DecoupledDistillationLoss)],
)
def test_a_teacher_under_accumulation(family, kind, tmp_path):
    model, teacher = build(family), build(family, seed=7)
    data = examples(8, is_seq2seq(model))
    before = copy.deepcopy(teacher.state_dict())

    def by(model, batch, loss):
        taught, _ = targets_and_logits(teacher, batch)
        return loss(*targets_and_logits(model, batch), taught.detach())

    given = {"accumulate": 4, "by": by, "teacher": teacher.train()}
    trainer = assert_step("regularized", model, kind(), data, tmp_path, **given)
    assert not teacher.training
    assert_same(teacher.state_dict().values(), before.values(), rtol=0, atol=0)
    with torch.no_grad():
        nll = by_hand(model.eval(), collate(data), nn.CrossEntropyLoss()).item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-5)


@each_way
def test_a_warmup_to_a_teacher(way, tmp_path):
    """Label smoothing first, which uses no teacher."""
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    args = arguments(tmp_path, max_steps=3)
    teacher, calls = build("Llama", seed=7), []
    trainer = make_trainer(way, build("Llama"), loss, args, examples(12), teacher=teacher)
    teacher.register_forward_hook(lambda *_: calls.append(loss.steps_done))
    trainer.train()
    assert loss.steps_done == 3
    assert calls == [1, 2]


def test_teachers_refused(tmp_path):
    args = arguments(tmp_path, max_steps=1)

    def trainer(loss, **settings):
        return make_trainer("regularized", build("Llama"), loss, args, examples(4), **settings)

    with pytest.raises(ValueError, match="DistillationLoss needs a teacher"):
        trainer(labo.DistillationLoss())
    teacher = build("Llama")
    with pytest.raises(ValueError, match="LABOLoss does not use a teacher"):
        trainer(labo.LABOLoss(), teacher=teacher)
    teacher.resize_token_embeddings(V + 3, mean_resizing=False)
    with pytest.raises(ValueError, match="both must have the same classes"):
        trainer(labo.DistillationLoss(), teacher=teacher).train()


def saved_with(words: list[str], folder, seed: int):
    """A model that was loaded from a folder with a tokenizer of these words."""
    splits = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)})
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splits)
    tokenizer.save_pretrained(folder)
    build("Llama", seed=seed).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer


@pytest.mark.parametrize("way", ["regularized", "its tokenizer given", "fused"])
def test_a_teacher_with_another_tokenizer(way, tmp_path):
    """Of the same size: the indices stand for other words."""
    words = [f"w{index}" for index in range(V)]
    model, tokenizer = saved_with(words, tmp_path / "model", 0)
    other, _ = saved_with(words[::-1], tmp_path / "other", 1)
    same, _ = saved_with(words, tmp_path / "same", 1)
    if way == "its tokenizer given":
        model = build("Llama")

    def train(teacher):
        loss = labo.DistillationLoss()
        if way == "fused":
            return hf.fuse_head(model, loss, teacher=teacher)
        settings = {"processing_class": tokenizer} if way == "its tokenizer given" else {}
        trainer = transformers.Trainer(model=model, args=arguments(tmp_path), **settings)
        return hf.regularize(trainer, loss, teacher=teacher)

    with pytest.raises(ValueError, match=r"another tokenizer .*: index 0 is 'w60' .* and 'w0'"):
        train(other)
    train(same)


# ------------------------------------------------------------------ PEFT


@each_way
def test_lora_trains_its_adapters_only(way, tmp_path):
    model = adapted(build("Llama"), "q_proj", "v_proj")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = arguments(tmp_path, max_steps=2)
    make_trainer(way, model, labo.LABOLoss(), args, examples(8)).train()
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed
    assert changed == {name for name in before if "lora" in name}


def test_the_extra_installs_what_training_arguments_need():
    (listed,) = re.findall(r"^hf = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (needed,) = [r for r in map(Requirement, ast.literal_eval(listed)) if r.name == "accelerate"]
    (oldest,) = [Version(bound.version) for bound in needed.specifier]
    assert oldest >= Version(ACCELERATE_MIN_VERSION)
