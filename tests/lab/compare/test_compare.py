"""Comparisons: which runs are made, which are selected, and the arithmetic of the table."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lab_runs
from command import labo
from labo import cli
from labo.lab.analysis.collection import claim_folder, runs_in
from labo.lab.compare import execute, setup
from labo.lab.compare.execute import carry_out, run_comparison
from labo.lab.compare.launch import Launch
from labo.lab.compare.plan import Comparison, PlannedRun, plan
from labo.lab.compare.setup import Setup
from labo.lab.compare.table import tabulate
from labo.lab.errors import RequestError
from labo.lab.run import distributed
from labo.lab.run.lock import held
from labo.lab.tables import to_markdown
from launched import Launcher

TINY = ("train.max_steps=8", "train.log_every=1")


@pytest.fixture
def launcher(monkeypatch):
    return Launcher.install(monkeypatch)


def tiny(out: Path, methods: list[str], seeds: int = 1, **options: Any) -> Comparison:
    overrides = (*TINY, *options.pop("overrides", ()))
    return plan("digits", methods, seeds, out, overrides=overrides, **options)


def heed_interrupts() -> None:
    """A test that runs in the background of a shell was told to ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finish(comparison: Comparison, results: dict[str, dict[str, Any]]) -> None:
    """Pretend that runs, given by their folders, have ended with these results."""
    for run in comparison.runs:
        if run.path.name in results:
            run.directory.start(run.recipe)
            run.directory.finish({"steps": 10, "seconds": 5.0, **results[run.path.name]})


def note_conditions(run: PlannedRun, jobs: int, machine: str = "here") -> None:
    """Pretend that a run was one of so many at once on a machine."""
    launch = {"machine": machine, "torch": "2", "jobs": jobs, "threads": 1}
    (run.path / "conditions.json").write_text(json.dumps({"launches": [launch]}))


# ------------------------------------------------------------------ the runs


def test_only_what_is_missing_is_run(tmp_path, launcher, capsys):
    first = tiny(tmp_path, ["base", "ls"])
    assert carry_out([first], tmp_path, Setup(jobs=2)) == []
    assert launcher.commands() == [
        *("train base-s0", "train ls-s0", "evaluate base-s0", "evaluate ls-s0")
    ]
    assert "base-s0: valid accuracy" in capsys.readouterr().out
    launcher.started.clear()
    more = tiny(tmp_path, ["base", "ls", "labo"])
    assert carry_out([more], tmp_path, Setup(jobs=2)) == []
    assert launcher.commands() == ["train labo-s0", "evaluate labo-s0"]
    launcher.started.clear()
    table, failures = run_comparison(more)
    assert (launcher.started, failures) == ([], [])
    assert to_markdown(table) == (tmp_path / "table.md").read_text()
    assert {"table.md", "table.tex", "table.csv", "table.json"} <= set(os.listdir(tmp_path))


def test_a_killed_run_is_shown_and_then_continued(tmp_path, launcher):
    comparison = tiny(tmp_path, ["base", "ls"], overrides=["train.save_every=2"])
    launcher.kill["ls-s0"] = ("step", 5)
    (failure,) = carry_out([comparison], tmp_path, Setup(jobs=1))
    assert str(failure) == "ls-s0: ended by signal 9"
    assert "test" in comparison.runs[0].directory.results()
    launcher.kill.clear()
    assert carry_out([comparison], tmp_path, Setup(jobs=1)) == []
    log = (tmp_path / "logs" / "ls-s0.log").read_text()
    assert "continuing" in log
    assert "at step 4" in log


