"""fuse_head beyond the loss: evaluation in chunks, metrics, token weights, z-loss, teachers."""

from __future__ import annotations

import copy

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import nn

import labo
from labo.integrations import huggingface as hf
from labo.integrations.huggingface.logits import LazyLogits
from layers import measured
from probes import LargestTensor
from tiny_models import (
    V,
    arguments,
    assert_same,
    assert_step,
    bert,
    build,
    by_hand,
    collate,
    examples,
    gradients,
    make_trainer,
)

CHUNKS = labo.LinearLossOptions(batch_chunk_size=16)
NAMES = ("nll", "entropy", "mean_token_accuracy", "alpha", "z_squared")


def trainer_of(model, out, **settings):
    shared = {"train_dataset": examples(8), "eval_dataset": examples(8), "data_collator": collate}
    trainer = transformers.Trainer(model=model, args=arguments(out, **settings), **shared)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def expected_metrics(model, batch, loss) -> dict[str, float]:
    """From the logits in float64, over the targets of a causal model."""
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1].double()
    rows = measured(logits, batch["labels"][:, 1:], loss)
    means = {name: (x.sum() / rows["targets"].sum()).item() for name, x in rows.items()}
    return means | {"mean_token_accuracy": means["correct"]}


# ------------------------------------------------------------------ evaluation


@torch.no_grad()
def test_logits_are_computed_when_they_are_used():
    plain = build("Gemma2", vocabulary=500).eval()
    batch = collate(examples(40))
    fused = hf.fuse_head(copy.deepcopy(plain), labo.LABOLoss(), options=CHUNKS)
    whole = batch["labels"].numel() * 500
    with LargestTensor() as seen:
        output = fused(**batch)
        wide = output.logits.float()
        assert output.logits.shape == wide.shape == (*batch["labels"].shape, 500)
    assert seen.largest < whole / 4
    expected = plain(**batch).logits
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    np.testing.assert_array_equal(output.logits.cpu().numpy(), expected.numpy())
    assert torch.equal(copy.deepcopy(output.logits), expected)
    assert torch.equal(output.logits[:, -1], expected[:, -1])


@torch.no_grad()
def test_logits_of_an_evaluation_in_mixed_precision():
    """accelerate raises what a model returns to float32, which must not compute the logits."""
    model, batch = build("Llama").eval(), collate(examples(3))
    fused = hf.fuse_head(copy.deepcopy(model), labo.LABOLoss())
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch).logits
        output = ConvertOutputsToFp32(fused)(**batch)
    assert isinstance(output.logits, LazyLogits)
    assert output.logits._found is None
    assert torch.equal(output.logits + 0, expected.float())


@torch.no_grad()
def test_eval_logits_always_and_never():
    batch = collate(examples(3))
    always = hf.fuse_head(build("GPT2"), labo.LABOLoss(), eval_logits=True)(**batch).logits
    assert type(always) is torch.Tensor
    never = hf.fuse_head(build("GPT2"), labo.LABOLoss(), eval_logits=False)(**batch)
    assert never.logits is None
    torch.testing.assert_close(never.loss, by_hand(build("GPT2"), batch, nn.CrossEntropyLoss()))


@torch.no_grad()
def test_logits_of_weights_that_have_changed_are_refused():
    model = hf.fuse_head(build("GPT2"), labo.LABOLoss())
    logits = model(**collate(examples(3))).logits
    model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match=r"has changed by now: use fuse_head.*eval_logits=True"):
        logits.argmax(-1)
    logits = model(**collate(examples(3))).logits
    model.lm_head.weight.data = torch.empty(0)  # as ZeRO-3 does
    with pytest.raises(ValueError, match="is sharded again by now"):
        logits.argmax(-1)


