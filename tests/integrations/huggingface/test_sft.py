"""regularize inside TRL's SFTTrainer: the loss by hand, TRL's own metrics, one forward pass."""

from __future__ import annotations

import copy

import datasets
import pytest
import torch
import transformers
from peft import LoraConfig
from torch import nn

import labo
from labo.integrations import huggingface as hf
from probes import LargestTensor
from tiny_models import V, assert_same, build, by_hand, gradients, stepped, trained
from tiny_sft import conversations, make, whole_batch

METRICS = ("entropy", "mean_token_accuracy", "num_tokens")


@pytest.fixture(autouse=True)
def _no_progress_bars():
    datasets.disable_progress_bars()


def assert_step(trainer, expected, batch):
    """A step of the trainer has the loss of this model on the batch, and is that of SGD on it."""
    value = by_hand(expected.train(), batch, labo.LABOLoss())
    slopes = gradients(expected, value)
    hf.regularize(trainer, labo.LABOLoss())
    assert trainer.train().training_loss == pytest.approx(value.item(), rel=1e-5)
    assert_same(trained(trainer.model), stepped(expected, slopes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "accumulate"), [("GPT2", 4), ("Llama", 1), ("Llama", 4)])
def test_a_step_on_completions(family, accumulate, tmp_path):
    sizes = {"gradient_accumulation_steps": accumulate}
    sizes["per_device_train_batch_size"] = 8 // accumulate
    trainer = make(tmp_path, build(family), max_steps=1, **sizes)
    batch = whole_batch(trainer)
    hidden = batch["labels"] == -100
    assert hidden[batch["attention_mask"] == 1].any()  # prompts are no targets
    assert_step(trainer, build(family), batch)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere"])
def test_metrics_are_those_of_trl(family, tmp_path):
    """The entropy, the accuracy and the numbers of tokens that TRL computes by itself."""
    quiet = {"learning_rate": 0.0, "max_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    logs = []
    for ours in (True, False):
        trainer = make(tmp_path, build(family), **quiet)
        trainer.remove_callback(transformers.PrinterCallback)
        if ours:
            hf.regularize(trainer, labo.LABOLoss())
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "entropy" in entry])
        trainer.evaluate()
        logs[-1].append(
            {k.removeprefix("eval_"): v for k, v in trainer.state.log_history[-1].items()}
        )
    assert len(logs[0]) == 3
    for ours, theirs in zip(*logs, strict=True):
        for name in METRICS:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    *training, evaluation = zip(*logs, strict=True)
    assert all(ours["loss"] != pytest.approx(theirs["loss"], rel=1e-5) for ours, theirs in training)
    assert evaluation[0]["loss"] == pytest.approx(evaluation[1]["loss"])  # the plain NLL


def test_the_body_runs_once_and_no_logits_are_stored(tmp_path):
    model = build("Llama", tied=False, vocabulary=700)
    data = conversations(40)
    trainer = make(tmp_path, model, data, per_device_train_batch_size=40, max_steps=1)
    hf.regularize(trainer, labo.LABOLoss())
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    tokens = whole_batch(trainer)["labels"].ne(-100).sum()
    monitor = LargestTensor()
    with monitor:
        trainer.train()
    assert len(calls) == 1
    assert monitor.largest <= 2 * tokens * 700  # one chunk, of the targets only


@pytest.mark.filterwarnings("ignore:Padding-free training is enabled")
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_sequences(strategy, tmp_path):
    settings = {"packing": True, "packing_strategy": strategy, "max_length": 16}
    trainer = make(tmp_path, build("Llama"), max_steps=1, **settings)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    # with a cache, Llama takes packed sequences for one
    assert_step(trainer, build("Llama"), {**batch, "use_cache": False})


