"""The tables of docs/performance.md on GPUs, from what `gpu_costs.py` counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import labo

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"


def _table(header: list[str], rows: list[list[str]]) -> str:
    first, *rest = ("| " + " | ".join(line) + " |" for line in (header, *rows))
    return "\n".join([first, "|---" * len(header) + "|", *rest]) + "\n"


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of the page by the name of their mark."""
    rows = [[f"torch, {name}", *_cells(x)] for name, x in found["torch"].items()]
    same: dict[tuple[str, ...], list[str]] = {}
    for name, record in found["logits"].items():
        same.setdefault(_cells(record), []).append(f"`{name}`" if name in labo.LOSSES else name)
    rows += [[", ".join(names), *cells] for cells, names in sorted(same.items(), key=_order)]
    header = ["loss", "launches", "bytes per logit", "bytes alive at the peak", "waits"]
    linear = [
        [f"`{name}`" if name in labo.LOSSES else name, *(str(x[key]) for key in keys), _waits(x)]
        for keys in [("launches", "products", "peak MiB")]
        for name, x in found["linear"].items()
    ]
    return {
        "costs": _table(header, rows),
        "linear costs": _table(["loss", "launches", "products", "peak, MiB", "waits"], linear),
    }


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    numbers = (f"{record[key]:g}" for key in ("launches", "bytes", "peak"))
    return (*numbers, _waits(record))


def _waits(record: dict[str, Any]) -> str:
    return str(len(record["waits"]))


def _order(entry: tuple[tuple[str, ...], list[str]]) -> tuple[float, int]:
    return float(entry[0][1]), int(entry[0][0])


def page(found: dict[str, Any], text: str) -> str:
    """The page with its tables replaced."""
    for mark, table in tables(found).items():
        pattern = rf"(<!-- {mark}: .*? -->\n)\n.*?\n(?=\n|$)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}\n{t}", text, flags=re.DOTALL)
        assert count == 1, mark
    return text
