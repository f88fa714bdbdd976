"""The command line. Commands import what they need, so that ``labo --help`` is fast."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from .lab.tables import Table


_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # Typer has its own click, or another


_DEBUG = "--debug"  # before or after the name of a command
_INTERRUPTED = 130  # exit status

# Groups of commands in the help, in this order.
_DATA, _TRAINING, _COMPARISON, _USE = _GROUPS = (
    "Data",
    "Training",
    "Comparison",
    "Use of a trained model",
)


class _Commands(TyperGroup):
    """The commands, listed by their groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _GROUPS.index(self.commands[name].rich_help_panel))  # type: ignore[attr-defined]


def _usage(error: Any) -> str:
    """What is wrong with the arguments of a command, and what would be right if it is known."""
    message = str(error.format_message()).rstrip(".").replace("Value error, ", "")
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    command = error.ctx.info_name
    if option and command in ("train", "compare", "reproduce"):
        from .lab.recipes import keys_named

        known = keys_named(option)
        keys = " or ".join(f"{key}=VALUE" for key in known) or "KEY=VALUE"
        return f"{message}; recipe keys are written {keys}, without dashes"
    if "extra argument" in message and command in ("prepare", "prepare-text"):
        two = "two files are written --train SOURCE,TARGET, " if command == "prepare" else ""
        message += f"; {two}several inputs are written --train A --train B"
    return f"{message} ({error.ctx.command_path} --help)"


# Commands that continue where they were stopped, and the word for their runs.
_RESUMABLE = {
    "train": "run",
    "compare": "runs",
    "reproduce": "runs",
    "demo": "runs",
    "teacher": "folder",
}
app = typer.Typer(
    name="labo",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from ._version import __version__

        print(f"labo {__version__}")
        raise typer.Exit


@app.callback()
def _labo(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the traceback of an error, of any command.")
    ] = False,
) -> None:
    """Label regularization: train, compare and analyze."""


RecipeName = Annotated[str, typer.Argument(help="Recipe file, or the name of a built-in recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Recipe keys to change, such as train.epochs=10."
    ),
]
AcceptData = Annotated[
    bool, typer.Option("--accept-data", help="Continue although the data of a run have changed.")
]


def _known_splits(value: Any) -> Any:
    """Refuse other splits than valid and test, of one option or of one that is repeated."""
    for name in [value] if isinstance(value, str) else value or ():
        if name not in ("valid", "test"):
            from .lab.errors import RequestError

            raise RequestError(f"--split {name}: must be valid or test")
    return value


def _splits(about: str) -> Any:
    return typer.Option(help=f"{about}: valid or test.", callback=_known_splits)


def _verify(value: bool) -> bool:
    if value:
        os.environ["LABO_VERIFY"] = "1"  # for the processes that a command starts, too
    return value


def _trust_code(value: bool) -> bool:
    if value:
        from .lab.custom import trust_code

        trust_code()
    return value


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust_code,
        help="Import and run functions that a run or model folder names.",
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", callback=_verify, help="Read all data again to compare their checksums."
    ),
]


class _ModelCommand(TyperCommand):
    """A command whose further options are the fields of models, which are imported when needed.

    The context of the command has the model, filled in, as ``obj``, or a list of several; or, if it
    is not complete, a dict of the values that are given.
    """

    names_of_models: ClassVar[tuple[str, ...]]  # module:class
    complete: ClassVar[bool]

    @cached_property
    def _options(self) -> list[tuple[Any, list[Any]]]:
        """Each model with its options."""
        from importlib import import_module

        from .lab.command_options import command_options

        homes = [name.split(":") for name in self.names_of_models]
        models = [getattr(import_module(f"labo.lab.{module}"), name) for module, name in homes]
        return [(model, command_options(model)) for model in models]

    def get_params(self, ctx: Any) -> list[Any]:
        first, *others = super().get_params(ctx)
        return [first, *(option for _, options in self._options for option in options), *others]

    def invoke(self, ctx: Any) -> Any:
        from .lab.command_options import validated

        found = []
        for model, options in self._options:
            values = {option.name: ctx.params.pop(option.name) for option in options}
            given = {name: value for name, value in values.items() if value not in (None, (), [])}
            found.append(validated(model, given) if self.complete else given)
        ctx.obj = found if len(found) > 1 else found[0]
        return super().invoke(ctx)


