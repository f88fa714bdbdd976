"""Snippets of the documentation inside the libraries themselves, where these are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import labo
from gloo import Processes
from scripts import ROOT, snippet
from tiny_models import V, arguments, build


def run(page: str, library: str) -> dict:
    """The names that a snippet defines."""
    pytest.importorskip(library)
    scope: dict = {}
    exec(compile(snippet(page, library), library, "exec", dont_inherit=True), scope)
    return scope


def run_script(folder, *names: str) -> None:
    """Run files of a folder in another process: these libraries change global state."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    changed = {"PYTHONPATH": path, "DISABLE_VERSION_CHECK": "1"}  # the latter: LLaMA-Factory
    command = [sys.executable, *(str(folder / name) for name in names)]
    environment = os.environ | changed
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------ torchtitan


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (2, 6), generator=generator)
    labels[0, 2] = -100
    return torch.randn(2, 6, 8, generator=generator), labels


@pytest.mark.filterwarnings("ignore")
def test_torchtitan():
    """In its ChunkedLossWrapper: a sum by chunks, divided by the number of targets."""
    kind = run("other_libraries", "torchtitan")["LABO"]
    from torchtitan.components.loss import ChunkedLossWrapper

    wrapped = ChunkedLossWrapper.Config(num_chunks=3, loss_fn=kind.Config(tau=2.0)).build()
    torch.manual_seed(0)
    head = nn.Linear(4, V)
    wrapped.set_lm_head(head)
    hidden, (_, labels) = torch.randn(2, 6, 4, requires_grad=True), logits_and_labels()
    targets = (labels != -100).sum()
    expected = labo.LABOLoss(tau=2.0)(head(hidden), labels)
    slopes = torch.autograd.grad(expected, [hidden, head.weight])
    value, _ = wrapped(hidden, labels, targets)
    torch.testing.assert_close(value, expected)
    value.backward()
    torch.testing.assert_close(hidden.grad, slopes[0])
    torch.testing.assert_close(head.weight.grad, slopes[1])
    with torch.no_grad():
        plain = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
        torch.testing.assert_close(wrapped(hidden.detach(), labels, targets)[0], plain)


def of_columns(world) -> torch.Tensor:
    """What torchtitan's tensor parallelism gives to a loss: the columns of each process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    loss = run("other_libraries", "torchtitan")["LABO"].Config().build()
    logits, labels = logits_and_labels()
    mine = world.share(logits, -1).contiguous().requires_grad_()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    with set_current_spmd_mesh(mesh):
        value, _ = loss(mine, labels, torch.tensor(11))
    value.backward()
    return torch.cat([value.detach().reshape(1), mine.grad.flatten()])


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_with_split_logits(tmp_path):
    pytest.importorskip("torchtitan")
    processes = Processes(2, tmp_path)
    try:
        found = processes.run(2, of_columns)
    finally:
        processes.stop()
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    value = labo.LABOLoss()(logits, labels)
    value.backward()
    for mine, part in zip(found, logits.grad.split(4, -1), strict=True):
        torch.testing.assert_close(mine, torch.cat([value.detach().reshape(1), part.flatten()]))


# ------------------------------------------------------------------ sentence-transformers


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers(tmp_path):
    """A step of CrossEncoderTrainer is a step by hand, and evaluation is the plain NLL."""
    regularized = run("other_libraries", "sentence_transformers")["regularized"]
    import datasets
    import transformers
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )

    from tiny_sft import tokenizer

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=V, num_labels=3, num_attention_heads=2, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    rows = {"one": ["w3 w4", "w5", "w6"], "two": ["w7", "w8 w9", "w3"], "label": [0, 2, 1]}
    data, encoder = datasets.Dataset.from_dict(rows), CrossEncoder(str(tmp_path))
    inputs = encoder.preprocess(list(zip(rows["one"], rows["two"], strict=True)))
    logits, labels = encoder(inputs)["scores"], torch.tensor(rows["label"])
    expected = labo.LABOLoss(tau=1.25)(logits, labels)
    args = arguments(tmp_path, CrossEncoderTrainingArguments, max_steps=1)
    loss = regularized(encoder, labo.LABOLoss(tau=1.25))
    trainer = CrossEncoderTrainer(model=encoder, args=args, train_dataset=data, loss=loss)
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        plain = nn.functional.cross_entropy(encoder(inputs)["scores"], labels).item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(plain, rel=1e-5)


# ------------------------------------------------------------------ LLaMA-Factory

SFT = """
import json, sys
import torch, labo, transformers
exec(open(sys.argv[1]).read())
from llamafactory.train.tuner import run_exp