def test_evaluation_in_a_trainer(tmp_path):
    """No logits unless something asks for them; then they are the model's own."""
    plain, loss = build("Llama", vocabulary=V).eval(), labo.LABOLoss()
    batch = collate(examples(8))
    fused = hf.fuse_head(copy.deepcopy(plain), loss, metrics=True, options=CHUNKS)
    trainer = hf.regularize(trainer_of(fused, tmp_path, per_device_eval_batch_size=8), loss)
    with LargestTensor() as seen:
        scores = trainer.evaluate()
    assert seen.largest < batch["labels"].numel() * V
    wanted = expected_metrics(plain, batch, loss)
    for name in NAMES:
        if name != "alpha":
            assert scores[f"eval_{name}"] == pytest.approx(wanted[name], rel=1e-5), name
    assert "eval_alpha" not in scores
    assert scores["eval_loss"] == pytest.approx(wanted["nll"], rel=1e-5)
    with torch.no_grad():
        logits = plain(**batch).logits
    predictions = trainer.predict(examples(8)).predictions
    np.testing.assert_allclose(predictions, logits.numpy(), rtol=1e-5, atol=1e-5)
    assert trainer.evaluate()["eval_nll"] == pytest.approx(wanted["nll"], rel=1e-5)

    seen_by = {}
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    trainer.compute_metrics = lambda found: seen_by.update(found=found.predictions) or {}
    trainer.evaluate()
    np.testing.assert_array_equal(seen_by["found"], logits.argmax(-1).numpy())


# ------------------------------------------------------------------ metrics


@pytest.mark.parametrize("fused", [True, False])
def test_a_trainer_logs_the_metrics(fused, tmp_path):
    """Of all micro-batches since the last log."""
    loss, plain = labo.LABOLoss(), build("Llama")
    model = hf.fuse_head(build("Llama"), loss, metrics=True) if fused else build("Llama")
    still = {"learning_rate": 0.0, "max_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = trainer_of(model, tmp_path, **still, **sizes)
    hf.regularize(trainer, loss, metrics=True)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    wanted = expected_metrics(plain, collate(examples(8)), loss)
    for name in NAMES:
        assert log[name] == pytest.approx(wanted[name], rel=1e-5), name
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_entropy"] == pytest.approx(
        wanted["entropy"], rel=1e-5
    )


def test_metrics_in_another_loop():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss(), metrics=True)
    batch = collate(examples(4))
    for _ in range(2):
        model(**batch).loss.backward()
    found = hf.take_metrics(model)
    assert found.targets == 2 * (batch["labels"][:, 1:] != -100).sum()
    assert hf.take_metrics(model) is None
    assert hf.take_metrics(model, training=False) is None
    with pytest.raises(ValueError, match="collects no metrics"):
        hf.take_metrics(hf.fuse_head(build("Llama"), labo.LABOLoss()))


def test_metrics_when_compiled():
    model = hf.fuse_head(build("Llama"), labo.LABOLoss(), metrics=True)
    batch = collate(examples(4))
    torch.compile(model, backend="eager")(**batch).loss.backward()
    wanted = expected_metrics(build("Llama"), batch, labo.LABOLoss())
    assert hf.take_metrics(model).means()["entropy"] == pytest.approx(wanted["entropy"], rel=1e-5)


# ------------------------------------------------------------------ weights and z-loss


