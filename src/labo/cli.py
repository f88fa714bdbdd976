"""The command line. Heavy imports stand inside the commands, so that ``labo --help`` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="labo",
    help="Label regularization: train, compare and analyse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a name such as digits.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in method=ls seed=1.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. [default: runs/RECIPE-METHOD-sSEED]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model; the same command again continues a run that was stopped."""
    from .lab import config
    from .lab import train as trainer

    plan = config.load_recipe(recipe, overrides or ())
    stem = Path(recipe).stem
    out = out or Path("runs") / f"{stem}-{plan.method['name']}-s{plan.seed}"
    finished = (out / "results.json").exists()
    results = trainer.train(plan, out)
    if _is_main_process():
        print(f"{out} {'was finished before' if finished else 'is finished'}")
        _print_scores({split: results[split] for split in ("valid", "test")})


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    split: Annotated[
        list[str] | None, typer.Option(help="valid or test; both if not given.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Score the selected model of a run and write one record per example."""
    from .lab.errors import RequestError
    from .lab.evaluate import evaluate_run

    for name in split or ():
        if name not in ("valid", "test"):
            raise RequestError(f"--split {name}: there are valid and test")
    scores = evaluate_run(run, split or ("valid", "test"))
    if _is_main_process():
        _print_scores(scores)


@app.command()
def methods(debug: Debug = False) -> None:
    """List the methods, their hyper-parameters and where they come from."""
    from rich.console import Console
    from rich.table import Table

    from .lab.methods import IMAGES, METHODS

    table = Table("method", "what it does", box=None)
    table.add_column("hyper-parameters", overflow="fold")
    table.add_column("reference")
    for name, method in METHODS.items():
        fields = method.hyper_parameters(IMAGES).model_fields
        hyper = (f"{key}={'...' if f.is_required() else f.default}" for key, f in fields.items())
        table.add_row(name, method.summary, " ".join(hyper), method.reference)
    Console().print(table)


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(next(iter(scores.values())))
    table = Table("split", *names, box=None)
    for split, values in scores.items():
        table.add_row(split, *(f"{values[name]:.4f}" for name in names))
    Console().print(table)


def main(arguments: list[str] | None = None) -> Any:
    """Run a command: status 0 done, 1 the work failed, 2 the request was wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return app(arguments)
    except Exception as error:
        if "--debug" in arguments:
            raise
        status, message = _verdict(error)
        if _is_main_process() or status == 1:
            for line in message.splitlines():
                print(f"labo: {line}", file=sys.stderr)
        sys.exit(status)
    except KeyboardInterrupt:
        if _is_main_process():
            print("labo: interrupted; the same command continues a run", file=sys.stderr)
        sys.exit(1)


def _verdict(error: Exception) -> tuple[int, str]:
    """Exit status and line for an error."""
    from .lab.data import DataError
    from .lab.errors import LabError

    if isinstance(error, LabError):
        return error.status, str(error)
    if isinstance(error, DataError):
        return 2, str(error)
    first_line = str(error).partition("\n")[0]
    return 1, f"{type(error).__name__}: {first_line} (--debug shows where)"
