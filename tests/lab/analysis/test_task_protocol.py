"""What tasks declare for compare, analyze and report: found without torch, with defaults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from command import labo
from labo.lab.analysis.task import TaskAnalysis, find_analysis, read_options
from labo.lab.compare.plan import plan
from labo.lab.errors import RequestError
from labo.lab.report.task import TaskReport, find_report
from labo.lab.tasks import TASKS, find_task

each_task = pytest.mark.parametrize("task", TASKS)


@each_task
def test_a_task_has_its_parts(task):
    kind = find_analysis(task)
    assert isinstance(kind, TaskAnalysis)
    assert isinstance(find_report(task), TaskReport)
    assert kind.measures[0] == kind.headline
    torch_side = find_task(task)
    # A model can be selected by the metric that methods are compared by, in the same direction.
    assert torch_side.higher_is_better[kind.headline.key] == (kind.headline.better > 0)


def test_analysis_and_report_of_a_task_load_no_torch():
    script = (
        "import sys; from labo.lab.report.task import find_report\n"
        "from labo.lab.analysis.task import find_analysis\n"
        f"for task in {list(TASKS)}: find_analysis(task), find_report(task)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_an_unknown_task_is_one_clear_line():
    with pytest.raises(RequestError, match="unknown task 'translatio'; did you mean 'translation'"):
        find_analysis("translatio")


# ------------------------------------------------------------------ options


def test_options_are_read_as_the_task_declares_them():
    both = ["image_classification", "translation"]
    assert read_options("evaluate", ["beams=1,5,20"], ["translation"]) == {"beams": [1, 5, 20]}
    assert read_options("analyze", ["part_size=2400"], both) == {"part_size": 2400}
    assert read_options("evaluate", [], both) == {}


@pytest.mark.parametrize(
    ("command", "text", "task", "line"),
    [
        ("evaluate", "beams=", "translation", "beams=: beam sizes to measure output lengths at"),
        ("evaluate", "beams=5,0", "translation", "beams=5,0: beam sizes"),
        ("evaluate", "beam=5", "translation", "(beams: beam sizes to measure output lengths at"),
        ("analyze", "part_size=0", "translation", "part_size=0: sentences of each part"),
        ("analyze", "part_size=many", "translation", "part_size=many: sentences of each part"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(command, text, task, line):
    with pytest.raises(RequestError) as error:
        read_options(command, [text], [task])
    assert line in str(error.value)


def test_labo_evaluate_refuses_an_option_that_the_task_does_not_have(tmp_path, capsys):
    (run,) = plan("digits", ["base"], 1, tmp_path).runs
    run.directory.start(run.recipe)
    ended = labo(capsys, "evaluate", run.path, "beams=1,5")
    assert ended.status == 2
    assert ended.err == (
        "labo: beams=1,5: image_classification has no such option for labo evaluate (it has none)\n"
    )
