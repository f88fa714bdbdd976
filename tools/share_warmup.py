"""Starts a LABO run at the end of its warm-up, from the run with label smoothing of the same seed.

    python tools/share_warmup.py LS_RUN LABO_RUN multi30k data.path=data/multi30k seed=1
    labo train multi30k data.path=data/multi30k seed=1 --out LABO_RUN

Until step T_w - 1 a LABO run is one with label smoothing, bit for bit, so a study with both need
not compute these steps twice. The first command copies the newest checkpoint of LS_RUN that is not
past T_w - 1, the second continues from it. A finished run keeps only its last two checkpoints: copy
LS_RUN while it is at T_w. The recipes may differ in their method only.
"""

from __future__ import annotations

import argparse
import json
import shutil

import torch

from labo.lab.config import differing_keys
from labo.lab.errors import RequestError
from labo.lab.recipes import load_recipe, recipe_of
from labo.lab.run.checkpoint import Checkpoint, Checkpoints
from labo.lab.run.directory import RunDirectory
from labo.lab.train import Trainer


def share(source: RunDirectory, target: RunDirectory, name: str, keys: list[str]) -> int:
    """Make ``target`` a LABO run that has done the warm-up; the step it is at."""
    recipe, earlier = load_recipe(name, keys), recipe_of(source)
    differing = differing_keys(recipe.as_document(), earlier.as_document())
    if other := [key for key in differing if not key.startswith("method.")]:
        raise RequestError(f"the recipes differ in {', '.join(other)}")
    warmup = {"name": "ls", "alpha": recipe.method.get("warmup_alpha"), "convention": "torch"}
    if recipe.method["name"] != "labo" or earlier.method != warmup:
        raise RequestError(f"wanted labo after {warmup}, got {recipe.method} and {earlier.method}")
    if target.path.exists():
        raise RequestError(f"{target.path} exists: choose another folder")
    checkpoint = _newest(source, earlier.digest(), before=recipe.method["warmup_steps"])
    step = checkpoint.counters.step

    trainer = Trainer(recipe, target)
    groups = checkpoint.groups(trainer.state.like())
    groups["loss"] = {"_extra_state": torch.tensor([step])}  # Warmup counts the steps
    trainer.state.load(checkpoint.counters, groups)
    target.start(recipe, trainer.task.fingerprint)
    trainer.checkpoints.save(trainer.state)
    shutil.copytree(source.best, target.best, dirs_exist_ok=True)
    lines = source.metrics_file.read_text().splitlines(keepends=True)
    early = [line for line in lines if json.loads(line)["step"] <= step]
    target.metrics_file.write_text("".join(early))
    return step


def _newest(run: RunDirectory, recipe: str, before: int) -> Checkpoint:
    for checkpoint in Checkpoints(run.checkpoints, recipe).usable(print):
        if checkpoint.counters.step < before:
            return checkpoint
    raise RequestError(f"{run.path} has no checkpoint before step {before}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ls_run")
    parser.add_argument("labo_run")
    parser.add_argument("recipe")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    try:
        step = share(RunDirectory(args.ls_run), RunDirectory(args.labo_run), args.recipe, args.keys)
    except RequestError as error:
        parser.error(str(error))
    print(f"{args.labo_run} is at step {step}; continue it with labo train ... --out")


if __name__ == "__main__":
    main()
