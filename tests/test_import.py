"""What importing labo costs."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
before = set(sys.modules)
import labo
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new - set(sys.stdlib_module_names) - {"labo"}
print(",".join(sorted(heavy)))
"""


def test_import_loads_torch_and_nothing_else():
    """In particular no yaml, triton, transformers or matplotlib."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
