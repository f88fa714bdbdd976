"""docs/recipe.md lists every recipe key, and is what ``tools/recipe_page.py`` writes."""

from __future__ import annotations

import re

from tools import recipe_page

from scripts import ROOT


def test_the_page_is_current():
    current = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert current == recipe_page.page(), "run: python tools/recipe_page.py"


def test_every_key_has_a_type_a_default_and_a_meaning():
    rows = re.findall(r"^\| `.*\|$", recipe_page.page(), re.MULTILINE)
    assert len(rows) > 100
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split(" | ")), row
    listed = {row.split("`")[1] for row in rows}
    of_every_kind = {"train.accumulate", "optim.milestones", "data.mixup", "decode.beam"}
    assert of_every_kind | {"method.warmup_steps"} <= listed
