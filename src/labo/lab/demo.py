"""``labo demo``: train base, label smoothing and LABO on digits and on phrases, and report.

Both data sets come with the installed packages; nothing is downloaded. Finished runs are not run
again, so the same command continues a demo that was stopped.
"""

from __future__ import annotations

from pathlib import Path

from .compare.engines import Setup
from .compare.execute import carry_out
from .compare.launch import Failure
from .compare.plan import Comparison, plan
from .compare.table import tabulate
from .report import write_report
from .tables import to_markdown, write_table

METHODS = ("base", "ls", "labo")
# Recipe -> seeds and overrides. The longest runs are started first, so that all cores end together.
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "cldr": (1, ("train.epochs=2",)),
    "digits": (2, ()),
}


def comparisons(out: Path) -> list[Comparison]:
    """The runs of the demo."""
    return [
        plan(name, METHODS, seeds, out / name, overrides=overrides)
        for name, (seeds, overrides) in PARTS.items()
    ]


def demo(out: Path, jobs: int | None = None) -> tuple[str, list[Failure]]:
    """Run the demo.

    Args:
        out: the folder of the runs, the tables and ``report.html``.
        jobs: how many runs at once.

    Returns:
        What to print (the tables, the path of the report, what to try next), and the runs that
        failed.
    """
    planned = comparisons(out)
    failures = carry_out(planned, out, Setup(jobs=jobs))
    texts = []
    for comparison in reversed(planned):
        table = tabulate(comparison)
        write_table(table, out / comparison.name)
        texts.append(to_markdown(table))
    report = out / "report.html"
    write_report([run.path for comparison in planned for run in comparison.selected()], report)
    texts.append(
        f"The report, with all figures: {report}\n"
        "Next: labo compare digits --methods base,ls,kd,labo --seeds 5 --grid labo.tau=1.05,1.25"
    )
    return "\n".join(texts), failures
