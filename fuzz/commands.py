"""Every command on runs, prepared data and models with a wrong value in one of their files.

Each key of each JSON and YAML file is removed, or given a value of another type, and checksums are
made to fit: files that a person or another program has touched. A command may succeed or end with a
line that says what is wrong. A line with the name of a Python exception is a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from labo import cli
from labo.lab.run import files as atomic
from labo.lab.run.checksums import MANIFEST, write_manifest

from .readers import make_model, make_prepared, reseal, seal_prepared

_WRONG: tuple[Any, ...] = (None, "x", -1, 10**30, 1.5, [], {}, [None], {"x": None}, True, "\ud800")
_TINY = ["train.epochs=1", "train.batch_size=300", "train.log_every=2"]
_TEXT = ["train.epochs=null", "train.max_steps=1", "train.batch_tokens=128", "decode.beam=1"]
_TEXT += ["model.preset=tiny", "model.width=8", "model.ffn=8", "model.heads=2"]
_TEXT += ["model.encoder_layers=1", "model.decoder_layers=1", "data.languages=[]"]
_TEXT += ["decode.max_ratio=0", "decode.max_extra=2", "data.name=prepared"]


@dataclass(frozen=True)
class Subject:
    """Something on disk, and the commands that read it.

    Attributes:
        make: makes it in an empty folder.
        files: those to damage, relative to the folder; patterns.
        commands: arguments of ``labo``, with {folder} for the folder.
        seal: makes checksums fit again.
    """

    make: Callable[[Path], None]
    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    seal: Callable[[Path], None] = lambda folder: None


def _finished(folder: Path) -> None:
    _succeed("train", "digits", *_TINY, "--out", str(folder / "run"))
    _succeed("evaluate", str(folder / "run"))
    # As if it had been killed a moment before its end.
    shutil.copytree(folder / "run", folder / "stopped")
    (folder / "stopped" / "results.json").unlink()


def _seal_runs(folder: Path) -> None:
    for best in folder.glob("*/best"):
        names = [path.name for path in best.iterdir() if path.name != MANIFEST]
        write_manifest(best, {name: [atomic.sha256(best / name)] for name in names})
    for path in folder.glob("*/checkpoints/*/manifest.json"):
        reseal(path)
    for path in folder.glob("*/results.json"):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            path.write_text(json.dumps(atomic.sealed(json.loads(path.read_text()))))


def _comparison(folder: Path) -> None:
    for name in ("base-s0", "ls-s0"):
        method = name.partition("-")[0]
        settings = [*_TINY, f"method={method}"]
        _succeed("train", "digits", *settings, "--no-test", "--out", str(folder / "out" / name))
        _succeed("evaluate", str(folder / "out" / name))
    conditions = [{"machine": "m", "torch": "2", "jobs": 1, "threads": 1}]
    document = {"base-s0": conditions, "ls-s0": conditions}
    (folder / "out" / "conditions.json").write_text(json.dumps(document))
    (folder / "out" / ".labo").touch()


def _text_data(folder: Path) -> None:
    make_prepared(folder)


def _translator(folder: Path) -> None:
    (folder / "model").mkdir()
    make_model(folder / "model")


SUBJECTS: dict[str, Subject] = {
    "commands: run": Subject(
        _finished,
        (
            "run/recipe.yaml",
            "run/results.json",
            "run/best/config.json",
            "run/best/manifest.json",
            "stopped/checkpoints/*/state.json",
            "stopped/checkpoints/*/manifest.json",
            "stopped/recipe.yaml",
        ),
        (
            ("train", "digits", *_TINY, "--out", "{folder}/run"),
            ("train", "digits", *_TINY, "--out", "{folder}/stopped"),
            ("evaluate", "{folder}/run", "--split", "valid"),
            (
                *("train", "digits", *_TINY, "method=kd", "method.teacher={folder}/run"),
                *("train.epochs=null", "train.max_steps=1", "--out", "{folder}/student"),
            ),
        ),
        _seal_runs,
    ),
    "commands: comparison": Subject(
        _comparison,
        ("out/base-s0/results.json", "out/conditions.json", "out/ls-s0/recipe.yaml"),
        (
            (
                *("compare", "digits", *_TINY, "--methods", "base,ls", "--seeds", "1"),
                *("--jobs", "1", "--out", "{folder}/out"),
            ),
        ),
        _seal_runs,
    ),
    "commands: prepared data": Subject(
        _text_data,
        ("data/prepared.json", "data/frequencies.json", "data/tokenizer/tokenizer_config.json"),
        (
            ("train", "cldr", *_TEXT, "data.path={folder}/data", "--out", "{folder}/run"),
            (
                *("train", "cldr", *_TEXT, "data.path={folder}/data", "method=mls"),
                *("--out", "{folder}/masked"),
            ),
        ),
        seal_prepared,
    ),
    "commands: translation model": Subject(
        _translator,
        (
            "model/config.json",
            "model/tokenizer.json",
            "model/tokenizer_config.json",
            "model/generation_config.json",
        ),
        (
            ("translate", "{folder}/model"),
            ("export", "{folder}/model", "--out", "{folder}/exported"),
        ),
    ),
}


def _succeed(*arguments: str) -> None:
    status, said = labo(arguments)
    if status:
        raise RuntimeError(f"labo {' '.join(arguments)}: {said}")


def labo(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process: its status, and what it wrote to standard error."""
    from accelerate.state import AcceleratorState

    errors = io.StringIO()
    stdin = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"a b\n"))
    status = 0
    try:
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())),
        ):
            cli.main(list(arguments))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = stdin
        AcceleratorState._reset_state(True)
    return status, errors.getvalue()


