"""Text of other people does not command the terminal; files and pipes get it as it is."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from command import labo
from labo.cli import _print_scores, _print_signatures
from labo.lab.errors import printable
from labo.lab.images.predict import Prediction, write_predictions
from labo.lab.run.progress import Display, ProgressBars
from labo.lab.text.stdio import answer_lines
from labo.lab.translation.options import Processing
from labo.lab.translation.prepare import prepare_pairs, summarize
from labo.lab.translation.prepared import Pair

CLEAR = "\x1b[2Jgone"
SAFE = "\\x1b[2Jgone"


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_lines_and_tabs_stay():
    assert printable(f"1\t{CLEAR}\x9b\r\nend") == f"1\t{SAFE}\\x9b\\x0d\nend"


@pytest.mark.parametrize(("kind", "expected"), [(io.BytesIO, CLEAR), (Terminal, SAFE)])
def test_what_a_model_writes_is_escaped_on_a_terminal_alone(kind, expected):
    target = kind()
    answer_lines(io.BytesIO(b"a\n"), target, lambda lines, *_: [f"1\t{CLEAR}"])
    assert target.getvalue() == f"1\t{expected}\n".encode()


def test_predictions_as_json_are_json_in_a_file():
    file = io.StringIO()
    write_predictions([Prediction("a.png", ("\x9b2J",), (1.0,))], file, "jsonl")
    assert json.loads(file.getvalue())["class"] == "\x9b2J"
    file = io.StringIO()
    file.isatty = lambda: True
    write_predictions([Prediction("a.png", ("\x9b2J",), (1.0,))], file, "jsonl")
    assert "\x9b" not in file.getvalue()


def test_progress_and_scores_are_escaped(capsys):
    output = io.StringIO()
    with Display(1, silent=False, console=Console(file=output)) as display:
        display.say(CLEAR)
    assert output.getvalue() == f"{SAFE}\n"
    with ProgressBars() as bars, bars.bar(CLEAR, 1):
        assert bars.progress.tasks[-1].description == SAFE
    _print_scores({CLEAR: {CLEAR: 1.0}})
    _print_signatures({"signature": CLEAR, "sacrebleu": {CLEAR: CLEAR}})
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.count(SAFE) == 5


def test_sentences_and_notes_of_prepared_text_are_escaped(tmp_path, capsys):
    pairs = {name: [(0, f"{name} {CLEAR}", f"{name} two")] * 2 for name in ("train", "valid")}
    splits = pairs | {"test": [(0, "test", "[red]two[/red]")]}
    data = prepare_pairs(
        tmp_path / "out",
        [Pair("de", "en")],
        splits,
        Processing(vocabulary=300),
        notes=[f"{CLEAR}.txt looks odd"],
    )
    summarize(data)
    said = capsys.readouterr().out
    assert f"German: valid {SAFE}\nEnglish: valid two\n" in said
    assert f"note: {SAFE}.txt looks odd" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("command", ["predict", "score", "generate", "translate", "export"])
def test_a_run_killed_before_its_first_model_is_called_unfinished(tmp_path, capsys, command):
    (tmp_path / "recipe.yaml").write_text("task: image_classification\n")
    more = {"predict": [__file__], "export": ["--out", str(tmp_path / "x")]}.get(command, [])
    ended = labo(capsys, command, tmp_path, *more)
    assert ended.status == 2
    assert ended.err == (
        f"labo: {tmp_path} is unfinished: the command that started it continues it (it has no "
        "best/config.json yet)\n"
    )
