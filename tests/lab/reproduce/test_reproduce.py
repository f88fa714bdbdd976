"""The paper's tables again: its numbers, the runs they need, and the layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from analysis_runs import sentence, write_lines
from command import Ended, labo
from labo import cli
from labo.lab.analysis.collection import claim_folder
from labo.lab.compare.setup import Setup
from labo.lab.errors import RequestError
from labo.lab.reproduce import command as reproduce
from labo.lab.reproduce import paper
from labo.lab.reproduce.command import EXPERIMENTS, Plan, describe, plan, require
from labo.lab.reproduce.exhibits import EXHIBITS
from labo.lab.tables import to_markdown
from launched import Launcher

# ------------------------------------------------------------------ the paper's numbers


def test_numbers_of_the_paper():
    """Typed again from the spec, column by column or method by method."""
    assert list(paper.BILINGUAL) == ["base", "ls", "cp", "fl", "afl", "labo"]
    assert [[row[i][0] for row in paper.BILINGUAL.values()] for i in range(6)] == [
        [33.9, 34.5, 34.2, 33.0, 34.2, 35.2],
        [27.8, 28.3, 27.9, 26.8, 27.9, 28.8],
        [40.0, 40.5, 40.4, 39.2, 40.5, 40.9],
        [39.0, 39.8, 39.2, 38.3, 39.5, 40.3],
        [27.1, 27.7, 27.4, 26.6, 27.5, 28.3],
        [29.8, 31.9, 30.4, 28.9, 30.3, 32.3],
    ]
    assert paper.BILINGUAL["labo"][3] == (40.3, 0.05)
    assert paper.MULTILINGUAL == {"base": (26.9, 35.4), "ls": (28.0, 36.8), "labo": (28.4, 37.2)}
    assert [time for _, time in paper.CIFAR["kd"]] == [3.7, 3.8, 3.7, 3.9]
    assert paper.FREQUENCY["valid"] == {"ls": (40.3, 35.2, 33.1), "labo": (40.7, 35.8, 33.8)}
    assert paper.FREQUENCY["test"] == {"ls": (38.4, 33.5, 32.1), "labo": (39.0, 34.3, 32.7)}


@pytest.mark.parametrize("recipe", ["cifar10", "cifar100", "imagenet"])
def test_the_recipes_quote_the_same_numbers(recipe):
    """All accuracies of images, typed once more in the recipes."""
    text = (Path(cli.__file__).parent / "recipes" / f"{recipe}.yaml").read_text()
    text = " ".join(line.lstrip("# ") for line in text.splitlines())
    printed, first = (
        (paper.IMAGENET, 0) if recipe == "imagenet" else (paper.CIFAR, 2 * (recipe == "cifar10"))
    )
    for method, row in printed.items():
        pair = f"{row[first][0]:.2f} / {row[first + 1][0]:.2f}"
        assert f"{paper.ROWS[method]} {pair}" in text


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("table1", 210),  # 6 methods, 6 columns, 5 seeds, and 30 to select tau of LABO
        ("table3", 162),  # 8 methods, 4 columns, 5 seeds, and 2 teachers
        ("figure2", 3),
        ("imagenet", 12),
    ],
)
def test_a_dry_run_is_a_table_with_totals_and_the_missing_data_once(
    name, count, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    found = labo(capsys, "reproduce", name, "--scale", "paper", "--dry-run", "--data", "where")
    assert (found.status, found.err) == (0, "")
    lines = found.out.splitlines()
    at = lines.index(f"{count} runs in all")
    head, *groups = lines[:at]
    assert head.split()[:5] == ["folder", "recipe", "methods", "seeds", "runs"]
    planned = plan(name, "paper", ["where"])
    assert len(groups) == len(planned.all())
    runs = [int(group.split()[4]) for group in groups]
    assert sum(runs) == count
    assert all(re.search(r"[\d,]+ +where/\S+ \(missing\)$", group) for group in groups)
    hours = [float(group.split()[6].replace(",", "")) for group in groups]
    assert "an estimate" in lines[at + 1]
    if name == "figure2":  # 3 runs of 150 epochs of IWSLT
        assert hours == [18]
    wanted = sorted({EXPERIMENTS[key].data for key in EXHIBITS[name].experiments})
    missing = lines[at + 2 :]
    assert sorted(line.split()[1] for line in missing) == [f"where/{d}" for d in wanted]
    assert not list(tmp_path.iterdir())


def test_methods_with_a_teacher_wait_for_it(tmp_path):
    planned = plan("table3", "paper", [str(tmp_path)])
    teacher = planned.teachers["cifar100"].runs[0]
    assert teacher.recipe.model.name == "resnext29"
    kd = next(
        run for run in planned.comparisons["cifar100-resnet18"].runs if run.variant.method == "kd"
    )
    assert kd.teacher == teacher.path
    assert kd.recipe.method["teacher"] == str(teacher.path)
    assert kd.recipe.model.name == "resnet18"
    assert planned.all().index(planned.teachers["cifar100"]) == 0


def test_data_are_found_by_name_or_named(tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "elsewhere").mkdir()
    planned = plan("table3", "paper", [str(tmp_path), f"cifar100={tmp_path / 'elsewhere'}"])
    assert planned.folders == {
        "cifar100": tmp_path / "elsewhere",
        "cifar10": tmp_path / "cifar10",
    }
    require(planned)


def test_the_small_scale_takes_what_there_is(tmp_path):
    (tmp_path / "cifar10").mkdir()
    planned = plan("table3", "small", [str(tmp_path)])
    require(planned)
    assert list(planned.comparisons) == ["cifar10-mobilenet-v2", "cifar10-resnet18"]
    assert planned.comparisons["cifar10-resnet18"].runs[0].recipe.train.epochs == 5
    with pytest.raises(RequestError, match="missing: DATA/cifar100"):
        require(plan("table3", "small"))


def test_small_translation_leaves_the_warm_up_of_labo_in_time(tmp_path):
    (tmp_path / "iwslt14.de-en").mkdir()
    planned = plan("table1", "small", [str(tmp_path)])
    runs = planned.comparisons["iwslt14-de-en"].runs
    labo = [run.recipe.method for run in runs if run.variant.method == "labo"]
    assert [(found["tau"], found["warmup_steps"]) for found in labo] == [(1.15, 500), (1.25, 500)]


def test_exhibits_share_their_runs(tmp_path):
    table = plan("table1", "demo", out=tmp_path)
    figure = plan("figure2", "demo", out=tmp_path)
    paths = {run.path for comparison in table.all() for run in comparison.runs}
    assert {run.path for comparison in figure.all() for run in comparison.runs} < paths
    assert "48 runs in all" in describe(plan("table3", "demo"))  # 2 columns share their runs


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["table9"], "no exhibit 'table9' (known: table1, "),
        (["table3", "--scale", "tiny"], "--scale tiny: there are demo, small, paper"),
        (["table3", "--data", "svhn=here"], "--data svhn=...: known names are cifar10, "),
    ],
)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    arguments, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    ended = labo(capsys, "reproduce", *arguments)
    assert ended.status == 2
    (said,) = ended.err.splitlines()
    assert line in said
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ the layout


def pretend(planned: Plan, results: Any) -> None:
    """Give every run of a plan results, from a function of the run."""
    planned.out.mkdir(parents=True, exist_ok=True)
    claim_folder(planned.out)
    for comparison in planned.all():
        for run in comparison.runs:
            run.directory.start(run.recipe)
            run.directory.finish({"steps": 10, "seconds": 5.0, **results(run)})
            run.directory.records.mkdir(exist_ok=True)
            for split in ("valid", "test"):
                (run.directory.records / f"{split}.jsonl").touch()


def test_the_table_of_classifiers_has_ours_beside_the_papers(tmp_path, monkeypatch):
    planned = plan("table3", "demo", out=tmp_path, seeds=2)

    def results(run):
        score = 0.9 + 0.01 * run.seed + 0.05 * (run.variant.method == "labo")
        return {"valid": {"accuracy": score}, "test": {"accuracy": score}}

    pretend(planned, results)
    (table, _), failures = reproduce.reproduce(planned)
    assert failures == []
    text = to_markdown(table)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert list(lines)[2:] == ["Base", "KD", "LS", "CS-KD", "TF-reg", "Beta-LS", "KR-LS", "LABO"]
    assert lines["LABO"].count("95.50 ± 0.71") == 4
    for printed in ("[71.05]", "[78.10]", "[91.53]", "[95.21]", "[1.0x]"):
        assert printed in lines["LABO"]
    assert "stands in for" in text
    document = json.loads((tmp_path / "table3.json").read_text())
    cell = document["rows"][7]["cells"]["cifar100-resnet18"]
    assert cell["paper"]["value"] == pytest.approx(0.7810)
    assert cell["value"] == pytest.approx(0.955)


def translated(run: Any) -> None:
    """Records of a run of which LABO translates better, and is less sure of it."""
    labo = run.variant.method == "labo"
    texts = [f"a sentence with number {i} in it" for i in range(12)]
    for split in ("valid", "test"):
        records = [
            sentence(
                text,
                text if labo or i % 2 else text.replace("sentence", "line"),
                p=0.42 if labo else 0.93,
                frequency=100.0 - i,
                index=i,
                pair="fr-en" if i % 3 == 0 else "de-en",
            )
            for i, text in enumerate(texts)
        ]
        write_lines(run.directory.records / f"{split}.jsonl", records)
    example = {"title": "one", "target": 1, "logits": [0.0, 2.0, 1.0], "image": None, "context": ""}
    examples = {"classes": ["film", "video", "picture"], "examples": [example]}
    (run.directory.records / "examples.json").write_text(json.dumps(examples))
    run.directory.best.mkdir(exist_ok=True)
    facts = {"task": "translation", "num_classes": 3}
    (run.directory.best / "config.json").write_text(json.dumps({"labo": facts}))


def made(name: str, out: Path) -> Any:
    """The exhibit from pretended runs of the demo."""
    planned = plan(name, "demo", out=out)
    scores = {"bleu": 50.0, "tokenized_bleu": 51.0, "nll": 1.0}
    pretend(planned, lambda run: {"valid": scores, "test": scores, "signature": "labo:0|data:x"})
    for comparison in planned.all():
        for run in comparison.runs:
            translated(run)
    reproduce.reproduce(planned)
    return json.loads((out / f"{name}.json").read_text())


def cells(document: Any, row: int) -> dict[str, Any]:
    return document["rows"][row]["cells"]


def test_bilingual_table(tmp_path):
    document = made("table1", tmp_path)
    cell = cells(document, 5)["wmt14-de-en"]
    assert (cell["value"], cell["paper"]) == (51.0, {"value": 32.3, "std": 0.06})
    assert cells(document, 0)["iwslt14-en-fr-sacrebleu"] == {"value": 50.0}


def test_multilingual_table(tmp_path):
    document = made("table2", tmp_path)
    assert [row["method"] for row in document["rows"]] == ["Base", "LS", "LABO"]
    assert cells(document, 2)["de-en"] == {"value": pytest.approx(100), "paper": {"value": 28.4}}
    assert cells(document, 1)["fr-en"]["value"] < 95


def test_table_by_frequency(tmp_path):
    document = made("table4", tmp_path)
    labels = [row["method"] for row in document["rows"]]
    assert labels == [
        f"{split}: {row}" for split in ("valid", "test") for row in ("LS", "LABO", "Δ")
    ]
    difference = cells(document, 5)["least"]
    assert difference["value"] == pytest.approx(
        cells(document, 4)["least"]["value"] - cells(document, 3)["least"]["value"]
    )
    assert difference["paper"]["value"] == pytest.approx(0.6)


def texts(file):
    """What is written in an SVG file."""
    found = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
    return {element.text for element in found}


def test_an_exhibit_of_finished_runs_trains_nothing(tmp_path, capsys):
    made("table4", tmp_path / "runs")
    trained = next((tmp_path / "runs").glob("cldr*"))

    def remade(name: str, *options: str) -> Ended:
        return labo(capsys, "reproduce", name, *options, "--out", tmp_path / "again")

    ours = trained / "labo-warmup_steps200-tau1.15-s0"
    one = ["--runs", str(trained / "ls-s0"), "--runs", str(ours)]
    status, said, _ = remade("table4", *one)
    assert status == 0
    assert "[32.70]" in said
    assert f"ours: {ours.name} (x)" in said
    assert "the paper's: iwslt14-de-en" in said
    now, before = (
        json.loads((tmp_path / folder / "table4.json").read_text())["rows"]
        for folder in ("again", "runs")
    )
    assert now == before
    status, said, _ = remade("figure2", *one)
    assert status == 0
    assert "0.93 [0.90]" in said
    assert (tmp_path / "again" / "figure2.pdf").is_file()
    for wrong, options in {
        "table1 has several columns of runs; try table2, table4": ["table1", *one],
        "needs scored runs of labo with one setting; found: labo tau=1.15": [
            *("table4", "--runs", str(trained))
        ],
        "table4 needs scored runs of labo with one setting; found: none": ["table4", *one[:2]],
        "KEY=VALUE, --data, --seeds are for new": ["table4", *one, "--seeds", "1"],
    }.items():
        ended = remade(*options)
        assert ended.status == 2
        assert wrong in ended.err


def test_figure_of_one_label(tmp_path):
    document = made("figure1", tmp_path)
    assert document["rows"][0]["method"] == "video (target)"
    label = [cells(document, row)["labo"]["value"] for row in range(3)]
    assert sum(label) == pytest.approx(1)
    assert label == sorted(label, reverse=True)
    assert {"One-hot", "Label smoothing", "LABO"} <= texts(tmp_path / "figure1.svg")
    assert (tmp_path / "figure1.pdf").is_file()


def test_figure_of_probabilities(tmp_path):
    document = made("figure2", tmp_path)
    assert cells(document, 0)["all"] == {"value": pytest.approx(0.925), "paper": {"value": 0.9}}
    assert cells(document, 1)["least"] == {"value": pytest.approx(0.425), "paper": {"value": 0.4}}
    assert cells(document, 1)["all-mean"]["value"] is not None
    shown = texts(tmp_path / "figure2.svg")
    assert {f"Words: {part} frequent" for part in ("most", "medium", "least")} <= shown
    assert {"ls", "labo"} <= {text.split()[0] for text in shown}


def test_a_demo_from_the_first_run_to_the_table(tmp_path, monkeypatch):
    Launcher.install(monkeypatch)
    planned = plan("imagenet", "demo", out=tmp_path, seeds=1, overrides=["train.max_steps=2"])
    (table, _), failures = reproduce.reproduce(planned, Setup(jobs=2))
    text = to_markdown(table)
    assert failures == []
    assert "[76.55]" in text
    assert "digits stands in for imagenet-resnet50, imagenet-resnet152" in text
    assert "- set by hand, for all runs: train.max_steps=2" in text