def with_columns(some):
    """A collator that keeps what belongs to the labels."""
    names = ("token_weight", "teacher_indices", "teacher_log_probabilities")
    found = collate(some)
    for name in names:
        if name in some[0]:
            rows = [torch.tensor(row[name]) for row in some]
            found[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return found


def values_of(model, batch, loss):
    """The loss of each position, and the labels."""
    logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    target = batch["labels"][:, 1:]
    columns = [batch[name][:, 1:] for name in batch if name.startswith("teacher")]
    return loss.having(reduction="none").compute(logits[:, :-1], target, *columns), target


@pytest.mark.parametrize("way", ["fused", "regularized"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_token_weights_come_with_the_batch(way, accumulate, tmp_path):
    """sum of the weighted losses over the number of targets, in any number of micro-batches."""
    rows, loss = examples(8), labo.LABOLoss(weight=torch.linspace(0.5, 2, V))
    for row in rows:
        row["token_weight"] = torch.rand(len(row["labels"])).tolist()

    def weighted(model, batch, loss):
        values, target = values_of(model, batch, loss)
        weights, valid = batch["token_weight"][:, 1:], target != -100
        mass = (weights[valid] * loss.weight[target[valid]]).sum()
        return (values * weights).sum(), valid.sum(), mass

    def by(model, batch, loss):
        total, count, _ = weighted(model, batch, loss)
        return total / count

    model, batch, args = build("Llama"), with_columns(rows), arguments(tmp_path)
    trainer = make_trainer(way, copy.deepcopy(model), loss, args)
    total, _, mass = weighted(model, batch, loss)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), total / mass)
    given = {"accumulate": accumulate, "by": by, "rows": with_columns}
    assert_step(way, model, loss, rows, tmp_path, **given)


def test_token_weights_and_another_loss(tmp_path):
    trainer = hf.regularize(trainer_of(build("Llama"), tmp_path), nn.CrossEntropyLoss())
    batch = collate(examples(2))
    batch["token_weight"] = torch.ones(batch["labels"].shape)
    with pytest.raises(ValueError, match="token_weight needs a row-wise loss of labo"):
        trainer.compute_loss(trainer.model, batch)


@pytest.mark.parametrize("way", ["fused", "regularized"])
def test_a_stored_teacher_comes_with_the_batch(way, tmp_path):
    """Its classes belong to the labels: they are shifted with them."""
    rows, loss = examples(8), labo.TopKDistillationLoss()
    for row in rows:
        stored = torch.randn(len(row["labels"]), V).log_softmax(-1).topk(5)
        row["teacher_indices"] = stored.indices.tolist()
        row["teacher_log_probabilities"] = stored.values.tolist()

    def by(model, batch, loss):
        values, target = values_of(model, batch, loss)
        return values.sum() / (target != -100).sum()

    data = datasets.Dataset.from_list(rows)  # of which the Trainer drops columns, too
    given = {"accumulate": 4, "by": by, "rows": with_columns}
    assert_step(way, build("Llama"), loss, data, tmp_path, **given)
    trainer = make_trainer(way, build("Llama"), loss, arguments(tmp_path), examples(8))
    with pytest.raises(ValueError, match="teacher_indices must be a tensor in the batch"):
        trainer.train()


def test_token_weights_that_cancel():
    """Their sum is 0, and the weighted sum over the number of targets is not."""
    plain, batch, loss = build("Llama"), collate(examples(3)), labo.LABOLoss(reduction="none")
    valid = batch["labels"][:, 1:] != -100
    weights = torch.zeros(batch["labels"].shape)
    signs = weights[:, 1:][valid]
    signs[: len(signs) // 2], signs[len(signs) // 2 :][: len(signs) // 2] = 1.0, -1.0
    weights[:, 1:][valid] = signs
    assert weights.sum() == 0
    values = loss(plain(**batch).logits[:, :-1], batch["labels"][:, 1:])
    expected = (values * weights[:, 1:]).sum() / 7
    fused = hf.fuse_head(build("Llama"), labo.LABOLoss())
    value = fused(**batch, token_weight=weights, num_items_in_batch=7).loss
    assert abs(value) > 0.01
    torch.testing.assert_close(value, expected)
    assert_same(gradients(fused, value), gradients(plain, expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_token_weight_without_a_target_does_not_matter(items, number):
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(3))
    weights = torch.rand(batch["labels"].shape)
    expected = model(**batch, token_weight=weights, num_items_in_batch=items).loss
    slopes = gradients(model, expected)
    weights[batch["labels"] == -100] = number
    weights[:, 0] = number  # nothing predicts the first label
    value = model(**batch, token_weight=weights, num_items_in_batch=items).loss
    torch.testing.assert_close(value, expected)
    assert_same(gradients(model, value), slopes)


def test_token_weights_are_checked():
    model, batch = hf.fuse_head(build("Llama"), labo.LABOLoss()), collate(examples(3))
    for wrong, found in (([1.0, 2.0], r"got \[1.0"), (torch.ones(3, 2), r"got shape \(3, 2\)")):
        with pytest.raises(ValueError, match=f"token_weight must be a tensor.*{found}"):
            model(**batch, token_weight=wrong)


def test_z_loss():
    plain, batch = build("Gemma2"), collate(examples(4))
    model = hf.fuse_head(build("Gemma2"), labo.LABOLoss(), z_loss=0.1)
    logits, target = plain(**batch).logits[:, :-1], batch["labels"][:, 1:]
    expected = labo.LABOLoss()(logits, target) + labo.functional.z_loss(logits, target, lam=0.1)
    value = model(**batch).loss
    torch.testing.assert_close(value, expected)
    assert_same(gradients(model, value), gradients(plain, expected), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        nll = by_hand(plain, batch, nn.CrossEntropyLoss())
        torch.testing.assert_close(model(**batch).loss, nll)
    with pytest.raises(ValueError, match="z_loss must be"):
        hf.fuse_head(build("Llama"), labo.LABOLoss(), z_loss=-1.0)


# ------------------------------------------------------------------ teachers


@pytest.mark.parametrize("family", ["Gemma2", "Cohere"])
def test_a_teacher_beside_the_student(family):
    """Its cap and its scale included, and neither has its logits in memory."""
    loss = labo.DistillationLoss(alpha=0.5, tau=2.0)
    student, teacher = build("Llama", vocabulary=500), build(family, seed=1, vocabulary=500)
    batch = collate(examples(40))
    with torch.no_grad():
        teacher_logits = teacher(**batch).logits[:, :-1]
    logits = student(**batch).logits[:, :-1]
    expected = loss(logits, batch["labels"][:, 1:], teacher_logits)
    model = hf.fuse_head(
        copy.deepcopy(student),
        loss,
        teacher=teacher,
        options=labo.LinearLossOptions(batch_chunk_size=16),
    )
    with LargestTensor() as seen:
        value = model(**batch).loss
        slopes = gradients(model, value)
    assert seen.largest < batch["labels"].numel() * 500 / 4
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    assert_same(slopes, gradients(student, expected), rtol=1e-3, atol=1e-5)
    assert not any("teacher" in name for name in model.state_dict())


def test_a_teacher_that_is_no_teacher_of_this_model(tmp_path):
    loss, student = labo.DistillationLoss(), build("Llama")
    for teacher in ("gpt2", nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="teacher must be a model of transformers, got"):
            hf.fuse_head(student, loss, teacher=teacher)
    for teacher, sentence in (
        (student, "shares parameters with the model"),
        (build("T5"), "one of T5.*, the teacher, and Llama.* is an encoder-decoder"),
        (bert(transformers.BertForMaskedLM), "predicts the label of a position"),
        (build("Llama", vocabulary=70), "the teacher has 70 classes and the model 61"),
        (hf.fuse_head(build("Llama"), labo.LABOLoss()), "the teacher is fused"),
    ):
        with pytest.raises(ValueError, match=sentence):
            hf.fuse_head(student, loss, teacher=teacher)
    for teacher, sentence in ((student, "shares parameters"), (build("T5"), "encoder-decoder")):
        with pytest.raises(ValueError, match=sentence):
            hf.regularize(trainer_of(student, tmp_path), loss, teacher=teacher)
    with pytest.raises(TypeError, match="teacher must be a model, got 'gpt2'"):
        hf.regularize(trainer_of(student, tmp_path), loss, teacher="gpt2")
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize("flag", [{"metrics": "rows"}, {"eval_logits": "no"}, {"metrics": 1}])
def test_flags_are_flags(flag, tmp_path):
    with pytest.raises(TypeError, match=f"{next(iter(flag))} must be True or False"):
        hf.fuse_head(build("Llama"), labo.LABOLoss(), **flag)
    with pytest.raises(TypeError, match="metrics must be True or False, got 'rows'"):
        hf.regularize(trainer_of(build("Llama"), tmp_path), labo.LABOLoss(), metrics="rows")


def test_regularize_refuses_what_a_fused_model_should_have_been_told(tmp_path):
    loss = labo.LABOLoss()
    trainer = trainer_of(hf.fuse_head(build("Llama"), loss), tmp_path)
    for change, sentence in (
        ({"loss": labo.LABOLoss()}, "give regularize the same loss"),
        ({"shift": True}, "leave shift out"),
        ({"metrics": True}, "metrics=True"),
    ):
        with pytest.raises(ValueError, match=sentence):
            hf.regularize(trainer, **({"loss": loss} | change))
    hf.regularize(trainer, loss)
    with pytest.raises(ValueError, match="RegularizationCallback already"):
        hf.regularize(trainer, loss)