def _options_of(*models: str, complete: bool = True) -> type[_ModelCommand]:
    """The class of a command with the options of models, each given as module:class."""
    return type("_Command", (_ModelCommand,), {"names_of_models": models, "complete": complete})


@app.command(rich_help_panel=_TRAINING)
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. Default: runs/RECIPE-METHOD-sSEED.")
    ] = None,
    no_test: Annotated[
        bool, typer.Option("--no-test", help="Do not score the test split at the end.")
    ] = False,
    accept_data: AcceptData = False,
    verify: Verify = False,
    trust_code: TrustCode = False,
) -> None:
    """Train a model. The same command continues a run that was stopped."""
    from .lab.recipes import load_recipe
    from .lab.train import train as run_training

    checked = load_recipe(recipe, overrides or ())
    name = f"{Path(recipe).stem}-{checked.method['name']}-s{checked.seed}"
    out = out or Path("runs") / name
    finished = (out / "results.json").exists()
    results = run_training(checked, out, test=not no_test, accept_data=accept_data)
    if _is_main_process():
        print(f"{out} {'was already finished' if finished else 'is finished'}")
        _print_scores({name: results[name] for name in ("valid", "test") if name in results})
        _print_signatures(results)


@app.command(cls=_options_of("translation.options:OtherTestSet"), rich_help_panel=_TRAINING)
def evaluate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the task, such as beams=1,5,20."),
    ] = None,
    split: Annotated[list[str] | None, _splits("Split to score, both by default")] = None,
    accept_data: AcceptData = False,
    verify: Verify = False,
    trust_code: TrustCode = False,
) -> None:
    """Score the selected model of a run, and write one record per example.

    With --source and --reference, score its translations of another test set. Nothing is written.
    """
    files = {name: value for name, value in context.obj if value is not None}
    if files:
        _evaluate_files(run, files, others=bool(options or split))
        return
    from .lab.analysis.task import read_options
    from .lab.evaluate import evaluate_run
    from .lab.recipes import recipe_of
    from .lab.run.directory import RunDirectory

    settings = read_options("evaluate", options or (), [recipe_of(RunDirectory(run)).task])
    scores = evaluate_run(run, split or ("valid", "test"), settings, accept_data=accept_data)
    if _is_main_process():
        _print_scores(scores)
        _print_signatures(RunDirectory(run).results() if RunDirectory(run).finished else {})


def _evaluate_files(run: Path, files: Mapping[str, str], *, others: bool) -> None:
    from .lab.errors import RequestError

    if others:
        raise RequestError("--source takes neither --split nor KEY=VALUE")
    if not {"source", "reference"} <= files.keys():
        raise RequestError("another test set needs both --source and --reference")
    from .lab.translation.score import evaluate_files

    scores, signatures = evaluate_files(run, **files)
    _print_scores({Path(files["source"]).name: scores})
    _print_signatures({"sacrebleu": signatures})


