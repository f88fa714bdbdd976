"""The report as text: what stands in the page. How it behaves is in test_report_browser.py."""

from __future__ import annotations

import inspect
import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from command import labo
from labo import smoothing
from labo.lab.analysis.groups import Difference, Member
from labo.lab.analysis.reading import read_run
from labo.lab.analysis.run import load_analysis, write_analysis
from labo.lab.analysis.significance import sign_flip_test, t_interval
from labo.lab.errors import RequestError
from labo.lab.report import explorer_data, write_report
from labo.lab.report.figures import training_figures
from labo.lab.report.gather import ReportGroup, make_groups, read_runs
from labo.lab.report.results import confidence_table
from labo.lab.report.summary import judged, summary_figure, verdict
from labo.lab.report.task import find_report
from labo.lab.text.token_text import readable, token_name, token_names
from report_runs import (
    BASE,
    BLEU,
    HOSTILE,
    LABO,
    LS,
    examples_of,
    make_hostile,
    write_examples,
    write_run,
)

SCRIPTS = Path(inspect.getfile(write_report)).parent


class Page(HTMLParser):
    """A page taken apart: its elements, its text, and the data for its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, object] = {}
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            name = self.elements[-1][1].get("id")
            if name:
                self.data[name] = json.loads(data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def report(paths: list[Path], out: Path) -> Page:
    write_report(paths, out)
    return Page(out.read_text(encoding="utf-8"))


def groups_of(*paths: Path) -> list[ReportGroup]:
    return make_groups([listing.member for listing in read_runs(paths)])


@pytest.fixture(scope="module")
def page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ content


def test_runs_are_named_so_that_they_are_told_apart(tmp_path):
    paths = [tmp_path / "one" / "ls-s0", tmp_path / "ls-s1"]
    assert [listing.name for listing in read_runs(paths)] == ["ls-s0", "ls-s1"]
    paths = [tmp_path / "a" / "ls-s0", tmp_path / "b" / "ls-s0", tmp_path / "b" / "ls-s0"]
    assert [listing.name for listing in read_runs(paths)] == ["a/ls-s0", "b/ls-s0", "b/ls-s0"]


def test_the_page_has_every_section(page):
    ids = [attributes.get("id") for attributes in page.of("section")]
    assert ids == [
        "summary",
        "results",
        "training",
        "confidence",
        "translation",
        "sentences",
        "labels",
        "runs",
    ]
    links = {attributes["href"] for attributes in page.of("a")}
    assert {f"#{name}" for name in ids} <= links


def test_the_page_opens_with_the_best_method_and_the_results_have_differences(runs, tmp_path):
    images = runs[:6]
    scores = {}
    for run in images:
        results = json.loads((run / "results.json").read_text())
        scores.setdefault(run.name.split("-")[1], []).append(100 * results["test"]["accuracy"])
    text = report(images, tmp_path / "r.html").text.replace("\u00a0", " ")
    shown = {
        name: f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
        for name, values in scores.items()
    }
    assert all(number in text for number in shown.values())
    best = f"labo has the highest accuracy: {shown['labo']} % (test split, mean of 2 seeds)."
    assert text.index(best) < text.index("All methods") < text.index("Results on the test split")
    for name in ("ls", "base"):
        gain = np.array(scores["labo"]) - np.array(scores[name])
        low, high = t_interval(gain)
        p = sign_flip_test(gain)[0]
        said = f"{gain.mean():+.2f} points compared with {name} (95 % interval {low:.2f} to "
        assert f"{said}{high:.2f}, p = {p:.2g})".replace("-", "−") in text
        row = f"{gain.mean():+.2f} ({low:+.2f}, {high:+.2f}) {p:.3f}"
        assert row.replace("-", "−") in text
    assert "no difference that 2 seeds can show" in text
    assert "With 2 seeds p cannot be below 0.5" in text
    assert "A training step takes 1.25 ± 0.00 times as long as with base." in text
    assert re.search(r"calibration error \(ECE\) is [\d.]+ % \(ls [\d.]+ %, base [\d.]+ %\)", text)
    assert "1.25×" in text
    assert "500" in text  # MB


def test_only_a_difference_that_is_significant_is_called_one():
    def found(values, examples=None):
        p, smallest = sign_flip_test(values) if len(values) > 1 else (None, None)
        seeds = list(range(len(values)))
        mean = float(np.mean(values))
        return Difference("labo", "ls", "ls", seeds, values, mean, None, p, smallest, examples)

    assert judged(found([1.0])) == "one seed cannot show whether there is a difference"
    assert judged(found([1.0], 0.2)) == "no difference that these examples can show"
    assert judged(found([1.0], 0.01)).startswith("a difference on these examples")
    assert judged(found([1.0, 1.1, 0.9, 1.0, 1.2], 0.001)) == "no difference that 5 seeds can show"
    assert (
        judged(found([1.0, 1.1, 0.9, 1.0, 1.2, 1.0]))
        == "a difference over 6 seeds at the 5 % level"
    )


def test_equal_scores_share_the_first_place_and_lower_can_be_better(tmp_path):
    group = scored_group(tmp_path, {"base": [0.97], "ls": [0.97]})
    assert verdict(group, None).best == ["base", "ls"]
    assert verdict(group, None).text.startswith("have the highest accuracy: 97.00 %")
    assert len(summary_figure([group]).panels) == 3


def set_accuracy(path: Path, value: float) -> None:
    results = json.loads((path / "results.json").read_text())
    results["test"]["accuracy"] = value
    (path / "results.json").write_text(json.dumps(results))


def scored_group(folder: Path, scores: dict[str, list[float]], **steps: int) -> ReportGroup:
    """The group of runs with these accuracies, one per seed; ``steps`` are those of warm-ups."""
    paths = []
    for name, values in scores.items():
        method = {"base": BASE, "ls": LS, "labo": LABO}.get(name, {"name": name})
        method = method | ({"warmup_steps": steps[name]} if name in steps else {})
        for seed, value in enumerate(values):
            path = write_run(folder / f"{name}-{seed}", method, seed)
            set_accuracy(path, value)
            paths.append(path)
    (group,) = groups_of(*paths)
    return group


def test_the_first_screen_names_every_method_that_differs(tmp_path):
    base = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95]
    group = scored_group(
        tmp_path,
        {
            "base": base,
            "ls": [score + 0.02 for score in base],
            "labo": [score - 0.03 for score in base],
            "fl": [score + 0.001 * (-1) ** seed for seed, score in enumerate(base)],
            "cp": [score + 0.01 + 0.04 * (-1) ** seed for seed, score in enumerate(base)],
        },
    )
    found = verdict(group, None)
    assert found.best == ["ls"]
    others = dict(found.others)
    # cp differs from nothing; the difference between base and ls, the best, is in the first line.
    assert list(others) == ["fl", "labo"]
    assert others["fl"].startswith("is worse than ls: accuracy 92.50 ± ")
    assert others["labo"].startswith("is worse than ls and base: accuracy 89.50 ± ")
    assert "−5.00 points compared with ls" in others["labo"]
    assert others["labo"].endswith(": a difference over 6 seeds at the 5 % level.")


def test_the_first_screen_says_where_labo_is_even_if_nothing_differs(tmp_path):
    group = scored_group(tmp_path, {"base": [0.92], "ls": [0.95], "labo": [0.90], "fl": [0.9]})
    ((label, text),) = verdict(group, None).others
    assert label == "labo"
    assert text.startswith("has accuracy 90.00 %. −5.00 points compared with ls and −2.00 points")
    assert text.endswith("one seed cannot show whether there is a difference.")


def test_a_better_method_that_is_not_the_best_is_named_too(tmp_path):
    base = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95]
    scores = {"base": base, "ls": [s + 0.01 for s in base], "labo": [s + 0.02 for s in base]}
    found = verdict(scored_group(tmp_path, scores), None)
    assert found.best == ["labo"]
    ((label, text),) = found.others
    assert (label, text.split(":")[0]) == ("ls", "is better than base")


def test_a_method_that_was_never_active_is_marked_everywhere(tmp_path):
    scores = {"base": [0.92], "ls": [0.93], "labo": [0.95]}
    group = scored_group(tmp_path / "long", scores, labo=31)  # the runs have 30 steps
    marked = "labo (never active)"
    assert [variant.label for variant in group.shown] == ["base", "ls", marked]
    assert verdict(group, None).best == [marked]
    assert marked in [d.variant for d in group.differences]
    group = scored_group(tmp_path / "short", scores, labo=30)
    assert [variant.label for variant in group.shown] == ["base", "ls", "labo"]
    paths = [
        write_run(tmp_path / method["name"], method, task="translation")
        for method in (LS, LABO | {"warmup_steps": 500})
    ]
    text = report(paths, tmp_path / "r.html").text
    assert f"{marked} - ls" in text
    assert not re.search(r"\blabo - ls", text)
    both = [
        *(write_run(tmp_path / "both" / m["name"], m) for m in (LS, LABO | {"warmup_steps": 3})),
        write_run(tmp_path / "both" / "late", LABO | {"warmup_steps": 500}),
    ]
    for path, accuracy in zip(both, (0.95, 0.93, 0.94), strict=True):
        set_accuracy(path, accuracy)
    (group,) = groups_of(*both)  # the line about LABO is that of the variant that was active
    assert [label for label, _ in verdict(group, None).others] == ["labo warmup_steps=3"]


def test_every_figure_has_alternative_text_and_a_signature(page):
    figures = sum(tag == "figure" for tag, _ in page.elements)
    assert figures >= 10
    ids = {attributes["id"] for _, attributes in page.elements if attributes.get("id")}
    drawings = [a for a in page.of("svg") if a.get("class") != "swatch"]
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert set(attributes["aria-labelledby"].split()) <= ids
    signatures = [a for a in page.of("p") if a.get("class") == "signature"]
    assert len(signatures) >= figures
    folded = [a for a in page.of("details") if a.get("class") == "provenance"]
    assert len(folded) == figures + 1  # and that of the runs
    assert not any("open" in a for a in folded)
    assert len(ids) == len([a["id"] for _, a in page.elements if a.get("id")])  # no id twice
    for part in ("labo 0.1.0", "data digits@0123456789ab", "ls alpha=0.1", "seed 0, 1", BLEU):
        assert part in page.text
    assert "labo tau=1.25 alpha=adaptive rho=0.5" in page.text
    assert sum("best" in (a.get("class") or "") for a in page.of("td")) >= 6


def test_under_confidence_is_said_plainly(page):
    found = re.search(
        r"labo is right on ([\d.]+) % of the images with a mean confidence of ([\d.]+) %: it is "
        r"underconfident by ([\d.]+) points",
        page.text,
    )
    right, claimed, gap = map(float, found.groups())
    assert gap == pytest.approx(right - claimed, abs=0.11)
    assert claimed == pytest.approx(45, abs=3)
    assert "changes its calibration error from" in page.text


def test_the_ranking_is_shown_before_and_after_logit_normalisation(runs):
    for group in make_groups([Member(read_run(p), load_analysis(p)) for p in runs]):
        views = find_report(group.task).views
        table = confidence_table(group, views)
        row = next(row for row in table.rows if row.label == "labo")
        splits = [member.split("test") for member in group.first("labo").runs]
        areas = [split["views"][views[0]]["selective"]["aurc"] for split in splits]
        assert row.cells["aurc"].value == pytest.approx(np.mean(areas))
        columns = {column.key for column in table.columns}
        assert ("aurc_normalised" in columns) == (group.task == "image_classification")
        if "aurc_normalised" in columns:
            areas = [split["logit_norm"]["aurc"] for split in splits]
            assert row.cells["aurc_normalised"].value == pytest.approx(np.mean(areas))


def test_the_sentences_are_all_there_with_every_run(page, runs):
    data = page.data["browser-1-data"]
    assert [run["name"] for run in data["runs"]] == [run.name for run in runs[6:]]
    assert data["total"] == len(data["sentences"]) == 60
    first = data["sentences"][0]
    assert "".join(text for text, _ in first["outputs"][0]["tokens"]) == (
        first["outputs"][0]["text"] + "</s>"
    )


def test_a_page_of_one_bare_run(tmp_path):
    run = write_run(tmp_path / "only", LS, records=False)
    found = report([run], tmp_path / "r.html")
    ids = [attributes.get("id") for attributes in found.of("section")]
    assert ids == ["summary", "results", "training", "left-out", "runs"]
    assert "labo evaluate" in found.text
    assert re.search(
        r"ls is the only finished method: accuracy [\d.]+.% \(test split, one seed\)", found.text
    )


def test_the_same_runs_make_the_same_bytes_and_every_figure_is_a_file(runs, tmp_path):
    chosen = [run for run in runs if run.name.endswith("s0")]
    write_report(chosen, tmp_path / "one.html", figures=tmp_path / "one")
    write_report(chosen, tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    files = [path.name for path in (tmp_path / "one").iterdir()]
    figures = len(Page((tmp_path / "one.html").read_text()).of("figure"))
    assert len(files) == 3 * figures
    for name in ("digits-learning", "cldr-de-en-chosen", "summary-figure", "label"):
        assert {f"{name}.pdf", f"{name}.svg", f"{name}.csv"} <= set(files)
    write_report(chosen[:1], tmp_path / "r.html", figures=tmp_path / "one-group")
    assert (tmp_path / "one-group" / "learning.pdf").is_file()
    with pytest.raises(RequestError, match=r"--figures .*r.html: it is a file"):
        write_report(chosen, tmp_path / "other.html", figures=tmp_path / "r.html")
    assert not (tmp_path / "other.html").exists()


def test_variants_of_a_method_are_told_apart(tmp_path):
    sharp = write_run(tmp_path / "sharp", LABO | {"tau": 1.05})
    usual = write_run(tmp_path / "usual", LABO)
    (group,) = groups_of(sharp, usual)
    assert [variant.label for variant in group.shown] == ["labo tau=1.05", "labo tau=1.25"]
    assert {variant.style.colour for variant in group.shown} == {"m2"}
    assert len({variant.style.dash for variant in group.shown}) == 2
    assert len({variant.style.marker for variant in group.shown}) == 2


def test_groups_that_nothing_but_their_examples_tells_apart_are_numbered(tmp_path):
    one, other = write_run(tmp_path / "a", LS), write_run(tmp_path / "b", LABO)
    records = other / "records" / "test.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:50]))
    groups = groups_of(one, other)
    assert [group.title for group in groups] == [
        f"digits, small, digits@0123456789ab ({number})" for number in (1, 2)
    ]
    recipe = other / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: small", "name: large"))
    assert [group.title for group in groups_of(one, other)] == ["digits, small", "digits, large"]


def test_unfair_comparisons_are_named(tmp_path):
    one, other = write_run(tmp_path / "a", LS), write_run(tmp_path / "b", LABO)
    recipe = other / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "train: {epochs: 9}\n")
    text = report([one, other], tmp_path / "r").text
    assert "labo and ls differ in train, not only in method" in text


# ------------------------------------------------------------------ runs as they are


def test_every_run_of_a_folder_is_shown_or_listed(tmp_path, capsys):
    folder = tmp_path / "runs"
    for seed in range(2):
        write_run(folder / f"ls-s{seed}", LS, seed)
        write_run(folder / f"labo-s{seed}", LABO, seed, records=False)
    write_run(folder / "base-s0", BASE, finished=False)
    half = write_run(tmp_path / "half", LS, 7, finished=False)
    out = tmp_path / "report.html"
    status, printed, _ = labo(capsys, "report", folder, half, "--out", out)
    assert status == 0
    page = Page(out.read_text(encoding="utf-8")).text
    assert f"{out} is written" in printed
    assert f"{half} is unfinished at step 20" in printed
    assert "4 of 6 runs are missing from this page" in page
    assert "labo-s0, labo-s1: not scored on the test split" in page
    assert "base-s0: unfinished at step 20: the command that started it continues it" in page
    assert f"{folder / 'labo-s1'} is left out: not scored on the test split" in printed


def test_broken_half_done_and_missing_runs_are_listed(tmp_path):
    good = write_run(tmp_path / "good", LS)
    with (good / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\xff\n")
    half = write_run(tmp_path / "half", LABO, finished=False)
    torn = write_run(tmp_path / "torn", BASE)
    (torn / "results.json").write_text('{"test": {"acc')
    spoilt = write_run(tmp_path / "spoilt", LS, 1)
    (spoilt / "records" / "test.jsonl").write_text('{"label": 3}\n')
    text = report([good, half, torn, spoilt, tmp_path / "missing"], tmp_path / "r.html").text
    assert "half unfinished at step 20" in text
    assert re.search(r"torn broken: \S*results.json: not JSON", text)
    assert re.search(r"spoilt broken: \S*test.jsonl, line 1", text)
    assert re.search(r"missing broken: \S*missing is not a run: it has no recipe.yaml", text)
    assert f"good: {good / 'metrics.jsonl'}: line 7 left out (not JSON)" in text
    assert "good finished" in text


def test_nothing_usable_is_a_wrong_request(tmp_path, capsys):
    ended = labo(capsys, "report", tmp_path / "nowhere", "-o", tmp_path / "r.html")
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert re.match(r"labo: nothing to report: .*nowhere is not a run", line)
    assert not (tmp_path / "r.html").exists()
    run = write_run(tmp_path / "run", LS, records=False)
    with pytest.raises(RequestError, match="there is no folder"):
        write_report([run], tmp_path / "no" / "r.html")


def test_a_report_of_analyzed_runs_needs_no_torch(tmp_path):
    run = write_run(tmp_path / "run", LABO)
    write_analysis(run)
    script = (
        "import sys; from labo.lab.report import write_report\n"
        f"write_report([{str(run)!r}], {str(tmp_path / 'r.html')!r})\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split()


# ------------------------------------------------------------------ safety


def test_the_page_loads_nothing(page, file):
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "data", "action", "poster"} & {
            key for key in attributes if tag != "img"
        }
        assert not any(key.startswith("on") for key in attributes)
        if "href" in attributes:
            assert attributes["href"].startswith("#")
    policy = next(a["content"] for a in page.of("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.partition("script-src")[2]
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp", text)


def test_markup_in_the_data_stays_text(tmp_path):
    run = write_run(tmp_path / "<b>run&", LABO, task="translation")
    make_hostile(run)
    found = report([run], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert "<b>run" not in text
    assert "spy.png" not in text
    sentence = found.data["browser-1-data"]["sentences"][0]
    assert sentence["source"] == HOSTILE
    assert sentence["outputs"][0]["tokens"][0][0] == HOSTILE
    assert found.data["explorer-data"]["examples"][0]["title"] == HOSTILE
    assert len(found.of("script")) == 5  # three of ours, two of data


def test_a_lone_surrogate_does_no_harm(tmp_path):
    run = write_run(tmp_path / "run", LS, task="translation")
    records = run / "records" / "test.jsonl"
    records.write_text(records.read_text().replace("Der Hund", "\\ud800 Hund"))
    found = report([run], tmp_path / "r.html")
    data = found.data["browser-1-data"]
    assert data["sentences"][0]["source"] == "? Hund schläft am Fenster . (0)"
    assert data["total"] == len(data["sentences"]) == 60


# ------------------------------------------------------------------ parts


def test_the_page_stays_small(tmp_path):
    run = write_run(tmp_path / "run", LABO, task="translation")
    record = json.loads((run / "records" / "test.jsonl").read_text().splitlines()[0])
    record["tokens"], record["probabilities"] = ["\u0120word"] * 900, [0.5] * 900
    (run / "records" / "test.jsonl").write_text((json.dumps(record) + "\n") * 150)
    (group,) = groups_of(run)
    data = find_report(group.task).browser(group, 1_500_000)
    assert data["total"] == 150
    assert 50 <= len(data["sentences"]) <= 100
    assert len(json.dumps(data)) < 1_600_000


def test_the_explorer_has_the_numbers_of_smoothing(tmp_path):
    classes = 5000
    run = write_run(tmp_path / "run", LABO, task="translation")
    write_examples(run, classes, random.Random(1))
    whole = examples_of(run)
    data = explorer_data(groups_of(run))
    assert len(json.dumps(data)) < 60_000
    for sample, example in zip(data["examples"], whole["examples"], strict=True):
        exact = torch.tensor(example["logits"], dtype=torch.float64)
        assert sample["classes"] == classes
        assert sample["alpha"] == pytest.approx(
            [1.0, float(smoothing.adaptive_alpha(exact, 1.0))], abs=1e-5
        )
        target = example["target"]
        for tau, masses in zip(data["taus"], sample["optimal"], strict=True):
            optimal = smoothing.tempered(exact, tau)
            assert masses[0] == pytest.approx(float(optimal[exact.argmax()]), abs=1e-5)
            assert masses[sample["target"]] == pytest.approx(float(optimal[target]), abs=1e-5)
    row = data["taus"].index(1.5), data["strengths"].index(0.3)
    for kind, key in (("adaptive", "rho"), ("fixed", "alpha")):
        expected = smoothing.stationary_confidence(classes, tau=1.5, **{key: 0.3})
        shown = data["stationary"][str(classes)][kind][row[0]][row[1]]
        assert shown == pytest.approx(expected, abs=1e-5)


def test_the_explorer_counts_only_classes_that_are_not_masked(tmp_path):
    run = write_run(tmp_path / "run", LABO)
    content = examples_of(run)
    for place in (0, 1):
        content["examples"][0]["logits"][place] = -math.inf
    content["examples"][1]["logits"][content["examples"][1]["target"]] = -math.inf
    (run / "records" / "examples.json").write_text(json.dumps(content))
    data = explorer_data(groups_of(run))
    (sample,) = data["examples"]  # a masked target has no label
    logits = torch.tensor(content["examples"][0]["logits"], dtype=torch.float64)
    assert sample["classes"] == 8
    assert sample["alpha"][1] == pytest.approx(
        float(smoothing.adaptive_alpha(logits, 1.0)), abs=1e-5
    )
    assert list(data["stationary"]) == ["8"]


def test_no_formula_of_labo_is_written_in_the_scripts():
    scripts = "".join((SCRIPTS / name).read_text() for name in ("explorer.js", "page.js"))
    assert not re.search(r"Math\.(exp|log|log1p|pow|sqrt)\b|\*\*", scripts)


def test_tokens_read_as_text():
    spread = ["\u0120M\u00c3", "\u00a4d", "chen"]  # the two bytes of ä in two tokens
    assert readable(spread) == [" M", "äd", "chen"]
    assert token_name("\u0120dog") == "·dog"
    assert token_name("dog</w>") == "dog·"
    assert token_name("犬") == "犬"
    assert token_names(["\u0120dog", *spread]) == ["·dog", "·M<c3>", "<a4>d", "chen"]
    assert token_names(["▁Mädchen", "ä", "«"]) == ["·Mädchen", "ä", "«"]
    assert token_names(["Mädchen", "é", "\u0120"]) == ["Mädchen", "<e9>", "·"]
    assert token_name("\u010a") == "↵"


def test_a_mark_shows_where_labo_begins(tmp_path):
    runs = [write_run(tmp_path / m["name"], m) for m in (BASE, LABO | {"warmup_steps": 5}, LS)]
    (group,) = groups_of(*runs)
    learning, confidence = training_figures(group, "g", [group.kind.headline])
    for panel in [*learning.panels, *confidence.panels]:  # the first evaluation is at step 10
        assert ">labo begins<" in panel.svg
    assert "the end of a warm-up" in learning.caption
    runs = [write_run(tmp_path / "late", LABO | {"warmup_steps": 500})]
    (group,) = groups_of(*runs)
    learning, _ = training_figures(group, "g", [group.kind.headline])
    assert "begins" not in "".join(panel.svg for panel in learning.panels)
    assert "warm-up" not in learning.caption


@pytest.mark.parametrize(
    ("manifest", "title"),
    [
        (
            {"pairs": [{"source": "de", "target": "en"}], "sizes": {"train": 29000}},
            "de-en (29\u202f000 sentence pairs)",
        ),
        (
            {"inputs": [{"file": "manual.txt"}, {"file": "more.txt"}], "sizes": {"train": 40}},
            "manual.txt, more.txt (40 documents)",
        ),
        ({"inputs": [], "sizes": {"train": 40}}, "out"),
        (None, "out"),
    ],
)
def test_the_title_of_prepared_text_is_what_its_manifest_says(tmp_path, manifest, title):
    run, folder = write_run(tmp_path / "run", LABO, task="translation"), tmp_path / "out"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["data"] = {"name": "prepared", "path": str(folder)}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if manifest is not None:
        folder.mkdir()
        (folder / "prepared.json").write_text(json.dumps(manifest))
    (group,) = groups_of(run)
    assert group.title == title
