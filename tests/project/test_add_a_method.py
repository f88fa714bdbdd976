"""The steps of docs/add_a_method.md, applied to a copy of the project, work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import ROOT

PAGE = ROOT / "docs" / "add_a_method.md"
STEP = re.compile(r"<!-- (\S+?)(?: before: (.*?))? -->\n```(\w+)\n(.*?)\n```\n", re.DOTALL)
COPIED = ["src", "tests", "docs", "README.md", "pyproject.toml", "benchmarks", "examples", "tools"]


def follow(project: Path) -> list[str]:
    """Apply the changes of the page; return the names of the changed files."""
    changed = []
    for name, mark, kind, block in STEP.findall(PAGE.read_text()):
        if kind == "diff":
            *added, mark = block.splitlines()
            assert all(line[0] == "+" for line in added), block
            block, mark = "\n".join(line[1:] for line in added) + "\n", mark[1:]
        else:
            block = block.rstrip("\n") + ("\n\n" if kind == "md" else "\n\n\n")
        path = project / name
        text = path.read_text()
        assert text.count(mark) == 1, f"{name}: {mark!r} occurs {text.count(mark)} times"
        path.write_text(text.replace(mark, block + mark))
        changed.append(name)
    return changed


def test_the_page_leads_to_a_method_that_passes_the_tests(tmp_path):
    for name in COPIED:
        source, copy = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    changed = {*follow(tmp_path)}
    assert "you edit **three files**" in PAGE.read_text()
    assert changed == {"src/labo/losses/weights.py", "tests/conftest.py", "docs/methods.md"}
    files = ["losses", "fast/test_formula.py", "test_loss.py", "test_linear.py"]
    paths = [f"tests/core/{name}" for name in files]
    paths += ["tests/project/test_docs.py", "tests/lab/test_methods.py"]
    paths += ["tests/project/test_recipe_page.py"]
    command = [sys.executable, "-m", "pytest", *paths]
    names = "sce or symmetric_cross or table or is_a_method or five_things or doctests"
    # compilation and a recorded training run pass too, but take longer than all the others
    command += ["-k", f"({names} or recipe_page) and not compile and not golden"]
    variables = {"PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    tools = [[sys.executable, f"tools/{name}.py"] for name in ("functional_stub", "recipe_page")]
    for run in (*tools, command):
        done = subprocess.run(
            run, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "### `sce`" in (tmp_path / "docs" / "recipe.md").read_text()
