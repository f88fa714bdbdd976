"""The page docs/add_a_task.md, followed in a copy of the project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from guides import Copy

FOLDER = "src/labo/lab/tabular/"

# All commands in one process; only the runs of a comparison are processes of their own.
COMMANDS = """
import sys
from pathlib import Path
from labo import cli

def labo(*arguments):
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        if end.code:
            sys.exit(f"labo {' '.join(map(str, arguments))} ended with {end.code}")

labo("methods", "--task", "tabular")
labo("train", "breast_cancer.yaml", "method=ls", "train.epochs=2", "--out", "ls")
labo("compare", "breast_cancer.yaml", "train.epochs=2", "--methods", "base,labo", "--seeds", 1,
     "--jobs", 2, "--out", "runs")
runs = sorted(path.parent for path in Path("runs").glob("*/recipe.yaml"))
labo("analyze", *runs)
labo("report", *runs, "ls", "-o", "report.html")
"""


def test_a_task_is_one_folder_and_one_line(tmp_path):
    copy = Copy(tmp_path, ["src", "tests", "pyproject.toml"], "docs/add_a_task.md")
    recipe, line = "breast_cancer.yaml", "src/labo/lab/tasks.py"
    assert {name for name in copy.changes if not name.startswith(FOLDER)} == {recipe, line}
    assert [name for name, kind in copy.changes.items() if kind == "diff"] == [line]
    printed = copy.python("-c", COMMANDS)
    for text in ("| base   |", "| labo   |", "| labo - base |", "test, 113 examples"):
        assert text in printed
    table = json.loads((tmp_path / "runs" / "table.json").read_text())
    assert [row["method"] for row in table["rows"]] == ["base", "labo"]
    assert table["rows"][1]["cells"]["delta_base"]["value"] is not None
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"labo is right on [\d.]+ % of the rows with a mean confidence of", page)
    for figure in ("g0-learning", "g0-confidence-over-training", "g0-reliability", "g0-errors"):
        assert f'<figure id="{figure}">' in page

    rules = "follow_the_map or lists_every_room or outside_of_its_room or room_of_a_task"
    copy.python("-m", "pytest", "tests/project/test_imports.py", "-q", "-k", rules)
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run([ruff, "check", "-q", tmp_path / FOLDER], cwd=tmp_path, check=True)
