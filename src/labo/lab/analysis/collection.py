"""A folder with many runs, such as that of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import RequestError
from ..run import files
from ..run.lock import LOCK
from .reading import read_run

_MARK = ".labo"


def runs_in(paths: Iterable[str | Path], left_out: dict[Path, str]) -> list[Path]:
    """Run directories, with a folder that has runs in it replaced by those that are scored.

    Of a grid these are the runs of the selected points. ``left_out`` gets the other runs in such
    folders, and why they are left out.
    """
    runs: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.rglob("recipe.yaml"))
        if path in inside or not (inside or (path / _MARK).is_file()):
            runs.append(path)
            continue
        scored = [run for run in inside if (run / "records" / "test.jsonl").is_file()]
        if not scored:
            raise RequestError(f"{path}: no run in it is scored yet (it has {len(inside)} runs)")
        runs += scored
        for run in inside:
            if run not in scored:
                state = read_run(run).state
                finished = "not scored on the test split: labo evaluate RUN does it"
                left_out[run] = finished if state.kind == "finished" else str(state)
    return runs


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than runs of labo.

    It may be missing or empty, be one of :func:`claim_folder`, or hold run directories only.
    """
    if not folder.exists() or (folder / _MARK).is_file():
        return
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder: choose another --out")
    own = (LOCK, files.temporary(folder / _MARK).name)  # another process may just claim it
    foreign = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name not in own and not (path / "recipe.yaml").is_file()
    ]
    if foreign:
        raise RequestError(
            f"{folder} holds something else ({foreign[0]}): choose an --out that is new, empty or "
            "made by labo"
        )


def claim_folder(folder: Path) -> None:
    """Mark a folder as one that labo may write to."""
    if not (folder / _MARK).exists():
        text = "Runs of labo compare, reproduce or demo. labo may replace files in this folder.\n"
        files.write_text(folder / _MARK, text)