def test_a_failing_run_does_not_stop_the_others(tmp_path, launcher, capsys):
    arguments = ["digits", "train.max_steps=3", "--methods", "kd,base,ls", "--seeds", "1"]
    arguments += ["--grid", "optim.lr=1e30,0.05", "--jobs", "1", "--out", tmp_path]
    said = labo(capsys, "compare", *arguments)
    assert said.status == 1
    failed = sorted(said.err.splitlines())
    assert len(failed) == 3
    assert failed[0].startswith("labo: failed: base-optim.lr1e30-s0: stopped")
    assert failed[1].startswith("labo: failed: kd-optim.lr1e30-s0: not started, for it needs base")
    assert failed[2].startswith("labo: failed: ls-optim.lr1e30-s0: stopped")
    for method in ("base", "kd", "ls"):
        assert f"| {method} (optim.lr=0.05)" in said.out
        assert f"{method}: optim.lr=0.05 selected by validation accuracy" in said.out
    assert said.out.splitlines()[-2:] == [
        f"labo analyze {tmp_path}",
        f"labo report {tmp_path} -o {tmp_path / 'report.html'}",
    ]


def test_a_recipe_keeps_the_hyper_parameters_it_gives_to_its_own_method(tmp_path):
    recipe = tmp_path / "mine.yaml"
    source = (Path(cli.__file__).parent / "recipes" / "digits.yaml").read_text()
    recipe.write_text(source.replace("name: labo", "name: labo\n  warmup_steps: 7\n  tau: 1.5"))
    comparison = plan(str(recipe), ["labo", "labo:tau=2", "ls"], 1, tmp_path)
    found = [(run.recipe.method["name"], run.recipe.method.get("tau")) for run in comparison.runs]
    assert found == [("labo", 1.5), ("labo", 2), ("ls", None)]
    assert comparison.runs[0].recipe.method["warmup_steps"] == 7


