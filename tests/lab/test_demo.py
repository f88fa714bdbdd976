"""``labo demo``, at a size for tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from labo.lab import demo
from launched import Launcher


def test_the_demo_ends_with_tables_a_report_and_what_to_try_next(tmp_path, monkeypatch):
    launcher = Launcher.install(monkeypatch)
    tiny = ("train.max_steps=2", "data.size=200", "decode.max_ratio=0.1", "decode.max_extra=2")
    monkeypatch.setattr(
        demo, "PARTS", {"cldr": (1, (*tiny, "decode.beam=1")), "digits": (1, tiny[:1])}
    )
    text, failures = demo.demo(tmp_path / "out", jobs=2)
    assert failures == []
    assert len(launcher.started) == 12
    assert "digits: test split" in text
    assert "cldr: test split" in text
    assert f"{tmp_path / 'out' / 'report.html'}" in text
    assert text.splitlines()[-1].startswith("Next: labo ")
    assert (tmp_path / "out" / "cldr.tex").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "labo" in page
    assert demo.demo(tmp_path / "out") == (text, [])
    assert len(launcher.started) == 12  # nothing was run again


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_keeps_bytecode_for_the_many_processes_of_a_demo(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    shown = ["--eval", "shown: ; @env", "shown"]
    root = Path(__file__).parents[2]
    command = ["make", "--silent", "--directory", str(root), *shown]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "PATH=" in output
    assert "PYTHONDONTWRITEBYTECODE" not in output