def damaged(document: Any) -> Iterator[tuple[str, Any]]:
    """Every document with one value removed or replaced, and what was done."""
    for wrong in _WRONG:
        yield f"= {wrong!r}", wrong
    for path in _paths(document):
        for change in ("removed", *_WRONG):
            copy = json.loads(json.dumps(document))
            parent = copy
            for key in path[:-1]:
                parent = parent[key]
            if change == "removed":
                del parent[path[-1]]
            else:
                parent[path[-1]] = change
            yield f"{'.'.join(map(str, path))} {change!r}", copy


def _paths(document: Any, depth: int = 4) -> Iterator[tuple[Any, ...]]:
    """The way to every value; of a long list only to the first of its items."""
    if depth == 0:
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())[:60]
    elif isinstance(document, list):
        items = list(enumerate(document[:1]))
    for key, value in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(value, depth - 1))


def fuzz_commands(name: str, cases: int | None, folder: Path, seed: int = 0) -> list[str]:
    """Run the commands of a subject on damaged copies of it.

    Args:
        name: one of ``SUBJECTS``.
        cases: how many, chosen at random; all of them if None.
        folder: an empty folder to work in.
        seed: of the choice.

    Returns:
        One line for each failure.
    """
    subject = SUBJECTS[name]
    whole = folder / "whole"
    whole.mkdir()
    subject.make(whole)
    plans = []
    for pattern in subject.files:
        for path in sorted(whole.glob(pattern)):
            read = yaml.safe_load if path.suffix == ".yaml" else json.loads
            document = read(path.read_text(encoding="utf-8"))
            plans += [(path, what, changed) for what, changed in damaged(document)]
    if cases is not None and cases < len(plans):
        plans = Random(f"{name} {seed}").sample(plans, cases)
    failures = []
    work = folder / "work"
    for path, what, changed in plans:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        dump = yaml.safe_dump if path.suffix == ".yaml" else json.dumps
        target = work / path.relative_to(whole)
        target.write_text(dump(changed), encoding="utf-8", errors="surrogatepass")
        subject.seal(work)
        for command in subject.commands:
            arguments = [text.replace("{folder}", str(work)) for text in command]
            status, said = labo(arguments)
            if "(--debug shows the traceback)" in said or status not in (0, 1, 2):
                line = said.strip().splitlines()[-1] if said.strip() else f"status {status}"
                failures.append(f"{path.relative_to(whole)}: {what}: {command[0]}: {line}")
    return failures


__all__ = ["SUBJECTS", "fuzz_commands", "labo"]