@app.command(rich_help_panel=_TRAINING)
def average(
    run: Annotated[
        Path, typer.Argument(help="Run trained with train.keep_best or train.keep_last.")
    ],
    best: Annotated[
        int | None, typer.Option(min=1, help="Average this many of the best models.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Average this many of the last models.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Model folder to write. Default: RUN/average.")
    ] = None,
    split: Annotated[list[str] | None, _splits("Split to score, valid by default")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Average the models that a run kept, and score the average.

    Without --best or --last, all kept models are averaged.
    """
    from .lab.errors import RequestError

    if best is not None and last is not None:
        raise RequestError("--best and --last exclude each other")
    from .lab.average import average_models

    averaged = average_models(run, best=best, last=last, out=out, splits=split or ("valid",))
    if _is_main_process():
        _print_scores(averaged.scores)
        steps = ", ".join(map(str, averaged.steps))
        print(f"the average of steps {steps} is in {averaged.folder}")


@app.command(rich_help_panel=_TRAINING)
def calibrate(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    fold: Annotated[
        bool, typer.Option("--fold", help="Divide the logits of the saved model for good.")
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Fit a temperature to the model of a run on validation, and store it with the model."""
    from .lab.calibrate import calibrate_run

    fitted = calibrate_run(run, fold=fold)
    if _is_main_process():
        print(
            f"T = {fitted.temperature:.4f}, fitted on {fitted.targets} targets of {fitted.split}: "
            f"NLL {fitted.nll_before:.4f} -> {fitted.nll_after:.4f}"
        )
        if fold:
            print(f"{run / 'best'} has it folded in; scores and records are of the model before")


@app.command(
    cls=_options_of("compare.setup:Request", "compare.setup:Setup"), rich_help_panel=_COMPARISON
)
def compare(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/compare-RECIPE.")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print a shell line for each missing run, teachers first, and stop."
        ),
    ] = False,
    accept_data: AcceptData = False,
    verify: Verify = False,
    trust_code: TrustCode = False,
) -> None:
    """Train several methods with several seeds, and print a table.

    Finished runs are reused, interrupted runs are continued, missing runs are started.
    """
    from .lab.compare import execute
    from .lab.compare.plan import plan as plan_runs

    out = out or Path("runs") / f"compare-{Path(recipe).stem}"
    request, setup = context.obj
    setup.check()
    comparison = plan_runs(recipe, out=out, overrides=overrides or (), **dict(request))
    if plan:
        for line in execute.missing_commands(comparison, setup, accept_data=accept_data):
            print(line)
        return
    table, failures = execute.run_comparison(comparison, setup, accept_data=accept_data)
    written = ", ".join(str(out / f"table.{kind}") for kind in ("md", "tex", "csv", "json"))
    further = [
        f"written: {written}",
        "next:",
        f"labo analyze {shlex.quote(str(out))}",
        f"labo report {shlex.quote(str(out))} -o {shlex.quote(str(out / 'report.html'))}",
    ]
    _conclude("\n".join([_shown(table), *further]), failures)


@app.command(rich_help_panel=_COMPARISON)
def analyze(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [KEY=VALUE]...",
            help="Run directories or the folder of a comparison, and options of the task, such as "
            "part_size=2400.",
        ),
    ],
    split: Annotated[str, _splits("Split to compare")] = "test",
) -> None:
    """Analyze and compare runs that `labo evaluate` has scored. Writes RUN/analysis.json."""
    from .lab.analysis import run as analysis
    from .lab.analysis.collection import runs_in
    from .lab.analysis.printing import as_text
    from .lab.errors import printable

    options = [text for text in runs if "=" in text and not Path(text).exists()]
    missing: dict[Path, str] = {}
    paths = [str(path) for path in runs_in((r for r in runs if r not in options), missing)]
    settings = analysis.read_settings(paths, options)
    documents, left_out = analysis.write_analyses(paths, **settings)
    left_out += [f"left out: {path}: {reason}" for path, reason in missing.items()]
    comparison = analysis.analyze_runs(paths, split, **settings)
    print(printable(as_text(documents, comparison, left_out)), end="")


@app.command(rich_help_panel=_COMPARISON)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, or the folder of a comparison."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the figures: each as PDF, as SVG, and its data as CSV.",
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs: tables, figures, sentences and a label explorer."""
    from .lab.analysis.collection import runs_in
    from .lab.errors import printable
    from .lab.report import write_report

    left_out: dict[Path, str] = {}
    paths = runs_in(runs, left_out)
    for listing in write_report(paths, out, left_out, figures):
        if listing.state.kind != "finished":
            print(printable(f"{listing.path} is {listing.state}"))
    for path, reason in left_out.items():
        print(printable(f"{path} is left out: {reason}"))
    print(f"{out} is written")
    if figures is not None:
        print(f"{figures} has the figures")


@app.command(cls=_options_of("compare.setup:Setup"), rich_help_panel=_COMPARISON)
def reproduce(
    context: typer.Context,
    exhibit: Annotated[
        str, typer.Argument(help="table1, table2, table3, table4, figure1, figure2 or imagenet.")
    ],
    overrides: Overrides = None,
    scale: Annotated[
        str,
        typer.Option(
            help="demo (built-in data, minutes), small (the paper's data, few epochs) or paper "
            "(the full experiment)."
        ),
    ] = "demo",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder with one subfolder per data set, or NAME=FOLDER for one data set. "
            "Can be repeated."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs per method. Default: as in the paper, or fewer.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Make the exhibit of finished runs instead: a run directory, or a folder of a "
            "comparison. Can be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/reproduce-SCALE.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and the data they need, and stop.")
    ] = False,
) -> None:
    """Reproduce a table or figure of the paper, next to the published numbers."""
    from .lab.errors import RequestError
    from .lab.reproduce import command

    setup = context.obj
    setup.check()
    if runs:
        if overrides or data or seeds is not None:
            raise RequestError("--runs: these are finished; KEY=VALUE, --data, --seeds are for new")
        _conclude("\n".join(map(_shown, command.of_runs(exhibit, runs, out))), ())
        return
    plan = command.plan(exhibit, scale, data or (), overrides=overrides or (), seeds=seeds, out=out)
    if dry_run:
        print(command.describe(plan))
        return
    command.require(plan)
    tables, failures = command.reproduce(plan, setup)
    _conclude("\n".join(map(_shown, tables)), failures)


@app.command(cls=_options_of("compare.setup:Setup"), rich_help_panel=_TRAINING)
def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train base, LS and LABO on built-in images and phrases, and write a report."""
    from .lab.demo import demo as run_demo

    _conclude(*run_demo(out, context.obj))


