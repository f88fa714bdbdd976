"""docs/recipe.md lists every recipe key, and is what ``tools/recipe_page.py`` writes."""

from __future__ import annotations

import importlib
import re

import pytest

from scripts import ROOT


@pytest.fixture
def recipe_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.recipe_page")


def test_the_page_is_current(recipe_page):
    current = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert current == recipe_page.page(), "run: python tools/recipe_page.py"


def test_every_key_has_a_type_a_default_and_a_meaning(recipe_page):
    rows = re.findall(r"^\| `.*\|$", recipe_page.page(), re.MULTILINE)
    assert len(rows) > 100
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split(" | ")), row


@pytest.mark.parametrize(
    "key",
    ["train.accumulate", "optim.milestones", "data.mixup", "decode.beam", "method.warmup_steps"],
)
def test_keys_of_every_kind_are_listed(key, recipe_page):
    assert f"| `{key}` |" in recipe_page.page()
