"""The Triton kernels on GPUs that are not here: compiled ahead of time, and their bytes counted.

The newest NVIDIA target and the AMD target compile a few variants that have every value of every
option. ``LABO_ALL_KERNELS=1``, as in CI, compiles all 72 for four targets: a minute of one core
each.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys

import pytest

from labo.fast import kernels
from scripts import ROOT

AUDIT = ROOT / "tests/support/kernel_audit.py"
ALL = ["--all"] if os.environ.get("LABO_ALL_KERNELS") else []
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"] if ALL else ["sm_100", "gfx942"]
OPTIONS = [{0, 1, 2, 3}, set(BYTES), {False, True}, {1000, 32768, 50257}]


def audit(*arguments: str) -> list[dict]:
    command = [sys.executable, str(AUDIT), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(target):
    found = audit("compile", target, *ALL)
    assert {record["kernel"] for record in found} == {
        "statistics",
        "gradient",
        "formula sums",
        "mixture sums",
        "formula gradient",
        "moments",
        "targets",
    }
    variants = {tuple(r["variant"]) for r in found if not isinstance(r["variant"], str)}
    assert len(found) > len(variants) * 5 + 20  # and both passes of the formulas
    assert [set(values) for values in zip(*variants, strict=True)] == OPTIONS
    assert not ALL or len(variants) == math.prod(map(len, OPTIONS))
    assert [record for record in found if record["spilled"]] == []
    # 256 threads of 128 registers each are half of what a multiprocessor of NVIDIA has. One of
    # gfx942 has twice as many: with 168, each of its four units holds three groups of 64 threads.
    most = 168 if target == "gfx942" else 128
    assert max(record["registers"] for record in found) <= most


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm")])
def test_instructions_per_logit(target):
    """In the machine code; threads meet at no barrier while they read a row."""
    records = audit("instructions", target)
    assert len(records) == 8
    for record in records:
        most = {"statistics": 18, "gradient": 20}[record["kernel"]]
        assert record["instructions"] <= most, record
        assert record["barriers"] == 0


def test_the_audit_knows_every_kernel():
    """A kernel that is added to the file is added to the audit."""
    source = inspect.getsource(kernels)
    written = re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", source)
    assert len(written) == 7
    assert sorted(re.findall(r"_launch\((\w+_kernel),", source)) == sorted(written)


def test_bytes_per_logit():
    """Each pass reads every logit once; the gradient is written once; all else is per row.

    Class weights are read with every row, and come from the cache.
    """
    found = audit("bytes")
    for record in found:
        mode, dtype, weighted, _ = record["variant"]
        size = BYTES[dtype]
        backward = "gradient" in record["kernel"]
        weights = 4 if weighted and mode > 0 else 0
        if record["kernel"] == "targets":
            assert record["read"] <= 20 / 8192, record  # a target, and its weight
            continue
        if record["kernel"] == "mixture sums":
            weights = 0
        if record["kernel"] == "moments":
            weights = mode * size  # of the student, whose masked classes do not count
        if mode == 3 and record["kernel"] == "formula sums":
            weights += 2 * size  # a teacher's logits, for their maximum and from the cache
        elif mode == 3 and record["kernel"] == "formula gradient":
            weights += size
        per_row = 128 / 4096  # at most sixteen numbers for each block
        assert size + weights <= record["read"] <= size + weights + per_row, record
        written = size if backward else 0
        assert written <= record["written"] <= written + per_row, record
