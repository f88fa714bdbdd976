"""A fused model in two processes of ``accelerate launch``: the step and the metrics of one."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from scripts import ROOT

SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator

import labo
from labo.integrations.huggingface import fuse_head, take_metrics
from tiny_models import build, collate, examples

accelerator = Accelerator(cpu=True)
model, loss = build("Llama"), labo.LABOLoss()
fuse_head(model, loss, metrics=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
batch = collate(examples(4))
items = (batch["labels"][:, 1:] != -100).sum()  # of all processes
mine = slice(accelerator.process_index, None, accelerator.num_processes)
part = {name: rows[mine] for name, rows in batch.items()}
# DDP averages gradients over the processes.
value = model(**part, num_items_in_batch=items / accelerator.num_processes).loss
accelerator.backward(value)
optimizer.step()
base = accelerator.unwrap_model(model)
sums = accelerator.reduce(torch.stack(take_metrics(base)), "sum")
if accelerator.is_main_process:
    weight = base.get_output_embeddings().weight
    json.dump({"weight": weight.tolist(), "metrics": sums.tolist()}, open(sys.argv[1], "w"))
"""


def test_two_processes_make_the_step_of_one(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests/support'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--num_processes=2"]
    launch += ["--main_process_port=0"]
    found = []
    for command in ([sys.executable], launch):
        out = tmp_path / f"{len(found)}.json"
        done = subprocess.run(
            [*command, str(script), str(out)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text()))
    one, two = found
    for name in ("weight", "metrics"):
        torch.testing.assert_close(torch.tensor(two[name]), torch.tensor(one[name]))