def test_ctrl_c_ends_the_runs_and_leaves_what_they_need_to_go_on(tmp_path):
    settings = ["train.epochs=500", "train.log_every=1", "train.save_every=1"]
    command = [sys.executable, "-m", "labo", "compare", "digits", *settings]
    command += ["--methods", "base", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    parent = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    metrics = tmp_path / "base-s0" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert parent.poll() is None
        time.sleep(0.05)
    with pytest.raises(RequestError, match="is in use"), held(tmp_path):
        pass
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode != 0
    assert said.strip() == "labo: interrupted; the same command continues the runs"
    with held(tmp_path):  # by nobody: the child, which inherited the lock, is gone
        steps = len(metrics.read_text().splitlines())
    assert 3 < steps < 10_000
    assert not (tmp_path / "base-s0" / "results.json").exists()
    assert any((tmp_path / "base-s0" / "checkpoints").iterdir())


def test_a_terminal_shows_a_table_of_all_runs(tmp_path, monkeypatch):
    comparison = tiny(tmp_path, ["base", "ls", "labo"], seeds=2)
    finish(comparison, {"base-s0": {"valid": {"accuracy": 0.75}}})
    running = comparison.runs[1]
    running.directory.start(running.recipe)
    running.directory.log({"step": 5, "epoch": 1, "valid": {"accuracy": 0.5}})
    board = Launch(Setup(), 6, tmp_path)
    board.jobs = jobs = [execute._training(run, tmp_path, Setup()) for run in comparison.runs]
    board.finished = {job.name for job in jobs if job.finished()}
    board.running[jobs[1].name] = jobs[1]
    board.fail(jobs[2], "the loss is nan")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(board.board())
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines == [
        "seed 0 seed 1",
        "base valid accuracy 0.7500 in 5 s waiting",
        "ls epoch 1/30 0.5000 waiting",
        "labo failed waiting",
        "1 of 6 done, 1 failed",
    ]


# ------------------------------------------------------------------ selection


def test_hyper_parameters_are_selected_by_the_validation_split_alone(tmp_path):
    comparison = tiny(tmp_path, ["base", "labo"], seeds=2, grid=["tau=1.15,1.25"])
    scores = {"tau1.15": ((0.9, 0.1), (0.8, 0.1)), "tau1.25": ((0.7, 1.0), (0.95, 1.0))}
    finish(
        comparison,
        {
            f"labo-{point}-s{seed}": {"valid": {"accuracy": v}, "test": {"accuracy": t}}
            for point, pairs in scores.items()
            for seed, (v, t) in enumerate(pairs)
        },
    )
    choice = comparison.choices()["labo"]
    assert choice.point == "tau=1.15"
    assert choice.scores == {"tau=1.15": [0.9, 0.8], "tau=1.25": [0.7, 0.95]}
    assert [run.path.name for run in choice.runs] == ["labo-tau1.15-s0", "labo-tau1.15-s1"]


def test_a_point_with_a_failed_seed_is_not_preferred(tmp_path):
    comparison = tiny(tmp_path, ["labo"], seeds=2, grid=["tau=1.15,1.25,1.5"])
    whole = {f"labo-tau1.15-s{seed}": {"valid": {"accuracy": 0.5}} for seed in (0, 1)}
    finish(comparison, whole | {"labo-tau1.25-s0": {"valid": {"accuracy": 0.9}}})
    assert comparison.choices()["labo"].point == "tau=1.15"
    assert (
        "labo: tau=1.15 selected by validation accuracy "
        "(tau=1.15: 0.5000, tau=1.25: 0.9000 (1 of 2 runs), tau=1.5: no score)"
    ) in tabulate(comparison).notes


def test_a_grid_that_the_validation_split_cannot_tell_apart_says_so(tmp_path):
    """On digits most methods miss the same two validation images."""
    comparison = tiny(tmp_path, ["labo"], grid=["tau=1.15,1.25"])
    tied = {f"labo-tau{tau}-s0": accuracy(0.75) for tau in ("1.15", "1.25")}
    finish(comparison, tied)
    (note,) = (note for note in tabulate(comparison).notes if "selected by" in note)
    assert note.startswith("labo: tau=1.15 selected by validation accuracy")
    assert note.endswith("; tied with tau=1.25, the first is taken")


def test_the_test_split_of_unselected_runs_stays_untouched(tmp_path, launcher):
    comparison = tiny(tmp_path, ["labo"], grid=["labo.tau=1.15,1.25", "rho=0.5,1.0"])
    assert len(comparison.runs) == 4
    assert carry_out([comparison], tmp_path, Setup(jobs=2)) == []
    chosen = comparison.choices()["labo"].runs
    for run in comparison.runs:
        selected = run in chosen
        assert ("test" in run.directory.results()) == selected
        assert (run.path / "records" / "test.jsonl").exists() == selected
    assert len(launcher.commands()) == 5


def named(comparison: Comparison) -> list[str]:
    return [run.path.name for run in comparison.runs]


def score_by_tau(comparison: Comparison, best: float) -> None:
    """Pretend that the runs that are not finished have ended; those closest to ``best`` win."""
    for run in comparison.runs:
        if not run.directory.finished:
            tau = float({axis.key: value for axis, value in run.place}.get("tau", 1.0))
            finish(comparison, {run.path.name: accuracy(1 - abs(tau - best) / 10)})


def test_fewer_seeds_select_and_the_others_follow_at_the_selected_points(tmp_path):
    asked = {"seeds": 4, "grid": ["labo.tau=1.1,1.2,1.3"], "select_seeds": 2}
    comparison = tiny(tmp_path, ["base", "labo"], **asked)
    taus = ("1.1", "1.2", "1.3")
    grid = [f"labo-tau{tau}-s{seed}" for seed in (0, 1) for tau in taus]
    assert sorted(named(comparison)) == sorted(["base-s0", "base-s1", *grid])
    score_by_tau(comparison, best=1.2)
    assert comparison.grow()
    assert named(comparison)[8:] == ["base-s2", "labo-tau1.2-s2", "base-s3", "labo-tau1.2-s3"]
    assert not comparison.grow()
    # The seeds that do not select do not change the selection, whatever they score.
    worst = {"labo-tau1.2-s2": accuracy(0.01), "labo-tau1.2-s3": accuracy(0.01)}
    finish(comparison, worst | {"base-s2": accuracy(0.5), "base-s3": accuracy(0.5)})
    choice = comparison.choices()["labo"]
    assert (choice.point, len(choice.runs), choice.trials) == ("tau=1.2", 4, 3)
    table = tabulate(comparison)
    assert [row.cells["runs"].value for row in table.rows] == [4, 4]
    assert [row.cells["trials"].value for row in table.rows] == [1, 3]
    assert "trials" in [column.key for column in table.printed]
    assert table.caption == "digits: test split, mean ± standard deviation over 4 seeds"
    (note,) = (note for note in table.notes if "selected by" in note)
    assert note.endswith("tau=1.3: 0.9900); by 2 of 4 seeds")
    again = tiny(tmp_path, ["base", "labo"], **asked)  # the driver was started again
    assert again.grow()
    assert named(again) == named(comparison)


def test_the_seeds_of_a_comparison_may_begin_anywhere(tmp_path):
    asked = {"seeds": 3, "grid": ["labo.tau=1.1,1.2"], "select_seeds": 1, "first_seed": 100}
    comparison = tiny(tmp_path, ["labo"], **asked)
    assert named(comparison) == ["labo-tau1.1-s100", "labo-tau1.2-s100"]
    score_by_tau(comparison, best=1.2)
    assert comparison.grow()
    assert named(comparison)[2:] == ["labo-tau1.2-s101", "labo-tau1.2-s102"]
    assert [run.recipe.seed for run in comparison.runs] == [100, 100, 101, 102]
    with pytest.raises(RequestError, match="--first-seed: should be greater than or equal"):
        tiny(tmp_path, ["labo"], first_seed=-1)


def test_a_row_may_change_a_key_of_the_recipe(tmp_path):
    rows = ["base", "labo:tau=1.5:optim.lr=0.2"]
    comparison = tiny(tmp_path, rows, grid=["optim.lr=0.05,0.1"])
    assert named(comparison) == [
        "base-optim.lr0.05-s0",
        "base-optim.lr0.1-s0",
        "labo-tau1.5-optim.lr0.2-s0",  # the grid is not for a row that has its own value
    ]
    recipe = comparison.runs[-1].recipe
    assert (recipe.optim.lr, recipe.method["tau"]) == (0.2, 1.5)
    for wrong in ("method.tau=1.5", "seed=3"):
        with pytest.raises(RequestError, match="is not a setting of a row"):
            tiny(tmp_path, [f"labo:{wrong}"])
    with pytest.raises(RequestError, match=r"optim\.rate"):
        tiny(tmp_path, ["labo:optim.rate=0.2"])


def test_students_of_the_other_seeds_get_their_teachers(tmp_path):
    asked = {"seeds": 2, "grid": ["optim.lr=0.1,0.2"], "select_seeds": 1}
    comparison = tiny(tmp_path, ["kd", "base"], **asked)
    better = {"kd-optim.lr0.1-s0": 0.9, "kd-optim.lr0.2-s0": 0.1}
    better |= {"base-optim.lr0.1-s0": 0.1, "base-optim.lr0.2-s0": 0.9}
    finish(comparison, {name: accuracy(score) for name, score in better.items()})
    assert comparison.grow()
    added = named(comparison)[4:]
    assert added == ["kd-optim.lr0.1-s1", "base-optim.lr0.1-s1", "base-optim.lr0.2-s1"]
    assert comparison.runs[4].teacher == comparison.runs[5].path


def test_a_value_at_the_edge_of_its_grid_is_a_warning(tmp_path):
    comparison = tiny(tmp_path, ["base", "labo"], grid=["labo.tau=1.1,1.2,1.3"])
    score_by_tau(comparison, best=1.3)
    edge = "labo: tau=1.3 is at the edge of its grid (1.1 to 1.3): --extend tries more values"
    assert edge in tabulate(comparison).notes
    assert not comparison.grow()
    inside = tiny(tmp_path / "inside", ["base", "labo"], grid=["labo.tau=1.1,1.2,1.3"])
    score_by_tau(inside, best=1.2)
    assert not any("edge" in note for note in tabulate(inside).notes)


def test_a_grid_is_extended_until_the_selected_value_is_inside(tmp_path):
    asked = {"seeds": 2, "grid": ["labo.tau=1.1,1.2"], "select_seeds": 1, "extend": True}
    comparison = tiny(tmp_path, ["base", "labo"], **asked)
    rounds = [named(comparison)]
    while True:
        score_by_tau(comparison, best=1.4)
        if not comparison.grow():
            break
        rounds.append(named(comparison)[sum(map(len, rounds)) :])
    assert rounds == [
        ["base-s0", "labo-tau1.1-s0", "labo-tau1.2-s0"],
        ["labo-tau1.3-s0", "base-s1"],  # base has nothing to select
        ["labo-tau1.4-s0"],
        ["labo-tau1.5-s0"],
        ["labo-tau1.4-s1"],
    ]
    table = tabulate(comparison)
    assert [row.cells["trials"].value for row in table.rows] == [1, 5]
    assert not any("edge" in note for note in table.notes)
    assert any(note.startswith("labo: tau=1.4 selected by") for note in table.notes)


def test_an_extension_has_bounds(tmp_path):
    comparison = tiny(tmp_path / "a", ["labo"], grid=["tau=1.1,1.2"], extend=True)
    score_by_tau(comparison, best=99)
    while comparison.grow():
        score_by_tau(comparison, best=99)
    assert [run.point for run in comparison.runs][2:] == [
        f"tau={tau}" for tau in ("1.3", "1.4", "1.5", "1.6", "1.7")
    ]
    assert any("tau=1.7 is at the edge" in note for note in tabulate(comparison).notes)
    shares = tiny(tmp_path / "b", ["ls"], grid=["alpha=0.4,0.8"], extend=True)
    finish(shares, {"ls-alpha0.4-s0": accuracy(0.4), "ls-alpha0.8-s0": accuracy(0.8)})
    assert not shares.grow()  # 1.6 is no share
    (note,) = (note for note in tabulate(shares).notes if "edge" in note)
    assert "alpha=0.8 is at the edge of its grid (0.4 to 0.8): it cannot be extended" in note
    assert "method.alpha" in note


# ------------------------------------------------------------------ a plan for other launchers


def lines_of(capsys: Any, *arguments: object) -> list[str]:
    said = labo(capsys, "compare", "digits", *TINY, *arguments, "--plan")
    assert (said.status, said.err) == (0, "")
    return said.out.splitlines()


def test_a_plan_is_a_shell_line_for_each_missing_run_teachers_first(tmp_path, capsys, launcher):
    out = tmp_path / "my runs"
    asked = ["--methods", "kd,base", "--seeds", 2, "--out", out]
    lines = lines_of(capsys, *asked)
    assert [Path(shlex.split(line)[-1]).name for line in lines] == [
        *("base-s0", "kd-s0", "base-s1", "kd-s1")
    ]
    assert not out.exists()
    (first, *_) = lines_of(capsys, *asked, "--processes", 2)
    assert first.startswith("torchrun --standalone --nproc-per-node 2 -m labo train digits ")
    for number, line in enumerate(lines):
        command, *arguments = shlex.split(line)
        assert command == "labo"
        assert lab_runs.run(arguments, tmp_path / "log") == {0}
        assert lines_of(capsys, *asked) == lines[number + 1 :]
    comparison = tiny(out, ["kd", "base"], seeds=2)
    assert run_comparison(comparison)[1] == []
    assert {line.split()[0] for line in launcher.commands()} == {"evaluate"}


def test_a_plan_with_a_selection_goes_on_when_it_is_made(tmp_path, capsys):
    asked = ["--methods", "labo", "--grid", "tau=1.1,1.2", "--select-seeds", 1, "--seeds", 2]
    asked += ["--out", tmp_path]
    options = {"seeds": 2, "grid": ["tau=1.1,1.2"], "select_seeds": 1}
    comparison = tiny(tmp_path, ["labo"], **options)
    assert len(lines_of(capsys, *asked)) == 2
    finish(comparison, {"labo-tau1.1-s0": accuracy(0.9)})
    (line,) = lines_of(capsys, *asked)
    assert line.endswith("labo-tau1.2-s0")
    finish(comparison, {"labo-tau1.2-s0": accuracy(0.8)})
    (line,) = lines_of(capsys, *asked)
    assert line.endswith("labo-tau1.1-s1")
    assert comparison.grow()
    finish(comparison, {"labo-tau1.1-s1": accuracy(0.8)})
    assert lines_of(capsys, *asked) == []


# ------------------------------------------------------------------ the table


def accuracy(value: float, **more: Any) -> dict[str, Any]:
    return {"valid": {"accuracy": value}, "test": {"accuracy": value, "nll": 0.5}, **more}


def test_the_arithmetic_of_the_table(tmp_path):
    comparison = tiny(tmp_path, ["base", "ls", "labo"], seeds=3)
    scores = {"base": (0.5, 0.6, 0.7), "ls": (0.6, 0.6, 0.9), "labo": (0.7, 0.9, 0.8)}
    seconds = {"base": 5.0, "ls": 6.0, "labo": 10.0}
    memory = {"base": 100e6, "ls": 100e6, "labo": 130e6}
    finish(
        comparison,
        {
            f"{method}-s{seed}": accuracy(v, seconds=seconds[method], peak_memory=memory[method])
            for method, values in scores.items()
            for seed, v in enumerate(values)
        },
    )
    for run in comparison.runs:
        note_conditions(run, 2)
    table = tabulate(comparison)
    base, ls, labo = table.rows
    assert [row.label for row in table.rows] == ["base", "ls", "labo"]
    assert base.cells["accuracy"].value == pytest.approx(0.6)
    assert base.cells["accuracy"].spread == pytest.approx(0.1)
    assert labo.cells["delta_base"].value == pytest.approx(0.2)
    assert labo.cells["delta_ls"].value == pytest.approx(0.1)
    assert ls.cells["delta_base"].value == pytest.approx(0.1)
    assert labo.cells["p_base"].value == 0.25  # 2 of the 8 ways to sign 0.2, 0.3, 0.1
    assert labo.cells["p_ls"].value == 0.75  # 6 of 8 for 0.1, 0.3, -0.1
    assert "delta_base" not in base.cells
    assert labo.cells["time"].value == pytest.approx(2.0)
    assert labo.cells["memory"].value == pytest.approx(30e6)
    assert labo.cells["nll"].spread == 0
    assert any("at least 0.25 with 3 seeds" in note for note in table.notes)
    low, high = labo.cells["delta_base"].interval
    assert (low, high) == (
        pytest.approx(0.2 - 0.2484, abs=1e-4),
        pytest.approx(0.2 + 0.2484, abs=1e-4),
    )
    assert base.cells["delta_ls"].value == pytest.approx(-0.1)
    assert any("2 run(s) at once, 1 thread(s) each" in note for note in table.notes)
    assert any("other work on the machine distorts it" in note for note in table.notes)
    assert table.caption == "digits: test split, mean ± standard deviation over 3 seeds"


@pytest.mark.parametrize("other", ["jobs", "machine", "devices"])
def test_times_measured_elsewhere_or_under_other_conditions_are_not_compared(other, tmp_path):
    comparison = tiny(tmp_path, ["base", "ls", "labo"])
    results = {run.path.name: accuracy(0.5, devices=["one"]) for run in comparison.runs}
    if other == "devices":
        results["labo-s0"]["devices"] = ["one", "another"]
    finish(comparison, results)
    for run in comparison.runs:
        note_conditions(run, 2)
    if other != "devices":
        note_conditions(run, *((1,) if other == "jobs" else (2, "node1")))
    table = tabulate(comparison)
    assert [row.cells["time"].value for row in table.rows] == [1, 1, None]
    said = {"devices": "times of different devices are not compared: one; one and another"}
    note = said.get(other, "time: only runs made under the same conditions are compared")
    assert note in table.notes


def test_a_row_with_failed_runs_says_so(tmp_path):
    comparison = tiny(tmp_path, ["base", "labo"], seeds=2)
    assert [row.cells["runs"].value for row in tabulate(comparison).rows] == [0, 0]
    finish(comparison, {"base-s0": accuracy(0.5), "base-s1": accuracy(0.7), "labo-s1": accuracy(1)})
    table = tabulate(comparison)
    assert table.rows[1].cells["runs"].value == 1
    assert table.rows[1].cells["delta_base"].value == pytest.approx(0.3)  # over seed 1 alone
    assert "labo: 1 of 2 runs are finished" in table.notes


# ------------------------------------------------------------------ damaged files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ('{"valid": {"nll": 1.0}}', "valid.accuracy is missing"),
    ],
)
def test_a_damaged_run_is_named_and_left_out(tmp_path, content, reason):
    comparison = tiny(tmp_path, ["base", "labo"], seeds=2)
    finish(comparison, {run.path.name: accuracy(0.5 + 0.1 * run.seed) for run in comparison.runs})
    (tmp_path / "labo-s0" / "results.json").write_text(content)
    table = tabulate(comparison)
    assert [row.cells["runs"].value for row in table.rows] == [2, 1]
    assert table.rows[1].cells["delta_base"].value == 0  # over seed 1 alone
    (note,) = (note for note in table.notes if "left out" in note)
    assert note.startswith("labo-s0 is left out: ")
    assert reason in note


