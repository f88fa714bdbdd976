"""The loop of docs/huggingface.md with ``accelerate launch``: two processes are one."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import torch

from scripts import ROOT

# What is compared, after the loop as printed.
RECORD = """
import json, sys

weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
sums = accelerator.reduce(torch.stack(metrics), "sum")
if accelerator.is_main_process:
    found = {"processes": accelerator.num_processes, "weights": weights, "metrics": sums.tolist()}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
"""


def test_two_processes_make_the_steps_of_one(tmp_path, monkeypatch):
    page = (ROOT / "docs/huggingface.md").read_text()
    (loop,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Accelerator" in x)
    script = tmp_path / "script.py"
    script.write_text(loop + RECORD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # With --cpu accelerate starts one process, whatever --num_processes says.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--num_processes=2"]
    launch += ["--main_process_port=0"]
    found = []
    for command in ([], launch):
        out = tmp_path / f"{len(found)}.json"
        if command:
            done = subprocess.run(
                [*command, str(script), str(out)], capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr
        else:
            monkeypatch.setattr(sys, "argv", [str(script), str(out)])
            runpy.run_path(str(script))
        found.append(json.loads(out.read_text()))
    one, two = found
    assert (one["processes"], two["processes"]) == (1, 2)
    torch.testing.assert_close(torch.tensor(two["metrics"]), torch.tensor(one["metrics"]))
    for ours, theirs in zip(two["weights"], one["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6)
