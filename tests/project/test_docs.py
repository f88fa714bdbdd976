"""The documentation is correct: doctests, code blocks and their output, tables, links."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import labo
import labo.loss
from labo.lab.methods import METHODS
from scripts import EXAMPLES, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block of Python, and after it the block with what it prints.
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", re.DOTALL)
# Python that is not run here: the comment before it says what it needs, or where it belongs.
FOREIGN = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```py\n(.*?)```", re.DOTALL)
METHODS_SECTIONS = (
    (ROOT / "docs/methods.md").read_text().split("\n## ")[2:]
)  # after the conventions
SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.glob("labo/**/*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "math": math})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", labo.functional.__all__)
def test_every_function_has_equation_and_shapes(name):
    text = getattr(labo.functional, name).__doc__
    for part in ("Args:", "Returns:", "(..., K)", "math"):
        assert part in text, part


@pytest.mark.parametrize("loss", labo.losses.ALL, ids=lambda loss: loss.__name__)
def test_every_loss_has_an_equation_arguments_and_an_example(loss):
    for part in ("math", "Example:\n    >>> "):
        assert part in loss.__doc__, part
    for name, field in loss.fields.items():
        assert field.doc
        assert name in labo.loss.Loss.fields or f"    {name}: {field.doc}." in loss.__doc__


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")  # inside Lightning
@each_page
def test_code_blocks_run_and_print_what_they_show(page):
    scope: dict[str, object] = {}
    for code, shown in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), scope)
        if shown:
            assert printed.getvalue() == shown


@each_page
def test_code_for_other_libraries_is_marked_and_run_where_they_are(page):
    for mark, code in FOREIGN.findall(page.read_text()):
        assert mark, f"a comment must say what this block needs, or that it is not run:\n{code}"
        library = mark.removeprefix("needs ")
        if library != mark and importlib.util.find_spec(library):
            # in a separate process: the library may change global state
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        else:
            compile(code, str(page), "exec")


def test_the_diff_of_the_first_page_is_that_of_its_example():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/start.md").read_text(), re.DOTALL)
    lines = (EXAMPLES / "plain_loop.py").read_text().splitlines()
    code = iter([line.partition("  # ")[0].strip() for line in lines])
    for line in diff.splitlines():
        if line[0] != "-":
            assert line[1:].strip() in code, f"not in the example, or not in this order: {line}"
    new = [line for line in lines if "  # +" in line]
    assert len(new) == sum(line[0] == "+" for line in diff.splitlines()) <= 10


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_prose_is_wrapped_at_100_columns(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in text.splitlines():
        if not line.lstrip().startswith(("|", "<!--")):
            assert len(line) <= 100, line


@each_page
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)", prose):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_method_is_in_the_table():
    methods = (ROOT / "docs/methods.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`.*?`) \| `(\w+)` \|", methods, re.MULTILINE)
    assert {name: module for name, _, module in rows} == {
        name: module.__name__ for name, module in labo.LOSSES.items()
    }
    in_recipes = [name.strip("`") for _, names, _ in rows for name in names.split(", ")]
    # Its loss takes a stored teacher and is not in LOSSES; it has a section of its own.
    assert "the method `topk-kd` of recipes" in methods
    assert sorted([*in_recipes, "topk-kd"]) == sorted(METHODS)
    for module in labo.LOSSES.values():
        assert f"`{module.__name__}(" in methods


@pytest.mark.parametrize("section", METHODS_SECTIONS, ids=lambda section: section.split("\n")[0])
def test_every_method_says_all_five_things(section):
    assert re.search(r"^\$\$\n.+\n(?:.+\n)*\$\$$", section, re.MULTILINE), "no equation"
    for part in ("Held fixed", "State", "Options", "Differences"):
        assert section.count(f"- **{part}:** ") == 1, part


def test_confidence_table():
    page = (ROOT / "docs/choosing.md").read_text()
    rows = re.findall(r"^\| (.*α.*) \|((?: 0\.\d+ \|){5})$", page, re.M)
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


def test_benchmark_smoke(tmp_path, monkeypatch):
    """The benchmark runs, at tiny sizes."""
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
    assert results["machine"]["device"].endswith(("1 thread", "2 threads"))
    assert {row["rival"] for row in results["rows"]} >= {"torch LS", "three matrix products"}
    assert all(row["ratio"] > 0 for row in results["rows"])


def test_the_picture_of_the_idea_has_the_labels_of_the_losses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    idea = importlib.import_module("benchmarks.idea")
    logits = torch.tensor([0.0] * 3 + [3.0] + [0.0] * 4 + [2.0, 1.0])
    drawn = ElementTree.fromstring(idea.draw(torch.rand(64), 3, logits))
    numbers = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    alpha = labo.smoothing.adaptive_alpha(logits)
    star = labo.smoothing.tempered(logits, 1.25)
    for value in (1.0, 0.91, 1 - alpha + alpha * star[3], alpha * star[8], logits.softmax(-1)[9]):
        assert f"{value:.2f}" in numbers
    kept = ElementTree.fromstring((ROOT / "docs/assets/idea.svg").read_text())
    assert kept.attrib["role"] == "img"


def test_the_picture_of_all_labels_is_that_of_the_losses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    figure = importlib.import_module("label_figure")
    assert (ROOT / "docs/assets/labels.svg").read_text() == figure.draw()
    assert len(figure.METHODS) == 25
    shown = {title.partition(",")[0] for title in figure.METHODS}
    # what needs a table, a batch or a second sample is not drawn
    assert {*labo.LOSSES} - {name.replace("-", "") for name in shown} == NOT_DRAWN


NOT_DRAWN = {"betals", "connet", "cskd", "krls", "mls", "ols", "pskd", "rdrop", "wls"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_the_api_page_shows_links_formulas_and_examples(site):
    page = (site / "api" / "index.html").read_text()
    assert not re.findall(r":(?:func|class|mod|math):|\.\. math::|&gt;&gt;&gt; &gt;&gt;&gt;", page)
    assert re.search(r'<a class="autorefs [^>]*href="#labo.functional.labo_loss"', page)
    assert page.count("<math") > 30
    assert "\\(" not in page
    assert page.count('<span class="gp">&gt;&gt;&gt; </span>') > 50


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page
