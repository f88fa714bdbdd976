"""Pages that say how to add something, followed in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import ROOT

STEP = re.compile(r"<!-- (\S+?)(?: before: (.*?))? -->\n```(\w+)\n(.*?)\n```\n", re.DOTALL)


class Copy:
    """A copy of parts of the project, in which the steps of a page are made.

    Attributes:
        changes: file -> the kind of its block on the page: "diff", or the language of new text.
    """

    def __init__(self, folder: Path, parts: list[str], page: str) -> None:
        self.folder, self.changes = folder, {}
        for name in parts:
            source, copy = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        for name, mark, kind, block in STEP.findall((ROOT / page).read_text()):
            self.follow(folder / name, mark, kind, block)
            self.changes[name] = kind

    def follow(self, path: Path, mark: str, kind: str, block: str) -> None:
        """Add lines before a mark, or write a file if there is none."""
        if kind == "diff":
            *added, mark = block.splitlines()
            assert all(line[0] == "+" for line in added), block
            block, mark = "\n".join(line[1:] for line in added) + "\n", mark[1:]
        elif mark:
            block = block.rstrip("\n") + ("\n\n" if kind == "md" else "\n\n\n")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(block + "\n")
            return
        text = path.read_text()
        assert text.count(mark) == 1, f"{path}: {mark!r} occurs {text.count(mark)} times"
        path.write_text(text.replace(mark, block + mark))

    def python(self, *arguments: str) -> str:
        """What Python prints, with the package of the copy."""
        variables = {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