PreparedOut = Annotated[Path, typer.Argument(help="Folder to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing folder.")]


@app.command(
    cls=_options_of("translation.options:PrepareOptions", complete=False), rich_help_panel=_DATA
)
def prepare(
    context: typer.Context,
    out: PreparedOut,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with a section for each language pair that lists its inputs under "
            "train, valid and test, instead of --pair, --train, --valid and --test.",
            rich_help_panel="Files",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Options of a public recipe: iwslt14, iwslt17, wmt14 or multi30k. Options given "
            "on the command line take precedence.",
            rich_help_panel="Files",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that clean text. Default: one per core for large files."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Prepare parallel text for training: clean it, learn subwords or take some, write token ids.

    With --tokenizer, the subwords are those of a pre-trained model.
    """
    from .lab.errors import RequestError
    from .lab.text.folder import check_apart
    from .lab.translation.options import choose, read_inputs
    from .lab.translation.prepare import prepare as prepare_text
    from .lab.translation.prepare import summarize

    given = context.obj
    if inputs is not None:
        if both := [name for name in ("pair", "train", "valid", "test") if name in given]:
            raise RequestError(f"--inputs and --{both[0]} exclude each other")
        check_apart(out, [inputs])
        given |= read_inputs(inputs)
    options = choose(preset, given)
    prepared = prepare_text(options, out, workers=workers, force=force)
    summarize(prepared, options.tokenizer, preset)


@app.command(cls=_options_of("language_modeling.options:DocumentOptions"), rich_help_panel=_DATA)
def prepare_text(context: typer.Context, out: PreparedOut, force: Force = False) -> None:
    """Prepare text for language modelling: learn a tokenizer, or take one, and write token ids.

    Rows of a table with the columns prompt and completion, or with chat messages, become examples
    for supervised fine-tuning: only the completion, or what the assistant says, is learned.
    """
    from .lab.language_modeling.prepare import prepare as prepare_documents
    from .lab.language_modeling.prepare import summarize

    summarize(prepare_documents(context.obj, out, force=force), context.obj.tokenizer)


@app.command(cls=_options_of("language_modeling.options:GenerateOptions"), rich_help_panel=_USE)
def generate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run of language modelling, or its model folder.")],
) -> None:
    """Continue prompts: reads stdin, writes one line for each line."""
    from .lab.language_modeling.generate import generate_stream

    generate_stream(run, sys.stdin.buffer, sys.stdout.buffer, **dict(context.obj))


@app.command(cls=_options_of("text.options:ScoreOptions"), rich_help_panel=_USE)
def score(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(help="A run of language modelling or translation, or its model folder."),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="What to score. Translation: SOURCE and TARGET, text files with as many lines. "
            "Language modelling: as for prepare-text, text files, tables, folders; without any, "
            "each line of stdin is a text.",
        ),
    ] = None,
) -> None:
    """Write the log-probability of given text, a line of JSON for each document or line."""
    from .lab.errors import RequestError
    from .lab.tasks import task_of_model

    task = task_of_model(run)
    if task == "translation":
        from .lab.translation.score import score_command
    elif task == "language_modeling":
        from .lab.language_modeling.score import score_command
    else:
        raise RequestError(f"{run} holds a model for {task}, which scores no text")
    score_command(run, files or (), context.obj, sys.stdin.buffer, sys.stdout.buffer)


@app.command(rich_help_panel=_USE)
def predict(
    run: Annotated[
        Path, typer.Argument(help="A run of image classification, or its model folder.")
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...", help="Images, and folders, of which all images are taken."
        ),
    ] = None,
    files_from: Annotated[
        str | None,
        typer.Option(help="File with one image or folder per line; - reads them from stdin."),
    ] = None,
    form: Annotated[
        Literal["csv", "jsonl"], typer.Option("--format", help="Output format.")
    ] = "csv",
    top: Annotated[int, typer.Option(min=1, help="Number of classes for each image.")] = 5,
    trust_code: TrustCode = False,
) -> None:
    """Write the most probable classes of images, a line for each file."""
    from .lab.errors import LabError, RequestError
    from .lab.images import predict as prediction
    from .lab.run.progress import notice

    names = [*(files or ()), *([] if files_from is None else prediction.read_list(files_from))]
    if not names:
        raise RequestError("no images: give files or folders, or --files-from")
    images = list(prediction.find_files(names))
    predictor = prediction.Predictor(run)
    if not predictor.calibrated:
        notice(f"{run} has no fitted temperature (labo calibrate): probabilities are as trained")
    problems: list[str] = []
    predictions = predictor.predict(images, top=top, problems=problems)
    prediction.write_predictions(predictions, sys.stdout, form)
    if problems:
        raise LabError("\n".join(problems))


@app.command(cls=_options_of("text.options:TeacherOptions"), rich_help_panel=_DATA)
def teacher(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL DATA",
            help="Run directory or Hugging Face folder with the model, and the folder made by "
            "prepare-text or prepare. With --from the latter alone.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    served: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Answers of a server (vLLM, SGLang, OpenAI), a line of JSON for each training "
            "document, in place of the model.",
        ),
    ] = None,
    force: Force = False,
    verify: Verify = False,
) -> None:
    """Store the most probable tokens of a model for training with method=topk-kd.

    The model is a language model, or a translation model for data of `labo prepare`.

    The same command continues work that was stopped.
    """
    from .lab.errors import RequestError
    from .lab.text.teacher import store

    if len(paths) != (1 if served else 2):
        wanted = "the prepared folder" if served else "the model and the prepared folder"
        raise RequestError(f"give {wanted}, got {len(paths)} paths")
    model = None if served else paths[0]
    stored = store(model, paths[-1], out, served=served, force=force, **dict(context.obj))
    print(
        f"{out}: {stored['targets']:,} targets, {stored['bytes'] / 1e6:,.1f} MB, "
        f"{stored['bytes'] / max(1, stored['targets']):.0f} bytes per target, "
        f"{stored['seconds']:.0f} s"
    )


@app.command(cls=_options_of("translation.options:TranslateOptions"), rich_help_panel=_USE)
def translate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run directory or model folder.")],
) -> None:
    """Translate standard input to standard output, line by line."""
    from .lab.translation.translate import translate_stream

    translate_stream(run, sys.stdin.buffer, sys.stdout.buffer, **dict(context.obj))


# Task -> the format that its models are exported to.
_EXPORTS = {"translation": "ctranslate2", "image_classification": "onnx"}


@app.command(rich_help_panel=_USE)
def export(
    run: Annotated[Path, typer.Argument(help="Run directory or model folder.")],
    out: Annotated[Path, typer.Option(help="Folder (ctranslate2) or file (onnx) to write.")],
    to: Annotated[
        Literal["ctranslate2", "onnx"] | None,
        typer.Option(help="Translation: ctranslate2, images: onnx. Default: by task."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights for ctranslate2, such as int8 or float16. Default: as "
            "trained."
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Export a model to CTranslate2 or ONNX, and print the code that loads it."""
    from .lab.errors import RequestError
    from .lab.tasks import task_of_model

    task = task_of_model(run)
    if task not in _EXPORTS:
        raise RequestError(f"{run} holds a model for {task}, which has no export")
    if to not in (None, _EXPORTS[task]):
        raise RequestError(f"--to {to}: a model for {task} is exported to {_EXPORTS[task]}")
    if task == "translation":
        from .lab.translation.export import export as export_translation

        print(export_translation(run, out, quantization))
        return
    if quantization is not None:
        raise RequestError("--quantization: only for ctranslate2")
    from .lab.images.export import export as export_classifier

    print(export_classifier(run, out))


@app.command(rich_help_panel=_COMPARISON)
def methods(
    task: Annotated[
        str | None,
        typer.Option(help="Task whose methods and defaults are listed. Default: the first task."),
    ] = None,
) -> None:
    """List the methods of a task, with their hyper-parameters, defaults and papers."""
    from rich.console import Console
    from rich.table import Table

    from ._names import unknown_name
    from .lab.errors import RequestError
    from .lab.methods import METHODS, hyper_parameters, methods_for
    from .lab.tasks import TASKS

    task = next(iter(TASKS)) if task is None else task
    if task not in TASKS:
        raise RequestError(f"--task: {unknown_name('task', task, TASKS)}")

    table = Table("method", "what it does", box=None)
    table.add_column("hyper-parameters", overflow="fold")
    table.add_column("reference")
    for name in methods_for(task):
        method, fields = METHODS[name], hyper_parameters(name, task).model_fields
        hyper = [
            f"{key}={'...' if field.is_required() else _as_yaml(field.default)}"
            for key, field in fields.items()
        ]
        table.add_row(name, method.summary, " ".join(hyper), method.reference)
    Console().print(table)


def _as_yaml(value: Any) -> str:
    """A value as it is written in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)


def _shown(table: Table) -> str:
    """A table fitted to the terminal, or Markdown if it is piped."""
    from .lab.tables import to_markdown, to_terminal

    if not sys.stdout.isatty():
        return to_markdown(table)
    return to_terminal(table, shutil.get_terminal_size().columns)


def _conclude(text: str, failures: Sequence[object]) -> None:
    """Print the result of several runs. If some failed, raise an error with one line for each."""
    from .lab.errors import LabError, printable

    print(printable(text))
    if failures:
        raise LabError("\n".join(f"failed: {failure}" for failure in failures))


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from .lab.errors import printable

    table = Table("", *map(printable, scores), box=None)
    for name in next(iter(scores.values())):
        table.add_row(printable(name), *(f"{values[name]:.4f}" for values in scores.values()))
    Console().print(table)


def _print_signatures(results: Mapping[str, Any]) -> None:
    """The signature of the run and those of sacreBLEU: no score is printed without them."""
    from .lab.errors import printable

    if "signature" in results:
        print(printable(f"signature: {results['signature']}"))
    for name, signature in results.get("sacrebleu", {}).items():
        print(printable(f"{name}: {signature}"))


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exit status: 0 success, 1 failure, 2 wrong request, 130 Ctrl-C."""
    from .lab.run.interrupt import terminated_as_interrupted
    from .lab.run.launched import end_with_engine

    arguments = sys.argv[1:] if arguments is None else arguments
    end_with_engine()
    given = [argument for argument in arguments if argument != _DEBUG] or ["--help"]
    try:
        with terminated_as_interrupted():
            status = app(given, prog_name="labo", standalone_mode=False)
    except BaseException as error:
        # A Rust library (tokenizers) raises its panics as no Exception.
        panicked = type(error).__name__ == "PanicException"
        if _DEBUG in arguments or not (isinstance(error, Exception) or panicked):
            raise
        from .lab.errors import printable

        status, message = _status_and_message(error)
        if _is_main_process() or status == 1:
            for line in printable(message).splitlines():
                print(f"labo: {line}", file=sys.stderr)
    if status == _INTERRUPTED and _is_main_process():  # Typer prints nothing of it
        noun = _RESUMABLE.get(given[0])
        hint = f"; the same command continues the {noun}" if noun else ""
        print(f"labo: interrupted{hint}", file=sys.stderr)
    sys.exit(status or 0)


def _status_and_message(error: BaseException) -> tuple[int, str]:
    """Exit status and message for an error."""
    from .lab.errors import LabError

    if isinstance(error, LabError):
        return error.status, str(error)
    if isinstance(error, _UsageError):
        return 2, _usage(error)
    if isinstance(error, ModuleNotFoundError):
        return 2, f"{error.name} is not installed: pip install 'torch-labo[lab]'"
    if isinstance(error, OSError) and error.strerror:  # a full or read-only disk
        where = (
            f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        )
        return 1, f"{where}{error.strerror}"
    first_line = str(error).partition("\n")[0]
    return 1, f"{type(error).__name__}: {first_line} (--debug shows the traceback)"
