"""What a loss would do on a GPU, counted on a device that computes nothing.

The limits are the tables of docs/performance.md: ``python tests/support/gpu_costs.py --write``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import labo
from scripts import ROOT

SCRIPT = ROOT / "tests/support/gpu_costs.py"


@pytest.fixture(scope="module")
def costs():
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_page_has_what_every_loss_costs(costs, monkeypatch):
    """A number that has grown is a regression. Otherwise run gpu_costs.py --write."""
    assert set(costs["logits"]) >= set(labo.LOSSES)
    for record in (*costs["logits"].values(), *costs["linear"].values()):
        assert record["waits"] == []
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    tables = importlib.import_module("gpu_tables")
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page(costs, text) == text


@pytest.mark.parametrize(
    "name", ["base", "ls", "labo", "cp", "maxsup, final_lam", "kd", "dkd", "ps-kd", "wls"]
)
def test_no_buffer_between_the_passes(costs, name):
    """The logits are kept, and numbers of rows."""
    record = costs["logits"][name]
    assert record["triton"] == 3  # targets, sums and gradient
    assert record["between"] == 0


def test_the_operators_of_torch_compile_move_no_more(costs):
    for name, record in costs["compiled"].items():
        assert record["bytes"] <= costs["logits"][name]["bytes"]
        assert record["waits"] == []


def test_without_triton_auto_moves_less_than_the_plain_formula(costs):
    assert len(costs["without triton"]) == 10
    assert costs["without triton"]["base"]["auto"]["bytes"] <= 52
    assert costs["without triton"]["ls"]["auto"]["bytes"] <= 124
    for name, of_impl in costs["without triton"].items():
        assert of_impl["auto"]["triton"] == 0
        assert of_impl["auto"]["bytes"] < of_impl["reference"]["bytes"], name


def test_a_device_without_float64(costs):
    """Such as MPS. Nothing there is computed in float64, and no loss raises."""
    assert costs["without float64"] == dict.fromkeys(labo.LOSSES, "torch.float32")


def test_it_sees_a_wait_a_copy_and_another_pass():
    """What the limits are made of, on work that is known."""
    source = """
import json, sys
from fake_device import fake_device
import torch
found = []
with fake_device(1 << 20) as count:
    x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    small = torch.empty(5, device="cuda")
    count.given(x)
    (x * 2).sum().backward()
    found.append([count.moved / x.numel(), count.peak / x.numel(), len(count.waits)])
    copied = lambda: small + torch.ones(5).to("cuda")
    for work in (lambda: small.sum().item(), copied, lambda: small.nonzero()):
        count.given(x)
        try:
            work()
        except (RuntimeError, NotImplementedError):
            pass
        found.append(count.waits)
json.dump(found, sys.stdout)
"""
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=SCRIPT.parent
    )
    assert run.returncode == 0, run.stderr
    (moved, peak, waits), *read = json.loads(run.stdout)
    # x * 2 reads and writes 4 bytes, and the sum reads them. The gradient of the sum is one number,
    # expanded; its product is written. x * 2 is gone by then.
    assert (moved, peak, waits) == (16, 4, 0)
    assert read == [["_local_scalar_dense"], ["_to_copy of a CPU tensor"], ["nonzero"]]
