"""What people read is true: doctests, code blocks and their output, tables, examples."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import labo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", re.DOTALL)
MODULES = [
    "labo",
    "labo.functional",
    "labo.smoothing",
    "labo.losses",
    "labo.fused.dispatch",
    "labo.fused.linear",
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "math": math})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", labo.functional.__all__)
def test_every_function_has_equation_shapes_and_example(name):
    text = getattr(labo.functional, name).__doc__
    for part in ("Args:", "Returns:", "Example:", "(..., K)"):
        assert part in text, part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run_and_print_what_they_show(page):
    scope: dict[str, object] = {}
    for code, shown in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), scope)
        if shown:
            assert printed.getvalue() == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_method_is_in_the_tables():
    readme, methods = (ROOT / "README.md").read_text(), (ROOT / "docs/methods.md").read_text()
    for name, module in labo.LOSSES.items():
        assert f"| `{name}` | `{module.__name__}` |" in readme
        assert f"`{name}`" in methods
        assert f"`{module.__name__}(" in methods or name == "ce"


def test_readme_confidence_table():
    rows = re.findall(r"^\| (.*α.*) \|((?: 0\.\d+ \|){5})$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 5
    for setting, cells in rows:
        tau = float(re.search(r"τ ([\d.]+)", setting)[1])
        rho = re.search(r"ρ ([\d.]+)", setting)
        alpha = "adaptive" if "adaptive" in setting else float(re.search(r"α ([\d.]+)", setting)[1])
        for k, cell in zip((10, 100, 1000, 10_000, 32_000), cells.split("|"), strict=False):
            value = labo.smoothing.stationary_confidence(
                k, tau=tau, alpha=alpha, rho=float(rho[1]) if rho else 0.5
            )
            assert value == pytest.approx(float(cell), abs=6e-4)


def load_script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_example(capsys):
    load_script(ROOT / "examples" / "digits.py").main(["--seeds", "1", "--epochs", "2"])
    printed = capsys.readouterr().out
    assert "LABO tau 1.25" in printed
    assert printed.count("±") == 20


def test_benchmark_smoke(tmp_path, monkeypatch):
    """The benchmark runs as it stands, at tiny sizes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    main = importlib.import_module("benchmarks.__main__").main
    try:
        main(["--smoke", "--only", "large", "linear", "memory", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["torch"] == torch.__version__
    assert {row["rival"] for row in results["rows"]} >= {"torch LS", "three matrix products"}
    assert all(row["ratio"] > 0 for row in results["rows"])


def test_plot_is_a_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    plot = importlib.import_module("benchmarks.plot")
    svg = plot.line_chart("t & u", "x", "y", {"a": [(1, 1), (10, 100)], "b": [(1, 2), (10, 3)]})
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "t & u"
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