seen = []


class Watched(Regularized):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []
        step = self.training_step

        def keep(model, inputs, *rest):
            self.batches.append({k: v.clone() for k, v in inputs.items()})
            return step(model, inputs, *rest)

        self.training_step = keep
        seen.append(self)


workflow.CustomSeq2SeqTrainer = Watched
settings = json.load(open(sys.argv[2]))
run_exp(settings)
(trainer,) = seen
model = transformers.AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"])
total = count = 0
for batch in trainer.batches:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    target = batch["labels"][:, 1:]
    total += labo.LABOLoss(tau=1.25, reduction="sum")(logits[:, :-1], target).item()
    count += (target != -100).sum().item()
found = {"loss": trainer.state.log_history[0]["loss"], "expected": total / count}
json.dump({**found, "batches": len(trainer.batches)}, open(sys.argv[3], "w"))
"""


def test_llamafactory(tmp_path):
    """One accumulated step of run_sft has the loss of the whole batch."""
    pytest.importorskip("llamafactory")
    from tiny_sft import tokenizer

    build("Llama").save_pretrained(tmp_path / "model")
    words = tokenizer()
    words.save_pretrained(tmp_path / "model")
    rows = [
        {"instruction": "w3 w4", "input": "", "output": " ".join(f"w{i}" for i in range(5, 6 + n))}
        for n in range(8)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    info = {"rows": {"file_name": "rows.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    settings = {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "template": "default",
        "model_name_or_path": str(tmp_path / "model"), "dataset": "rows",
        "dataset_dir": str(tmp_path), "output_dir": str(tmp_path / "out"), "cutoff_len": 32,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "overwrite_cache": True, "dataloader_pin_memory": False, "bf16": False, "seed": 1,
    }  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(snippet("other_libraries", "llamafactory"))
    (tmp_path / "script.py").write_text(SFT)
    run_script(tmp_path, "script.py", "code.py", "settings.json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["batches"] == 4
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-3)


# ------------------------------------------------------------------ Eole

NMT = """
import json, sys
exec(open(sys.argv[1]).read())
import torch
from eole.config.run import TrainConfig
from eole.train_single import main

seen = []
compute = LossCompute._compute_ce_loss


def keep(self, output, target):
    loss, scores = compute(self, output, target)
    seen.append((torch.is_grad_enabled(), self.padding_idx, scores.detach(), target, loss.detach()))
    return loss, scores


LossCompute._compute_ce_loss = keep
main(TrainConfig(**json.load(open(sys.argv[2]))), device_id=-1)
torch.save(seen, sys.argv[3])
"""


def test_eole(tmp_path):
    """Two steps and a validation of a tiny Transformer."""
    pytest.importorskip("eole")
    lines = [" ".join(f"w{(i * j) % 20}" for j in range(1, 3 + i % 4)) for i in range(16)]
    for end in ("src", "tgt"):
        (tmp_path / end).write_text("\n".join(lines) + "\n")
    (tmp_path / "vocab").write_text("".join(f"w{i}\t9\n" for i in range(20)))
    pairs = {"path_src": "src", "path_tgt": "tgt"}
    settings = {
        "data": {"corpus": pairs, "valid": pairs}, "src_vocab": "vocab", "tgt_vocab": "vocab",
        "src_vocab_size": 30, "tgt_vocab_size": 30, "share_vocab": False, "seed": 1,
        "training": {
            "world_size": 1, "gpu_ranks": [], "batch_type": "sents", "batch_size": 8,
            "train_steps": 2, "valid_steps": 2, "save_checkpoint_steps": 2, "model_path": "out",
            "num_workers": 0, "optim": "sgd", "learning_rate": 0.1, "label_smoothing": 0.0,
            "normalization": "tokens", "bucket_size": 16, "compute_dtype": "fp32",
        },
        "model": {
            "architecture": "transformer", "hidden_size": 16, "layers": 1, "heads": 2,
            "transformer_ff": 32,
            "embeddings": {"word_vec_size": 16, "position_encoding_type": "SinusoidalInterleaved"},
        },
    }  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(snippet("other_libraries", "eole"))
    (tmp_path / "script.py").write_text(NMT)
    run_script(tmp_path, "script.py", "code.py", "settings.json", "seen.pt")
    seen = torch.load(tmp_path / "seen.pt")
    assert [training for training, *_ in seen[:2]] == [True, True]
    assert not seen[-1][0]
    for training, padding, scores, target, value in seen:
        kind = labo.LABOLoss if training else labo.CrossEntropyLoss
        expected = kind(ignore_index=padding, reduction="sum")(scores.double(), target)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
