"""docs/recipe.md lists every recipe key, and is what ``tools/recipe_page.py`` writes."""

from __future__ import annotations

import importlib
import re

import pytest

from labo import cli
from labo.lab.translation.options import PrepareOptions
from labo.lab.translation.text import TextOptions
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


def test_help_and_model_describe_an_option_alike(recipe_page):
    fields = PrepareOptions.model_fields | TextOptions.model_fields
    helps = recipe_page.option_helps(cli.prepare)
    # straight_apostrophes: the command does not apply it to training text
    shared = (helps.keys() & fields.keys()) - {"straight_apostrophes"}
    assert len(shared) > 20
    for name in shared:
        assert helps[name] == fields[name].description
