"""Train a recipe with several methods and seeds, and print the table of docs/results.md.

    python -m benchmarks.methods digits --seeds 3
    python -m benchmarks.methods fashion-mnist base ls labo labo,tau=1.05 --set data.root=FOLDER

A variant is NAME[,HYPER=VALUE]...; ``kd`` learns from the base run of the same seed unless told
otherwise. Seeds take turns, so that times compare. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from labo.lab.methods import METHODS

SCORES = ("accuracy", "nll", "ece")
DISTILLED = ("kd", "tf-kd-self")


def run(recipe: str, variant: str, seed: int, settings: list[str], out: Path) -> dict[str, Any]:
    """One run: its results, from ``results.json``."""
    name, *hyper = variant.split(",")
    if name in DISTILLED and not any(item.startswith("teacher=") for item in hyper):
        hyper.append(f"teacher={out / f'base-s{seed}'}")
    folder = out / f"{variant}-s{seed}"
    command = [sys.executable, "-m", "labo", "train", recipe, f"method={name}", f"seed={seed}"]
    command += [f"method.{item}" for item in hyper] + settings + ["--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean and standard deviation on the test split, and time per step against base."""

    def pace(runs: list[dict[str, Any]]) -> float:
        return statistics.median(r["seconds"] / r["steps"] for r in runs)

    lines = [
        "| method | accuracy % | NLL | ECE % | time |",
        "|---|---|---|---|---|",
    ]
    reference = pace(results["base"])
    for variant, runs in results.items():
        cells = [f"`{variant}`"]
        for score in SCORES:
            values = [r["test"][score] * (1 if score == "nll" else 100) for r in runs]
            digits = 3 if score == "nll" else 2
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}")
        cells.append(f"{pace(runs) / reference:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("variants", nargs="*", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    out = options.out or Path("runs") / f"{options.recipe}-methods"
    variants = ["base", *(variant for variant in options.variants if variant != "base")]
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for seed in range(options.seeds):
        for variant in variants:
            results[variant].append(run(options.recipe, variant, seed, options.set, out))
            print(f"seed {seed}: {variant} done", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