@pytest.mark.parametrize("content", ["", '{"launches": [{"jobs": "2"}]}'])
def test_damaged_conditions_are_named_and_nothing_else_is_lost(tmp_path, content):
    comparison = tiny(tmp_path, ["base", "labo"])
    finish(comparison, {run.path.name: accuracy(0.5) for run in comparison.runs})
    damaged = tmp_path / "base-s0" / "conditions.json"
    damaged.write_text(content)
    table = tabulate(comparison)
    assert table.rows[1].cells["accuracy"].value == 0.5
    assert table.rows[1].cells["time"].value is None
    assert any(note.startswith(f"times are not compared: {damaged}") for note in table.notes)
    damaged.unlink()
    assert tabulate(comparison).rows[1].cells["time"].value == 1.0


# ------------------------------------------------------------------ wrong requests

ON_RAY = ("digits", "--engine", "ray", "--address")
GRID = ("digits", "--grid", "labo.tau=1.1,1.2")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["digits", "--methods", "base,lsd"], "unknown method 'lsd'"),
        (["digits", "--methods", "base,base"], "base is given twice"),
        (["digits", "--methods", "labo:tau"], "write NAME:HYPER=VALUE"),
        (["digits", "--methods", "ls,kd"], "kd learns from another run: add base"),
        (["digits", "--methods", "kd", "--teacher", "nowhere"], "nowhere is no run"),
        (["digits", "--seeds", "0"], "--seeds: should be greater than or equal to 1, got 0"),
        (["digits", "--jobs", "0"], "--jobs: should be greater than or equal to 1, got 0"),
        (["digits", "--address", "auto"], "--address is that of a Ray cluster: add --engine ray"),
        (["digits", "--engine", "ray", "--jobs", "2"], "--jobs: Ray runs as many at once as"),
        ([*ON_RAY, "nowhere"], "--address nowhere: write HOST:PORT, as in node0:6379, or auto"),
        ([*ON_RAY, "127.0.0.1:1"], "--address 127.0.0.1:1: nobody answers .*ray start --head"),
        (["digits", "--select-seeds", "1"], "--select-seeds: there is nothing to select without"),
        ([*GRID, "--select-seeds", "4"], "--select-seeds 4: must be from 1 to --seeds 3"),
        (["digits", "--extend"], "--extend: there is nothing to extend without --grid"),
        (["digits", "--extend", "--grid", "tau=2"], "--extend: tau needs two values or more"),
        (["digits", "--grid", "optim.lr=0.1..1"], "write FIRST..LAST@NUMBER, as in optim.lr=0.01"),
        (["digits", "--grid", "optim.lr=0..1@3"], "need 0 < FIRST < LAST and 2 to 100 values"),
        (["digits", "--grid", "tau"], "--grid tau: write a key and its different values"),
        (["digits", "--grid", "gamma=1,2"], "no method of base, ls, labo has gamma"),
        (["digits", "--grid", "alpha=0.1,0.2"], "ls and labo have alpha; write labo.alpha"),
        (["digits", "--grid", "labo.tau=1.15,x"], "method.tau"),
        (["digits", "seed=3"], "chosen by --methods and --seeds"),
        (["digits", "method.tau=3"], "method.tau=3: .*--methods base,ls,labo:tau=3"),
        (["digits", "method.nu=3"], "no method of base, ls, labo has nu"),
        (["digits", "train.epoch=3"], "unknown key 'train.epoch'; did you mean 'train.epochs'?"),
        (["fashion-mnist", "data.root=nowhere"], "nowhere"),
    ],
)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    arguments, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    ended = labo(capsys, "compare", *arguments)
    assert ended.status == 2
    (said,) = ended.err.splitlines()
    assert line in said or re.search(line, said)
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_the_command_that_installs_ray_is_named(monkeypatch, capsys):
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    ended = labo(capsys, "compare", "digits", "--engine", "ray")
    assert ended == (2, "", "labo: --engine ray needs Ray: pip install 'torch-labo[ray]'\n")


