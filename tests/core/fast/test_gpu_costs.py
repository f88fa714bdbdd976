"""What a loss would do on a GPU, counted on a device that computes nothing.

A limit that fails here has grown: more launches, bytes or memory than before. If it has shrunk,
lower it, and let ``python tests/support/gpu_costs.py --write`` write the tables of the page.
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

# Launches, bytes per bfloat16 logit, and bytes per logit alive at the peak.
LIMITS = {
    "base": (8, 6, 2),
    "ls": (8, 6, 2),
    "labo": (8, 6, 2),
    "labo, float16": (8, 6, 2),
    "labo, float32": (8, 12, 4),
    "cp": (46, 6, 2),
    "maxsup": (45, 6, 2),
    "maxsup, final_lam": (52, 6, 2),
    "mbls": (49, 8, 2),
    "fl": (42, 6, 2),
    "afl": (32, 6, 2),
    "poly": (32, 6, 2),
    "logitnorm": (69, 8, 2),
    "dft": (33, 6, 2),
    "eaft": (41, 6, 2),
    "ger": (61, 8, 2),
    "mls": (53, 6, 2),
    "wls": (92, 6, 2),
    "tf-reg": (78, 6, 2),
    "kd": (54, 10, 2),
    "kd, standardized": (107, 16, 2),
    "cs-kd": (54, 10, 2),
    "ps-kd": (63, 10, 2),
    "dkd": (114, 10, 2),
    "topk-kd": (191, 10.4, 2),
    "ols": (78, 108, 17.5),
    "gce": (32, 6, 2),
    "gem": (37, 6, 2),
    "als": (59, 6, 2),
    "als-past": (63, 10, 2),
    # The reference.
    "acls": (105, 422, 36),
    "zipf": (103, 496, 52),
    "beta-ls": (118, 351, 37),
    "r-drop": (99, 429, 55),
    "kr-ls": (117, 583.5, 49),
    "connet": (208, 393.1, 46),
    "held-labo": (137, 483, 30),
}
# Launches and peak, MiB.
LINEAR_LIMITS = {
    "base": (23, 3070),
    "ls": (23, 3070),
    "labo": (23, 3070),
    "labo, metrics": (90, 3070),
    "fl": (91, 3070),
    "cp": (99, 3070),
    "logitnorm": (145, 3070),
    "kd": (115, 3070),
    "ps-kd": (128, 3070),
    "dkd": (230, 3070),
}


@pytest.fixture(scope="module")
def costs():
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", LIMITS)
def test_a_loss_on_logits(costs, name):
    record = costs["logits"][name]
    launches, moved, peak = LIMITS[name]
    assert record["launches"] <= launches
    assert record["bytes"] <= moved
    assert record["peak"] <= peak
    assert record["waits"] == []


def test_every_loss_has_a_limit(costs):
    assert set(costs["logits"]) == set(LIMITS) >= set(labo.LOSSES)
    assert set(costs["linear"]) == set(LINEAR_LIMITS)


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
        assert record["bytes"] <= LIMITS[name][1]
        assert record["waits"] == []


@pytest.mark.parametrize("name", LINEAR_LIMITS)
def test_linear_loss(costs, name):
    record = costs["linear"][name]
    launches, peak = LINEAR_LIMITS[name]
    assert record["launches"] <= launches
    assert record["peak MiB"] <= peak
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


def test_the_page_has_these_tables(costs, monkeypatch):
    """Run: python tests/support/gpu_costs.py --write."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    tables = importlib.import_module("gpu_tables")
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page(costs, text) == text


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
