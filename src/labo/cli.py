"""The command line. Heavy imports stand inside the commands, so that ``labo --help`` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Ctrl-C ends a command with a line, where Typer would say nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if _is_main_process():
                what = _RESUMED.get(ctx.invoked_subcommand)
                hint = f"; the same command continues the {what}" if what else ""
                print(f"labo: interrupted{hint}", file=sys.stderr)
            raise


_RESUMED = {"train": "run", "compare": "runs", "reproduce": "runs", "demo": "runs"}
app = typer.Typer(
    name="labo",
    cls=_Commands,
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
    no_test: Annotated[
        bool, typer.Option("--no-test", help="Leave the test split for `labo evaluate`.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a model; the same command again continues a run that was stopped."""
    from .lab import recipes
    from .lab import train as trainer

    plan = recipes.load_recipe(recipe, overrides or ())
    stem = Path(recipe).stem
    out = out or Path("runs") / f"{stem}-{plan.method['name']}-s{plan.seed}"
    finished = (out / "results.json").exists()
    results = trainer.train(plan, out, test=not no_test)
    if _is_main_process():
        print(f"{out} {'was finished before' if finished else 'is finished'}")
        _print_scores({name: results[name] for name in ("valid", "test") if name in results})


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    split: Annotated[
        list[str] | None, typer.Option(help="valid or test; both if not given.")
    ] = None,
    beams: Annotated[
        str, typer.Option(help="Translation: beam sizes to compare output lengths at, as 1,5,20.")
    ] = "",
    debug: Debug = False,
) -> None:
    """Score the selected model of a run and write one record per example."""
    from .lab.errors import RequestError
    from .lab.evaluate import evaluate_run

    for name in split or ():
        if name not in ("valid", "test"):
            raise RequestError(f"--split {name}: there are valid and test")
    if not all(size.isdecimal() and int(size) for size in beams.split(",") if beams):
        raise RequestError(f"--beams {beams}: give whole numbers, as 1,5,20")
    sizes = [int(size) for size in beams.split(",") if beams]
    scores = evaluate_run(run, split or ("valid", "test"), sizes)
    if _is_main_process():
        _print_scores(scores)


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a name such as digits.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in train.epochs=10.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Rows of the table, as in base,ls,labo,labo:tau=1.05.")
    ] = "base,ls,labo",
    seeds: Annotated[int, typer.Option(help="Runs of each method: seeds 0, 1, ...")] = 3,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values to select from on the validation split, as in tau=1.15,1.25."),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Run that kd learns from. [default: base, same seed]")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once. [default: one per GPU, or per core]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. [default: runs/compare-RECIPE]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a recipe with several methods and seeds, and print the table; runs what is missing."""
    from .lab.compare.execute import compare as run_comparison
    from .lab.compare.plan import plan
    from .lab.tables import to_markdown

    comparison = plan(
        recipe,
        methods.split(","),
        seeds,
        out or Path("runs") / f"compare-{Path(recipe).stem}",
        overrides=overrides or (),
        grid=grid or (),
        teacher=None if teacher is None else str(teacher),
    )
    table, failures = run_comparison(comparison, jobs)
    _conclude(to_markdown(table), failures)


@app.command()
def analyze(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    split: Annotated[str, typer.Option(help="Whose records are compared: valid or test.")] = "test",
    part_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sentences of a part by frequency; the paper: 2400. [default: a third]"
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write RUN/analysis.json of evaluated runs, and compare them."""
    from .lab.analysis import run as analysis
    from .lab.analysis.printing import as_text
    from .lab.errors import RequestError

    if split not in ("valid", "test"):
        raise RequestError(f"--split {split}: there are valid and test")
    documents = [analysis.write_analysis(run, part_size=part_size) for run in runs]
    print(as_text(documents, analysis.analyze_runs(runs, split, part_size=part_size)), end="")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    debug: Debug = False,
) -> None:
    """Write one self-contained page about runs: tables, figures, sentences, a label explorer."""
    from .lab.report import write_report

    for listing in write_report(runs, out):
        if listing.state.kind != "finished":
            print(f"{listing.path} is {listing.state}")
    print(f"{out} is written")


