"""What regularize refuses when it is called: other losses, other tasks, labels not shifted."""

from __future__ import annotations

import datasets
import pytest
import torch
import transformers
import trl

import labo
from labo.integrations import huggingface as hf
from tiny_models import SIZES, V, arguments, bert, build, collate, examples
from tiny_sft import tokenizer


@pytest.fixture(autouse=True)
def _no_progress_bars():
    datasets.disable_progress_bars()


def rows(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_list([columns] * 2)


PREFERENCE = {"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}
CHAT = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
NO_LABELS = "compares whole answers and has no label for each position"
TEACHER = r"regularize\(trainer, labo.DistillationLoss\(\), teacher=teacher\)"


def of_trl(name: str, out):
    """A trainer of TRL with a tiny model, and the advice that it should get."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model, advice, more = build("Llama"), NO_LABELS, {}
    if name in ("DPO", "KTO"):
        more = {"ref_model": build("Llama")}
    if name == "DPO":
        kinds, data = (trl.DPOTrainer, trl.DPOConfig), rows(**PREFERENCE)
    elif name == "KTO":
        one = {"prompt": "w3 w4", "completion": " w5"}
        data = datasets.Dataset.from_list([{**one, "label": True}, {**one, "label": False}])
        kinds = (trl.KTOTrainer, trl.KTOConfig)
    elif name == "Reward":
        config = transformers.LlamaConfig(vocab_size=V, num_labels=1, pad_token_id=0, **SIZES)
        model = transformers.LlamaForSequenceClassification(config)
        kinds, data = (trl.RewardTrainer, trl.RewardConfig), rows(**PREFERENCE)
    else:
        from trl.experimental.gkd import GKDConfig, GKDTrainer  # warns that it is experimental

        kinds, data = (GKDTrainer, GKDConfig), rows(messages=CHAT)
        advice, more = TEACHER, {"teacher_model": build("Llama")}
    made, config = kinds
    args = arguments(out, config, bf16=False, gradient_checkpointing=False)
    trainer = made(model=model, args=args, train_dataset=data, processing_class=words, **more)
    return trainer, advice


@pytest.mark.filterwarnings("ignore")  # of TRL's experimental part
@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GKD"])
def test_a_trainer_of_trl_with_its_own_loss(name, tmp_path):
    trainer, advice = of_trl(name, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}Trainer has a loss of its own .*{advice}"):
        hf.regularize(trainer, labo.LABOLoss())


class Own(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


class OwnStep(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return model(**inputs).loss.detach()


class Logged(transformers.Trainer):
    def compute_loss(self, model, inputs, **arguments):
        return super().compute_loss(model, inputs, **arguments)


@pytest.mark.parametrize("cls", [Own, OwnStep, transformers.Trainer])
def test_a_trainer_with_its_own_loss(cls, tmp_path):
    trainer = cls(model=build("Llama"), args=arguments(tmp_path))
    if cls is transformers.Trainer:  # changed from outside
        trainer.compute_loss = lambda model, inputs, **_: model(**inputs).loss
    with pytest.raises(ValueError, match=r"has a loss of its own .*Let that method call the one"):
        hf.regularize(trainer, labo.LABOLoss())


def test_a_trainer_that_calls_its_parent_or_returns_the_loss_of_a_fused_model(tmp_path):
    settings = {"args": arguments(tmp_path, max_steps=1), "data_collator": collate}
    settings["train_dataset"] = examples(4)
    loss = labo.LABOLoss()
    hf.regularize(Logged(model=build("Llama"), **settings), loss).train()
    fused = hf.fuse_head(build("Llama"), loss)
    hf.regularize(Own(model=fused, **settings), loss).train()


# ------------------------------------------------------------------ labels


def xlm():
    torch.manual_seed(0)
    sizes = {"emb_dim": 32, "n_layers": 1, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    return transformers.XLMWithLMHeadModel(
        transformers.XLMConfig(vocab_size=V, **sizes, pad_index=0)
    )


def test_a_causal_model_whose_own_loss_does_not_shift(tmp_path):
    trainer = transformers.Trainer(model=xlm(), args=arguments(tmp_path))
    with pytest.raises(ValueError, match=r"XLMWithLMHeadModel .* pass shift=False"):
        hf.regularize(trainer, labo.LABOLoss())
    hf.regularize(trainer, labo.CrossEntropyLoss(), shift=False)
    batch = {"input_ids": torch.randint(3, V, (2, 6)), "labels": torch.randint(3, V, (2, 6))}
    torch.testing.assert_close(trainer.compute_loss(xlm(), batch), xlm()(**batch).loss)


@pytest.mark.parametrize(("family", "shift"), [("Llama", False), ("GPT2", False), ("T5", True)])
def test_a_shift_that_the_model_contradicts_is_warned_about(family, shift, tmp_path):
    trainer = transformers.Trainer(model=build(family), args=arguments(tmp_path))
    with pytest.warns(UserWarning, match=f"and shift={shift} was given. This is right only if"):
        hf.regularize(trainer, labo.LABOLoss(), shift=shift)


# ------------------------------------------------------------------ other tasks


@pytest.mark.parametrize("task", ["multi_label_classification", "regression"])
def test_several_classes_per_label(task, tmp_path):
    model = bert(num_labels=4, problem_type=task)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path))
    for call in (hf.regularize, lambda trainer, loss: hf.compute_loss_func(trainer.model, loss)):
        with pytest.raises(ValueError, match=f"problem_type='{task}', and the losses of labo"):
            call(trainer, labo.LABOLoss())


def test_several_classes_per_label_without_a_problem_type(tmp_path):
    model = bert(num_labels=4)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path))
    hf.regularize(trainer, labo.LABOLoss())
    batch = {"input_ids": torch.randint(3, V, (2, 6))}
    labels = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"must be probabilities that sum to 1.* 1 to 3"):
        trainer.compute_loss(model, {**batch, "labels": labels})
    trainer.compute_loss(model, {**batch, "labels": labels / labels.sum(-1, keepdim=True)})
