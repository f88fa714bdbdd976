"""The steps of docs/add_a_method.md, applied to a copy of the project, work."""

from __future__ import annotations

from guides import Copy
from scripts import ROOT

PAGE = "docs/add_a_method.md"
COPIED = ["src", "tests", "docs", "README.md", "pyproject.toml", "benchmarks", "examples", "tools"]


def test_the_page_leads_to_a_method_that_passes_the_tests(tmp_path):
    copy = Copy(tmp_path, COPIED, PAGE)
    assert "you edit **three files**" in (ROOT / PAGE).read_text()
    assert copy.changes.keys() == {
        "src/labo/losses/weights.py",
        "tests/support/loss_cases.py",
        "docs/methods.md",
    }
    for tool in ("functional_stub", "recipe_page"):
        copy.python(f"tools/{tool}.py")
    files = ["losses", "fast/test_formula.py", "test_loss.py", "test_linear.py"]
    paths = [f"tests/core/{name}" for name in files]
    paths += ["tests/project/test_docs.py", "tests/lab/test_methods.py"]
    paths += ["tests/project/test_recipe_page.py"]
    names = "sce or symmetric_cross or table or is_a_method or five_things or doctests"
    # compilation and a recorded training run pass too, but take longer than all the others
    chosen = f"({names} or recipe_page) and not compile and not golden"
    copy.python("-m", "pytest", *paths, "-k", chosen)
    assert "### `sce`" in (tmp_path / "docs" / "recipe.md").read_text()