def test_the_folder_of_a_comparison_stands_for_its_scored_runs(tmp_path):
    recipe = "task: image_classification\nmethod: {name: base}\n"
    for name in ("base-s0", "labo-s0", "labo-tau9-s0", "labo-tau8-s0"):
        (tmp_path / "out" / name / "records").mkdir(parents=True)
        (tmp_path / "out" / name / "recipe.yaml").write_text(recipe)
    (tmp_path / "out" / "labo-tau9-s0" / "results.json").write_text("{}")
    claim_folder(tmp_path / "out")
    with pytest.raises(RequestError, match=r"no run in it is scored yet \(it has 4 runs\)"):
        runs_in([tmp_path / "out"], {})
    for name in ("base-s0", "labo-s0"):
        (tmp_path / "out" / name / "records" / "test.jsonl").touch()
    left_out = {}
    assert runs_in([tmp_path / "x", str(tmp_path / "out")], left_out) == [
        tmp_path / "x",
        tmp_path / "out" / "base-s0",
        tmp_path / "out" / "labo-s0",
    ]
    assert {path.name: reason.partition(":")[0] for path, reason in left_out.items()} == {
        "labo-tau8-s0": "unfinished at step 0",
        "labo-tau9-s0": "not scored on the test split",
    }


def test_a_folder_with_runs_of_another_recipe_is_refused(tmp_path):
    finish(tiny(tmp_path, ["base"]), {"base-s0": accuracy(0.5)})
    with pytest.raises(RequestError, match=r"differs in optim\.lr"):
        tiny(tmp_path, ["base"], overrides=["optim.lr=0.1"])


def test_nothing_of_the_users_is_overwritten(tmp_path, launcher):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "table.md").write_text("my own table")
    with pytest.raises(RequestError, match=r"thesis holds something else .table.md.*new, empty or"):
        carry_out([tiny(out, ["base"])], out, Setup(jobs=1))
    assert [path.name for path in out.iterdir()] == ["table.md"]
    assert launcher.started == []
    with pytest.raises(RequestError, match=r"table.md is no folder"):
        carry_out([tiny(out / "table.md", ["base"])], out / "table.md", Setup(jobs=1))


def test_the_share_of_the_machine(monkeypatch):
    monkeypatch.setattr(distributed, "core_count", lambda: 8)
    assert Setup().share(100) == (8, 1)
    assert Setup().share(3) == (3, 2)
    assert Setup(jobs=2).share(100) == (2, 4)
    assert Setup(jobs=16).share(100) == (16, 1)
    assert Setup(processes=2).share(100) == (4, 1)
    assert Setup(processes=2).share(1) == (1, 4)
    assert Setup(processes=16).share(100) == (1, 1)
    assert Setup(threads=3).share(100) == (8, 3)
