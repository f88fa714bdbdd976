"""The documentation is correct: doctests, code blocks and their output, tables, links."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from benchmarks import idea
from tools import label_figure

import labo
import labo.loss
import loss_cases
from scripts import EXAMPLES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
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
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", methods, re.MULTILINE)
    assert dict(rows) == {name: module.__name__ for name, module in labo.LOSSES.items()}
    for module in labo.LOSSES.values():
        assert f"`{module.__name__}(" in methods


@pytest.mark.parametrize("section", METHODS_SECTIONS, ids=lambda section: section.split("\n")[0])
def test_every_method_says_all_five_things(section):
    assert re.search(r"^\$\$\n.+\n(?:.+\n)*\$\$$", section, re.MULTILINE), "no equation"
    for part in ("Held fixed", "State", "Options", "Differences"):
        assert section.count(f"- **{part}:** ") == 1, part


def test_the_table_of_extras_and_the_requirements_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/index.md").read_text()
    rows = re.findall(r"^\| (`\[.*?) \|", page, re.MULTILINE)
    extras = [name for row in rows for name in re.findall(r"`\[(\w+)\]`", row)]
    assert sorted(extras) == sorted(project["optional-dependencies"])
    (torch_version,) = (d for d in project["dependencies"] if d.startswith("torch>="))
    needs = f"Python {project['requires-python'][2:]} and PyTorch {torch_version[7:]}, or newer"
    for text in (page, (ROOT / "README.md").read_text()):
        assert needs in text
        assert f"called `{project['name']}`" in " ".join(text.split())


def test_the_table_of_several_processes_has_every_loss_with_more_than_its_own_rows():
    page = (ROOT / "docs/distributed.md").read_text()
    table = page.split("| method | with several processes |")[1].split("\n\n")[0]
    first = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    names = re.findall(r"`([\w-]+)`", " ".join(first))
    assert {*names} <= {*labo.LOSSES, "Warmup"}
    for name, loss in labo.LOSSES.items():
        if name not in names:
            assert loss.rowwise, name
            assert loss.teacher_argument is None, name
            assert not [*loss_cases.MODULES[name](6).parameters()]


def test_the_table_of_states_has_every_loss_with_a_state():
    page = (ROOT / "docs/checkpoints.md").read_text()
    table = page.split("| loss | state |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, re.MULTILINE))
    with_state = {"Warmup"}
    for name, build in loss_cases.MODULES.items():
        loss = labo.MaxSuppressionLoss(final_lam=0.2, epochs=2) if name == "maxsup" else build(6)
        if loss.state_dict().keys() - loss.fields.keys():
            with_state.add(type(loss).__name__)
    assert {name for name, state in rows.items() if not state.startswith("none")} == with_state


def test_the_numbers_of_the_readme_are_those_of_the_page_on_performance():
    readme = (ROOT / "README.md").read_text()
    table = readme.split("<!-- rows of docs/performance.md; a test compares them -->")[1]
    rows = re.findall(r"^\|.*\|$", table.split("![")[0], re.MULTILINE)[2:]
    assert len(rows) == 8
    measured = (ROOT / "docs/performance.md").read_text().splitlines()
    for row in rows:
        assert [line for line in measured if line.startswith(row)], row


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


def test_the_picture_of_the_idea_has_the_labels_of_the_losses():
    logits = torch.tensor([0.0] * 3 + [3.0] + [0.0] * 4 + [2.0, 1.0])
    drawn = ElementTree.fromstring(idea.draw(torch.rand(64), 3, logits))
    numbers = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    alpha = labo.smoothing.adaptive_alpha(logits)
    star = labo.smoothing.tempered(logits, 1.25)
    for value in (1.0, 0.91, 1 - alpha + alpha * star[3], alpha * star[8], logits.softmax(-1)[9]):
        assert f"{value:.2f}" in numbers
    kept = ElementTree.fromstring((ROOT / "docs/assets/idea.svg").read_text())
    assert kept.attrib["role"] == "img"


def test_the_picture_of_all_labels_is_that_of_the_losses():
    assert (ROOT / "docs/assets/labels.svg").read_text() == label_figure.draw()
    assert len(label_figure.METHODS) == 25
    shown = {title.partition(",")[0] for title in label_figure.METHODS}
    # what needs a table, a batch or a second sample is not drawn
    assert {*labo.LOSSES} - shown == NOT_DRAWN


NOT_DRAWN = {
    *("beta-ls", "connet", "cs-kd", "held-labo", "kr-ls", "mls", "ols", "ps-kd", "r-drop"),
    *("topk-kd", "wls"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")  # the command writes beside the pages
    shutil.copy(ROOT / "mkdocs.yml", tree)
    shutil.copytree(ROOT / "docs", tree / "docs")
    for name in ("src", "tools"):
        (tree / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "site"


def test_the_api_page_shows_links_formulas_and_examples(site):
    page = (site / "api.html").read_text()
    assert not re.findall(r":(?:func|class|mod|math):|\.\. math::|&gt;&gt;&gt; &gt;&gt;&gt;", page)
    assert re.search(r'<a class="autorefs [^>]*href="#labo.functional.labo_loss"', page)
    assert page.count("<math") > 30
    assert "\\(" not in page
    assert page.count('<span class="gp">&gt;&gt;&gt; </span>') > 50


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page
