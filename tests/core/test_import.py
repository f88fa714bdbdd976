"""What importing labo costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import labo

ALL_OF_IT = """
import sys, torch
before = set(sys.modules)
from labo import *
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new - set(sys.stdlib_module_names) - {"labo"}
print(",".join(sorted(heavy)))
"""


def output_of(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_core_loads_torch_and_nothing_else():
    """In particular no yaml, triton, transformers or matplotlib."""
    assert output_of(ALL_OF_IT) == ""


@pytest.mark.parametrize("module", ["labo", "labo.cli"])
def test_torch_is_loaded_only_when_it_is_used(module):
    assert output_of(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_there_and_no_other():
    assert set(labo.__all__) <= set(dir(labo))
    for name in labo.__all__:
        getattr(labo, name)
    with pytest.raises(AttributeError, match="no attribute 'LaboLoss'"):
        _ = labo.LaboLoss


LINES = """
import sys
from pathlib import Path
import labo
labo.LABOLoss
files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "labo"]
print(sum(len(Path(file).read_text().splitlines()) for file in files))
print(*sorted(name for name in sys.modules if name.startswith("labo.")))
"""


def test_labo_loads_no_other_family_and_few_lines():
    lines, names = output_of(LINES).splitlines()
    assert int(lines) <= 4400  # about 4000; 6300 when all families were loaded
    loaded = set(names.split())
    assert "labo.losses.labo" in loaded
    heavy = {"labo.losses.teachers", "labo.linear", "labo.calibration", "labo.heads.split"}
    assert not loaded & heavy


def test_families_are_found_by_name():
    script = """
import labo.losses
print(labo.losses.weights.FocalLoss is labo.FocalLoss)
from labo.losses import *
print(*dir())
"""
    same, names = output_of(script).splitlines()
    assert same == "True"
    assert {"FocalLoss", "LOSSES", "Warmup"} <= {*names.split()}
    assert "ZLoss" not in names.split()
