"""What labo teacher stored, in a Trainer and in TRL's SFTTrainer."""

from __future__ import annotations

import copy

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer
from trl import SFTTrainer

import labo
from labo.integrations.huggingface import (
    StoredTeacherCollator,
    StoredTeacherDataset,
    regularize,
)
from labo.lab.errors import RequestError
from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.model import causal_config
from labo.lab.language_modeling.options import Tokenization
from labo.lab.language_modeling.prepare import prepare_documents
from labo.lab.text.teacher import store
from tiny_language import SENTENCES, learned_tokenizer
from tiny_models import arguments
from tiny_sft import config

K = 4


def prepare(out, sentences):
    documents = [
        RawDocument(f"{n}", "prompt", (Part(f"say {text[:9]}", False), Part(text[:7], True)))
        for n, text in enumerate(sentences)
    ]
    options = Tokenization(holdout=5, holdout_test=5)
    prepare_documents(out, {"train": documents}, options, tokenizer=learned_tokenizer())
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A prepared folder, a teacher, and what is stored of it."""
    base, tokenizer = tmp_path_factory.mktemp("stored"), learned_tokenizer()
    torch.manual_seed(3)
    size = {"width": 16, "layers": 1, "heads": 2}
    small = causal_config("gpt2-tiny", len(tokenizer), positions=64, dimensions=size)
    teacher = AutoModelForCausalLM.from_config(small)
    teacher.save_pretrained(base / "teacher")
    tokenizer.save_pretrained(base / "teacher")
    data = prepare(base / "data", SENTENCES[:14])
    store(base / "teacher", data, base / "out", top_k=K, precision="float32")
    return data, teacher.eval(), base / "out"


def student(folders):
    torch.manual_seed(4)
    same = copy.deepcopy(folders[1].config)
    same.resid_pdrop = same.embd_pdrop = same.attn_pdrop = 0.0
    return AutoModelForCausalLM.from_config(same)


def test_the_rows_are_the_predictions_of_their_labels(folders):
    data, teacher, stored = folders
    items = StoredTeacherDataset(stored, data)
    assert len(items) > 5
    for item in items:
        ids, labels = torch.tensor(item["input_ids"]), torch.tensor(item["labels"])
        with torch.inference_mode():
            log_p = teacher(input_ids=ids[None]).logits[0].log_softmax(-1)
        for at in range(len(ids)):
            indices = torch.tensor(item["teacher_indices"][at])
            if at == 0 or labels[at] == -100:
                assert (indices == -1).all()
                continue
            top = log_p[at - 1].topk(K)
            assert indices.tolist() == top.indices.tolist()
            found = torch.tensor(item["teacher_log_probabilities"][at])
            torch.testing.assert_close(found, top.values, atol=1e-5, rtol=0)
    short = StoredTeacherDataset(stored, data, max_length=5)[0]
    assert {len(column) for column in short.values()} == {5}


def test_other_data_are_refused(folders, tmp_path):
    other = prepare(tmp_path / "data", SENTENCES[3:16])
    with pytest.raises(RequestError, match="was made for other data"):
        StoredTeacherDataset(folders[2], other)


def expected_first_loss(folders, items, order):
    """Of the first batch, by hand."""
    collate = StoredTeacherCollator(pad_token_id=0)
    batch = collate([items[i] for i in order])
    logits = student(folders)(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits[:, :-1]
    loss = labo.TopKDistillationLoss(alpha=1.0, divergence="jsd")
    columns = (batch[f"teacher_{name}"][:, 1:] for name in ("indices", "log_probabilities"))
    return loss(logits, batch["labels"][:, 1:], *columns).item()


@pytest.mark.parametrize("trainer", ["trainer", "sft"])
def test_it_trains_in_the_real_libraries(trainer, folders, tmp_path):
    data, _, stored = folders
    items, collate = StoredTeacherDataset(stored, data), StoredTeacherCollator(pad_token_id=0)
    seen = []

    def collator(chosen):
        seen.append([items_of.index(item["input_ids"]) for item in chosen])
        return collate(chosen)

    items_of = [item["input_ids"] for item in items]
    loss = labo.TopKDistillationLoss(alpha=1.0, divergence="jsd")
    shared = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    shared["remove_unused_columns"] = False
    if trainer == "trainer":
        made = Trainer(
            model=student(folders),
            args=arguments(tmp_path, **shared),
            train_dataset=items,
            data_collator=collator,
        )
    else:
        made = SFTTrainer(
            model=student(folders),
            args=config(tmp_path, dataset_kwargs={"skip_prepare_dataset": True}, **shared),
            train_dataset=datasets.Dataset.from_list(list(items)),
            data_collator=collator,
            processing_class=learned_tokenizer(),
        )
    regularize(made, loss)
    made.train()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    first = expected_first_loss(folders, items, seen[0])
    assert logged[0] == pytest.approx(first, abs=2e-4)
    assert logged[-1] > 0