@app.command()
def reproduce(
    exhibit: Annotated[
        str, typer.Argument(help="table1, table2, table3, table4, figure1, figure2 or imagenet.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in train.epochs=10.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="demo: built-in data, minutes. small: few epochs. paper: all of it.")
    ] = "demo",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Folder that holds the data sets by their names, or NAME=FOLDER."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each method. [default: the paper's, or fewer]")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once. [default: one per GPU, or per core]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. [default: runs/reproduce-SCALE]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and what they need; start none.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Make a table or figure of the paper again, ours beside the paper's."""
    from .lab.reproduce import command as reproducing
    from .lab.tables import to_markdown

    plan = reproducing.plan(
        exhibit, scale, data or (), overrides=overrides or (), seeds=seeds, out=out
    )
    if dry_run:
        print(reproducing.describe(plan))
    reproducing.require(plan)
    if not dry_run:
        table, failures = reproducing.reproduce(exhibit, plan, jobs)
        _conclude(to_markdown(table), failures)


@app.command()
def demo(
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once. [default: one per GPU, or per core]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path(
        "runs/demo"
    ),
    debug: Debug = False,
) -> None:
    """Train base, LS and LABO on built-in digits and phrases; minutes to a report."""
    from .lab import demo as showing

    _conclude(*showing.demo(out, jobs))


@app.command()
def prepare(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    pair: Annotated[list[str], typer.Option(help="Languages, as in de-en; several: repeat.")],
    train: Annotated[
        list[str],
        typer.Option(
            help="PREFIX for PREFIX.de and PREFIX.en (also .gz, .xml), SOURCE,TARGET, or one file "
            "with tabs; {pair}, {source} and {target} are filled in; several: repeat."
        ),
    ],
    valid: Annotated[list[str] | None, typer.Option(help="As --train.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="As --train.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="iwslt14, iwslt17, wmt14 or multi30k; other options go over.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Of files with tabs; source,target if not given.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Language named before each source: source, target or none.")
    ] = None,
    holdout: Annotated[int | None, typer.Option(help="Every N-th training pair: valid.")] = None,
    holdout_test: Annotated[int | None, typer.Option(help="Every N-th of the rest: test.")] = None,
    moses: Annotated[bool | None, typer.Option(help="Moses tokenization.")] = None,
    tokenized: Annotated[bool | None, typer.Option(help="The text is tokenized.")] = None,
    aggressive_hyphens: Annotated[bool | None, typer.Option(help="Moses splits at them.")] = None,
    normalize_punctuation: Annotated[bool | None, typer.Option(help="As Moses does.")] = None,
    remove_nonprinting: Annotated[bool | None, typer.Option(help="Control characters.")] = None,
    straight_apostrophes: Annotated[
        bool | None, typer.Option(help="Everywhere but in training text.")
    ] = None,
    lowercase: Annotated[bool | None, typer.Option()] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Words in training; 0: any.")] = None,
    max_ratio: Annotated[float | None, typer.Option(help="Of lengths in words.")] = None,
    max_pieces: Annotated[int | None, typer.Option(help="Subwords in training; 0: any.")] = None,
    max_piece_ratio: Annotated[float | None, typer.Option(help="Of lengths in subwords.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Types in all; 10000 if not given.")
    ] = None,
    merges: Annotated[int | None, typer.Option(help="Byte-pair merges, instead.")] = None,
    codes: Annotated[str | None, typer.Option(help="Merges of subword-nmt, instead.")] = None,
    share: Annotated[
        str | None, typer.Option(help="What the two sides share: all, merges or nothing.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that clean text.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    debug: Debug = False,
) -> None:
    """Prepare parallel text for training: clean it, learn subwords, write token ids."""
    from .lab.translation.options import choose
    from .lab.translation.prepare import prepare as prepare_text
    from .lab.translation.prepare import summarize

    options = choose(
        preset,
        text={
            "moses": moses,
            "tokenized": tokenized,
            "aggressive_hyphens": aggressive_hyphens,
            "normalize_punctuation": normalize_punctuation,
            "remove_nonprinting": remove_nonprinting,
            "straight_apostrophes": straight_apostrophes,
            "lowercase": lowercase,
        },
        settings={
            "pair": pair,
            "train": train,
            "valid": valid,
            "test": test,
            "columns": None if columns is None else columns.split(","),
            "tag": tag,
            "holdout": holdout,
            "holdout_test": holdout_test,
            "max_tokens": max_tokens,
            "max_ratio": max_ratio,
            "max_pieces": max_pieces,
            "max_piece_ratio": max_piece_ratio,
            "vocabulary": vocabulary,
            "merges": merges,
            "codes": codes,
            "share": share,
        },
    )
    summarize(prepare_text(options, out, workers=workers, force=force))


@app.command()
def prepare_text(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    train: Annotated[
        list[str],
        typer.Option(
            help="A text file, a table (.jsonl, .csv, .parquet, .arrow), a folder of such files, "
            "or a folder saved by datasets. Repeat for several."
        ),
    ],
    valid: Annotated[list[str] | None, typer.Option(help="The same, for validation.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="The same, for the test.")] = None,
    holdout: Annotated[
        int | None, typer.Option(help="Hold out every N-th training document for validation.")
    ] = None,
    holdout_test: Annotated[
        int | None, typer.Option(help="Hold out every N-th of the rest for the test.")
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(help="A document of a text file: file, paragraph or line. [default: file]"),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of a table that holds text. [default: text]")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Use the tokenizer of this Hugging Face folder.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Learn a vocabulary of this size. [default: 10000]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    debug: Debug = False,
) -> None:
    """Prepare text for language modelling: learn a tokenizer, or take one, and write token ids.

    Rows of a table with the columns prompt and completion, or with chat messages, become examples
    for supervised fine-tuning: only the completion, or what the assistant says, is learned.
    """
    from .lab.language_modeling.options import checked
    from .lab.language_modeling.prepare import prepare as prepare_documents
    from .lab.language_modeling.prepare import summarize

    options = checked(
        {
            "train": train,
            "valid": valid,
            "test": test,
            "holdout": holdout,
            "holdout_test": holdout_test,
            "documents": documents,
            "column": column,
            "tokenizer": tokenizer,
            "vocabulary": vocabulary,
        }
    )
    summarize(prepare_documents(options, out, force=force))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run of language modelling, or its model folder.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of a continuation. [default: 100, or half the positions]"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 takes the most probable token, 1 draws as the model says."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw only from the most probable tokens with this share of the mass."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the random numbers.")] = None,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Write JSON lines, with each token and its probability."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Continue prompts: reads stdin, writes one line for each line."""
    from .lab.language_modeling.generate import generate_stream

    generate_stream(
        run,
        sys.stdin.buffer,
        sys.stdout.buffer,
        scores=scores,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A run of language modelling, or its model folder.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="What to score, as for prepare-text: text files, tables, folders. Without any, "
            "each line of stdin is a text.",
        ),
    ] = None,
    documents: Annotated[
        str, typer.Option(help="A document of a text file: file, paragraph or line.")
    ] = "file",
    column: Annotated[str, typer.Option(help="Column of a table that holds text.")] = "text",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write each token and its log-probability.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the log-probability of given text, a line of JSON for each document."""
    from .lab.errors import RequestError
    from .lab.language_modeling import score as scoring

    if documents not in ("file", "paragraph", "line"):
        raise RequestError(f"--documents {documents}: choose file, paragraph or line")
    if not files:
        scoring.score_stream(run, sys.stdin.buffer, sys.stdout.buffer, tokens=tokens)
        return
    unit: Any = documents
    found = scoring.score_files(run, files, documents=unit, column=column)
    scoring.write_scores(found, sys.stdout.buffer, tokens=tokens)


@app.command()
def translate(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model folder.")],
    pair: Annotated[
        str | None, typer.Option(help="Of a run with several: de-en, or only de if that will do.")
    ] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="[default: as the recipe]")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(min=0, help="The larger, the longer. [default: as the recipe]")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a batch, padded, times the beam.")
    ] = None,
    nbest: Annotated[
        int | None, typer.Option(min=1, help="So many lines for each: NUMBER<tab>SCORE<tab>TEXT.")
    ] = None,
    scores: Annotated[
        bool,
        typer.Option(
            "--scores", help="JSON lines: line, text, score, tokens and their probabilities."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Translate stdin to stdout: raw text, one line for each line."""
    from .lab.translation.translate import translate_stream

    translate_stream(
        run,
        sys.stdin.buffer,
        sys.stdout.buffer,
        pair=pair,
        nbest=nbest,
        scores=scores,
        beam=beam,
        length_penalty=length_penalty,
        batch_tokens=batch_tokens,
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model folder.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="The format: ctranslate2.")] = "ctranslate2",
    quantization: Annotated[
        str | None, typer.Option(help="Such as int8 or float16. [default: as trained]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a translation model for CTranslate2, and print the lines that use it."""
    from .lab.errors import RequestError
    from .lab.translation.export import export as export_model

    if to != "ctranslate2":
        raise RequestError(f"--to {to}: there is ctranslate2")
    print(export_model(run, out, quantization))


@app.command()
def methods(
    task: Annotated[
        str, typer.Option(help="The task whose defaults are shown.")
    ] = "image_classification",
    debug: Debug = False,
) -> None:
    """List the methods of a task, their hyper-parameters with defaults, and their papers."""
    from rich.console import Console
    from rich.table import Table

    from ._checks import unknown_name
    from .lab.errors import RequestError
    from .lab.methods import METHODS, hyper_parameters, methods_for
    from .lab.tasks import TASKS

    if task not in TASKS:
        raise RequestError(f"--task: {unknown_name('task', task, TASKS)}")

    table = Table("method", "what it does", box=None)
    table.add_column("hyper-parameters", overflow="fold")
    table.add_column("reference")
    for name in methods_for(task):
        method, fields = METHODS[name], hyper_parameters(name, task).model_fields
        hyper = (f"{key}={'...' if f.is_required() else f.default}" for key, f in fields.items())
        table.add_row(name, method.summary, " ".join(hyper), method.reference)
    Console().print(table)


def _conclude(text: str, failures: Sequence[object]) -> None:
    """Print what many runs gave; if some of them failed, fail with a line for each."""
    from .lab.errors import LabError

    print(text)
    if failures:
        raise LabError("\n".join(f"failed: {failure}" for failure in failures))


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *scores, box=None)
    for name in next(iter(scores.values())):
        table.add_row(name, *(f"{values[name]:.4f}" for values in scores.values()))
    Console().print(table)


def main(arguments: list[str] | None = None) -> Any:
    """Run a command: status 0 done, 1 the work failed, 2 the request was wrong, 130 Ctrl-C."""
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


def _verdict(error: Exception) -> tuple[int, str]:
    """Exit status and line for an error."""
    from .lab.errors import DataError, LabError

    if isinstance(error, LabError):
        return error.status, str(error)
    if isinstance(error, DataError):
        return 2, str(error)
    if isinstance(error, ModuleNotFoundError):
        return 2, f"{error.name} is not installed: pip install 'torch-labo[lab]'"
    first_line = str(error).partition("\n")[0]
    return 1, f"{type(error).__name__}: {first_line} (--debug shows where)"
