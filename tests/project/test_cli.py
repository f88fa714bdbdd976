"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command

from command import labo
from labo import cli
from labo._version import __version__
from labo.cli import _status_and_message, app
from labo.lab.config import RecipeError
from labo.lab.methods import METHODS, methods_for
from labo.lab.tasks import TASKS


def test_help_loads_nothing_heavy():
    script = "import sys; from labo.cli import main\n"
    script += "try: main(['--help'])\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("train", "evaluate", "methods"))
    assert not {"accelerate", "pydantic", "yaml", "sklearn"} & set(done.stderr.split())


def test_methods_of_a_task_are_listed_with_its_defaults(capsys):
    listed = {}
    for task in TASKS:
        status, listed[task], _ = labo(capsys, "methods", "--task", task)
        assert status == 0
        names = {line.split()[0] for line in listed[task].splitlines()[1:] if line[1] != " "}
        assert names == set(methods_for(task))
    assert set().union(*map(methods_for, TASKS)) == set(METHODS)
    assert "threshold=null" in listed["translation"]  # as in a recipe
    assert "warmup_steps=0" in listed["image_classification"]
    assert "warmup_steps=5000" in listed["translation"]


def test_version_and_groups(capsys):
    assert labo(capsys, "--version") == (0, f"labo {__version__}\n", "")
    groups = re.findall(r"─ (\w[\w ]*) ─", labo(capsys, "--help").out)
    assert groups == ["Options", "Data", "Training", "Comparison", "Use of a trained model"]


@pytest.mark.parametrize("name", get_command(app).commands)
def test_help_is_in_whole_sentences(name):
    command = get_command(app).commands[name]
    assert command.help.splitlines()[0].endswith((".", ","))
    context = command.make_context(name, [], resilient_parsing=True)
    for parameter in command.get_params(context):
        name, sentence = parameter.name, parameter.help
        assert "[" not in sentence, f"{name}: Rich takes [...] for markup and drops it"
        assert sentence[0].isupper() or sentence.startswith(("demo", "table1")), name
        assert sentence.endswith("."), name
        assert len(sentence.split()) > 1, name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "digit"], r"^labo: unknown recipe 'digit'; did you mean 'digits'\?"),
        (["evaluate", "nowhere"], "^labo: nowhere is no run with recipe.yaml"),
        (["methods", "--task", "translate"], "^labo: --task: unknown task 'translate'; did you "),
        (["trian"], "'trian'"),
        (["--bogus"], r"No such option: --bogus \(labo --help\)"),
        (["train"], r"(?i)missing argument 'recipe' \(labo train --help\)"),
        (
            ["train", "digits", "--epochs", "3"],
            "--epochs.*; .* written train.epochs=VALUE, without",
        ),
        (["train", "digits", "--speed", "3"], "--speed.*; .* written KEY=VALUE, without dashes"),
        (["prepare-text", "out"], r"Missing option '--train' \(labo prepare-text --help\)"),
        (["prepare", "out", "--train", "a", "b"], r"\(b\); two files .* --train SOURCE,TARGET, "),
        (["prepare", "out", "--holdout", "x"], "'--holdout': .* integer"),
        (["prepare", "out", "--max-tokens=-1"], "^labo: --max-tokens: .* equal to 0, got -1$"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = labo(capsys, *arguments)
    (line,) = ended.err.splitlines()
    assert re.search(said, line)
    assert (ended.status, ended.out) == (2, "")
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback():
    for arguments in (["train", "digit", "--debug"], ["--debug", "train", "digit"]):
        with pytest.raises(RecipeError):
            cli.main(arguments)


def test_what_is_not_installed_is_named():
    error = ModuleNotFoundError("No module named 'babel'", name="babel")
    status, line = _status_and_message(error)
    assert status == 2
    assert line == "babel is not installed: pip install 'torch-labo[lab]'"


def test_the_default_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "digits", "method=CS_KD", "seed=3", "train.max_steps=2"])
    assert (tmp_path / "runs" / "digits-cs-kd-s3" / "results.json").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/data/x"), "/data/x: No space left on device"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_an_error_of_the_disk_is_one_line(error, line, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert labo(capsys, "report") == (1, "", f"labo: {line}\n")
