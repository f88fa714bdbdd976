"""The run directory: the only interface between the stages.

::

    recipe.yaml      the resolved recipe, and what it was made with
    metrics.jsonl    one line per logged step or evaluation
    checkpoints/     what resuming needs; the newest two
    best/            the selected model: model.safetensors, config.json and what belongs to them
    results.json     the scores, once finished
    records/         per-example records written by ``labo evaluate``
    tensorboard/     the metrics again, for TensorBoard
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ... import __version__
from ..config import PROVENANCE, Recipe, differing_keys, read_document
from ..errors import LabError, RequestError
from . import files as atomic

if TYPE_CHECKING:  # the report reads runs too, and needs no tensors
    from torch import Tensor


class RunDirectory:
    """The files of one run. Only the main process may call what writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.results_file = self.path / "results.json"
        self.records = self.path / "records"

    # ------------------------------------------------------------------ the life of a run

    def check(self, recipe: Recipe) -> None:
        """Refuse a directory that holds something else than a run of this recipe."""
        if not self.path.exists():
            return
        if not self.recipe_file.is_file():
            # A start that was killed leaves at most this.
            if self.path.is_dir() and not {*self.path.iterdir()} - {
                atomic.temporary(self.recipe_file)
            }:
                return
            raise RequestError(
                f"{self.path} is there, but is no run directory: choose another --out"
            )
        keys = differing_keys(recipe.as_document(), read_document(self.recipe_file))
        if keys:
            raise RequestError(
                f"{self.path} holds a run of another recipe (it differs in {', '.join(keys)}): "
                "choose another --out"
            )

    def start(self, recipe: Recipe) -> None:
        """Make the directory, with the recipe in it; a run that is there already stays."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.recipe_file.exists():
                document = recipe.as_document() | {PROVENANCE: made_with()}
                atomic.write_text(self.recipe_file, yaml.safe_dump(document, sort_keys=False))
            self.checkpoints.mkdir(exist_ok=True)
            self.best.mkdir(exist_ok=True)
        except OSError as error:
            raise LabError(f"cannot make {self.path}: {error.strerror}") from error

    def begun_with(self) -> dict[str, str | None]:
        """The versions at the start of the run."""
        document = yaml.safe_load(self.recipe_file.read_text(encoding="utf-8"))
        made: dict[str, str | None] = document.get(PROVENANCE, {})
        return made

    def changes_since_start(self) -> str:
        """What the run was begun with that is different now; empty if nothing is."""
        begun, now = self.begun_with(), made_with()
        return ", ".join(f"{key} {begun[key]}" for key in begun if begun[key] != now.get(key))

    @property
    def finished(self) -> bool:
        return self.results_file.exists()

    def finish(self, results: Mapping[str, Any]) -> None:
        atomic.write_json(self.results_file, results)

    def complete(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Add to the results the scores of splits they lack; what they have stays."""
        results = self.results()
        if scores.keys() - results.keys():
            self.finish({**results, **scores, **results})

    def signature(self, recipe: Recipe, *, data: str, steps: int, processes: int) -> str:
        """What the scores depend on, in one line. Two equal experiments have equal signatures."""
        begun = self.begun_with()
        parts = {
            "labo": begun.get("labo"),
            "git": begun.get("git"),
            "torch": begun.get("torch"),
            "task": recipe.task,
            "data": data,
            "method": ",".join(f"{key}={value}" for key, value in recipe.method.items()),
            "seed": recipe.seed,
            "steps": steps,
            "processes": processes,
            "recipe": recipe.digest(),
        }
        return "|".join(f"{name}:{value}" for name, value in parts.items())

    # ------------------------------------------------------------------ reading

    def document(self) -> dict[str, Any]:
        """The content of ``recipe.yaml``."""
        self.must_have(self.recipe_file)
        return read_document(self.recipe_file)

    def results(self) -> dict[str, Any]:
        return self._read_json(self.results_file)

    def facts(self) -> dict[str, Any]:
        """What ``best/config.json`` says of the selected model."""
        config = self._read_json(self.best / "config.json")
        facts: dict[str, Any] = config.get("labo", config)
        return facts

    def _read_json(self, path: Path) -> dict[str, Any]:
        self.must_have(path)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{path} is no JSON: {error}") from error
        return content

    def must_have(self, path: Path) -> None:
        if not path.is_file():
            raise RequestError(f"{self.path} is no run with {path.relative_to(self.path)}")

    # ------------------------------------------------------------------ writing

    def select(self, weights: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
        """Put a model into ``best``."""
        for name, text in texts.items():
            (self.best / name).parent.mkdir(exist_ok=True)
            atomic.write_text(self.best / name, text)
        atomic.write_tensors(self.best / "model.safetensors", weights)

    def log(self, line: Mapping[str, Any]) -> None:
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise LabError(f"cannot write {self.metrics_file}: {error.strerror}") from error

    def forget_after(self, step: int) -> None:
        """Drop the metrics that a resumed run will write again."""
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] > step:
                    break
            except ValueError:
                break  # the line that was being written when the run was killed
            kept.append(line + "\n")
        atomic.write_text(self.metrics_file, "".join(kept))


def made_with() -> dict[str, str | None]:
    """Versions, and the commit of a checkout."""
    import torch

    return {
        "labo": __version__,
        "git": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _commit() -> str | None:
    """The commit of the checkout this package lies in, with -dirty if it was changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