def test_adapters(tmp_path):
    """PEFT wraps the model inside of SFTTrainer."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(2)
    trainer = make(tmp_path, build("Llama"), max_steps=1, peft_config=lora)
    model, batch = trainer.model, whole_batch(trainer)
    expected = copy.deepcopy(model)
    expected.get_base_model().forward = type(build("Llama")).forward.__get__(
        expected.get_base_model()
    )
    assert_step(trainer, expected, {name: value[:4] for name, value in batch.items()})
    assert all("lora" in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_mixture_of_experts_keeps_its_router_loss(tmp_path):
    settings = {"max_steps": 1, "router_aux_loss_coef": 0.7, "logging_strategy": "steps"}
    trainer = make(tmp_path, build("Mixtral"), **settings, logging_steps=1)
    trainer.remove_callback(transformers.PrinterCallback)
    batch = {name: value[:4] for name, value in whole_batch(trainer).items()}
    plain = build("Mixtral")
    expected = by_hand(plain, batch, labo.LABOLoss())
    router = plain(**batch, output_router_logits=True).aux_loss
    hf.regularize(trainer, labo.LABOLoss())
    value = trainer.train().training_loss
    assert value == pytest.approx((expected + 0.7 * router).item(), rel=1e-5)
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(router.item(), rel=1e-5)


def test_a_micro_batch_without_targets(tmp_path):
    trainer = hf.regularize(make(tmp_path, build("Llama")), labo.LABOLoss())
    batch = whole_batch(trainer)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    value = trainer.compute_loss(trainer.model, batch)
    assert value == 0
    assert not any(g.any() for g in gradients(trainer.model, value) if g is not None)


def test_what_belongs_to_the_labels(tmp_path):
    """Weights and a stored teacher, from a collator that keeps them."""
    weight = torch.linspace(0.5, 2, V)
    loss = labo.TopKDistillationLoss(weight=weight)
    trainer = hf.regularize(make(tmp_path, build("Llama")), loss)
    batch, plain = whole_batch(trainer), build("Llama")
    target = batch["labels"][:, 1:]
    shape = batch["labels"].shape
    stored, factors = torch.randn(*shape, V).log_softmax(-1).topk(5), torch.rand(shape)
    rows = labo.TopKDistillationLoss(weight=weight, reduction="none")(
        plain(**batch).logits[:, :-1], target, stored.indices[:, 1:], stored.values[:, 1:]
    )
    expected = (rows * factors[:, 1:]).sum() / (target != -100).sum()
    columns = {"teacher_indices": stored.indices, "teacher_log_probabilities": stored.values}
    value = trainer.compute_loss(trainer.model, {**batch, **columns, "token_weight": factors})
    torch.testing.assert_close(value, expected)


def test_weights_that_trl_drops_are_refused(tmp_path):
    data = conversations(8)
    data = data.add_column("token_weight", [[1.0]] * 8)
    trainer = make(tmp_path, build("Llama"), data)
    with pytest.raises(ValueError, match="the collator of TRL drops token_weight"):
        hf.regularize(trainer, labo.LABOLoss())


def test_a_warmup_and_its_checkpoint(tmp_path):
    def run(resume=None):
        loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=3)
        settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
        trainer = make(tmp_path, build("Llama"), max_steps=4, **settings)
        hf.regularize(trainer, loss).train(resume_from_checkpoint=resume)
        assert loss.steps_done == 4
        return trained(trainer.model)

    straight = run()
    assert_same(run(str(tmp_path / "checkpoint-2")), straight, rtol=0, atol=0)


def test_a_fused_model_is_refused_not_ignored(tmp_path):
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=3)
    trainer = make(tmp_path, hf.fuse_head(build("Llama"), loss), max_steps=1)
    message = r"replaced by trl.*call regularize\(trainer, loss\)"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.evaluate()
    assert loss.steps_done == 0
    with pytest.raises(ValueError, match="with a model that is not fused"):
        hf.regularize(trainer, loss)
    with pytest.raises(ValueError, match=r"was replaced by trl.*regularize\(trainer, loss\)"):
        hf.fuse_head(make(tmp_path, build("Llama")).model, labo.LABOLoss())


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
def test_another_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"loss_type='dft' is another loss"):
        hf.regularize(make(tmp_path, build("Llama"), loss_type="dft"), labo.LABOLoss())
    smoothed = make(tmp_path, build("Llama"), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="both set"):
        hf.regularize(smoothed, labo.LABOLoss())
    trainer = make(tmp_path, build("Llama"))
    trl_forward = vars(trainer.model).pop("forward")  # as in older versions
    with pytest.raises(ValueError, match=r"TRL 1\.16 or newer"):
        hf.regularize(trainer, labo.LABOLoss())
    trainer.model.forward = trl_forward
    with pytest.raises(ValueError, match="takes no teacher with SFTTrainer"):
        hf.regularize(trainer, labo.DistillationLoss(), teacher=build("Llama"))
    with pytest.raises(ValueError, match="trains causal models only"):
        hf.regularize(trainer, labo.LABOLoss(), shift=False)
    with pytest.raises(ValueError, match=r"torch\.nn\.CrossEntropyLoss is not one"):
        hf.regularize(trainer, nn.CrossEntropyLoss())
    hf.regularize(trainer, labo.LABOLoss())
    with pytest.raises(ValueError, match="has a loss of labo already"):
        hf.regularize(trainer, labo.LABOLoss())
