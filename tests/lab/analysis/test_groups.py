"""Which runs are compared with which: groups, variants, references, paired differences."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from analysis_runs import sentence, write_lines, write_run
from labo.lab.analysis.groups import Member, group_runs
from labo.lab.analysis.reading import read_run
from labo.lab.analysis.significance import paired_bootstrap, paired_difference
from labo.lab.translation.bleu import bootstrap_bleu


def scored(path, accuracy=0.5, *, content="digits@1", **run):
    """A finished run with this accuracy on the test split."""
    results = {"test": {"accuracy": accuracy}, "signature": f"labo:0|data:{content}", "steps": 10}
    return write_run(path, **{"results": {**results, "seconds": 5.0}, **run})


def groups_of(*paths, split="test"):
    return group_runs([Member(read_run(path)) for path in paths], split)


def labels(group):
    return [variant.label for variant in group.variants]


# ------------------------------------------------------------------ groups


def test_a_group_is_a_task_on_the_same_data_with_the_same_model(tmp_path):
    small, large = {"model": {"name": "small"}}, {"model": {"name": "large"}}
    paths = [
        scored(tmp_path / "a", **small),
        scored(tmp_path / "b", method={"name": "ls"}, **small),
        scored(tmp_path / "other model", **large),
        scored(tmp_path / "other data", content="digits@2", **small),
        write_run(tmp_path / "other task", task="translation", **small),
    ]
    found = groups_of(*paths)
    assert [[member.name for member in group.members] for group in found] == [
        ["a", "b"],
        ["other model"],
        ["other data"],
        ["other task"],
    ]


def test_data_are_known_by_their_content_not_by_their_folder(tmp_path):
    here, there = ({"data": {"name": "folder", "root": root}} for root in ("/a", "/b"))
    one = scored(tmp_path / "one", seed=0, **here)
    other = scored(tmp_path / "other", seed=1, **there)
    unfinished = write_run(tmp_path / "unfinished", seed=2, **there)
    (unfinished / "results.json").unlink()
    (group,) = groups_of(one, other, unfinished)
    (variant,) = group.variants
    assert list(variant.members) == [0, 1, 2]
    assert variant.scores("test") == {0: 0.5, 1: 0.5}


# ------------------------------------------------------------------ variants


def test_what_differs_is_in_the_label(tmp_path):
    paths = [
        scored(tmp_path / "a", method={"name": "labo", "tau": 1.15, "rho": 0.5}),
        scored(tmp_path / "b", method={"name": "labo", "tau": 1.25, "rho": 0.5}),
        scored(tmp_path / "c", method={"name": "ls"}, optim={"lr": 0.1}),
        scored(tmp_path / "d", method={"name": "ls"}, optim={"lr": 0.2}),
        scored(tmp_path / "e"),
    ]
    (group,) = groups_of(*paths)
    assert labels(group) == [
        *("labo tau=1.15", "labo tau=1.25", "ls optim.lr=0.1", "ls optim.lr=0.2", "base")
    ]


def test_of_a_student_the_method_of_the_teacher_counts(tmp_path):
    for seed in (0, 1):
        scored(tmp_path / f"base-{seed}", seed=seed)
        scored(tmp_path / f"ls-{seed}", seed=seed, method={"name": "ls", "alpha": 0.1})
    students = [
        scored(
            tmp_path / f"kd-{teacher}-{seed}",
            seed=seed,
            method={"name": "kd", "teacher": str(tmp_path / f"{teacher}-{seed}")},
        )
        for teacher in ("base", "ls", "lost")
        for seed in (0, 1)
    ]
    (group,) = groups_of(*students)
    assert labels(group) == ["kd teacher=base", "kd teacher=ls", "kd teacher=unknown"]
    assert [list(variant.members) for variant in group.variants] == [[0, 1]] * 3
    (group,) = groups_of(*students[:2])
    assert labels(group) == ["kd"]


def test_teachers_of_one_method_are_told_apart_by_their_hyper_parameters(tmp_path):
    for alpha in (0.1, 0.2):
        scored(tmp_path / f"ls{alpha}", method={"name": "ls", "alpha": alpha})
    students = [
        scored(tmp_path / f"kd{a}", method={"name": "kd", "teacher": f"runs/ls{a}"})
        for a in (0.1, 0.2)
    ]
    (group,) = groups_of(*students)
    assert labels(group) == ["kd teacher.alpha=0.1", "kd teacher.alpha=0.2"]


def test_the_teacher_is_the_run_at_its_path_not_one_of_the_same_name(tmp_path):
    for folder, method in (("one", "base"), ("two", "ls")):
        scored(tmp_path / folder / "teacher", method={"name": method})
    student = scored(
        tmp_path / "one" / "kd", method={"name": "kd", "teacher": str(tmp_path / "one/teacher")}
    )
    wrong = tmp_path / "two" / "teacher"
    for group in groups_of(wrong, student):
        for variant in group.variants:
            if variant.name == "kd":
                assert variant.recipe["method"]["teacher"] == {"name": "base"}


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    first = scored(tmp_path / "first", 0.5)
    shutil.copytree(first, tmp_path / "second")
    (group,) = groups_of(first, tmp_path / "second")
    assert [member.name for member in group.members] == ["first"]
    assert group.notes == ["second is left out: first has the same recipe and seed"]
    (first / "results.json").unlink()  # the one with a score is taken
    (group,) = groups_of(first, tmp_path / "second")
    assert [member.name for member in group.members] == ["second"]
    assert group.notes == ["first is left out: second has the same recipe and seed"]


# ------------------------------------------------------------------ differences


def test_every_method_is_compared_with_base_and_ls(tmp_path):
    numbers = {"base": (0.5, 0.6, 0.7), "ls": (0.6, 0.6, 0.9), "labo": (0.7, 0.9, 0.8)}
    paths = [
        scored(tmp_path / f"{name}-{seed}", value, seed=seed, method={"name": name})
        for name, values in numbers.items()
        for seed, value in enumerate(values)
    ]
    (group,) = groups_of(*paths)
    assert [variant.label for variant in group.references] == ["base", "ls"]
    found = {(d.variant, d.reference): d for d in group.differences}
    assert list(found) == [("ls", "base"), ("labo", "base"), ("base", "ls"), ("labo", "ls")]
    for (ours, theirs), difference in found.items():
        expected = paired_difference(numbers[ours], numbers[theirs])
        assert {key: getattr(difference, key) for key in expected} == expected
        assert difference.seeds == [0, 1, 2]
        assert difference.p_bootstrap is None
    assert found["labo", "base"].p == 0.25
    assert group.notes == []


def test_seeds_are_paired_and_the_others_do_not_count(tmp_path):
    paths = [scored(tmp_path / f"base-{s}", 0.1 * s, seed=s) for s in (0, 1, 2)]
    paths += [
        scored(tmp_path / f"ls-{s}", 0.1 * s + 0.2, seed=s, method={"name": "ls"})
        for s in (2, 1, 7)
    ]
    (group,) = groups_of(*paths)
    difference = group.differences[0]
    assert difference.seeds == [1, 2]
    assert difference.values == pytest.approx([0.2, 0.2])
    assert difference.interval is None  # equal differences have no spread to estimate


def test_without_base_and_ls_the_first_is_the_reference(tmp_path):
    paths = [scored(tmp_path / name, method={"name": name}) for name in ("fl", "labo", "cp")]
    (group,) = groups_of(*paths)
    assert [(d.variant, d.reference) for d in group.differences] == [("labo", "fl"), ("cp", "fl")]


def test_of_several_variants_of_a_reference_the_first_is_taken_and_named(tmp_path):
    paths = [
        scored(tmp_path / f"ls{alpha}", method={"name": "ls", "alpha": alpha})
        for alpha in (0.2, 0.1)
    ]
    (group,) = groups_of(*paths)
    assert [variant.label for variant in group.references] == ["ls alpha=0.2"]
    assert group.notes == ["of ls alpha=0.2, ls alpha=0.1 the reference is ls alpha=0.2"]


def test_what_makes_a_comparison_unfair_or_impossible_is_named_once(tmp_path):
    paths = [
        scored(tmp_path / "base", train={"epochs": 3}),
        scored(tmp_path / "ls", method={"name": "ls"}, train={"epochs": 9}),
        scored(tmp_path / "labo", method={"name": "labo"}, train={"epochs": 3}, seed=5),
    ]
    (group,) = groups_of(*paths)
    assert group.notes == [
        "ls and base differ in train.epochs, not only in method",
        "labo and base have no seed in common",
        "labo and ls differ in train.epochs, not only in method",
        "labo and ls have no seed in common",
    ]


def translations(path, outputs, references, **run):
    results = {"test": {"bleu": 1.0}, "signature": "labo:0|data:t@1"}
    write_run(path, **{"task": "translation", "results": results, **run})
    records = [sentence(r, o) for r, o in zip(references, outputs, strict=True)]
    write_lines(path / "records" / "test.jsonl", records)
    return path


def test_the_bootstrap_is_of_the_mean_difference_and_apart_from_the_test_over_seeds(tmp_path):
    references = [f"this is sentence number {i} of the set" for i in range(30)]

    def wrong(share, seed):
        random = np.random.default_rng([seed, int(100 * share)])
        return [
            " ".join("x" if random.random() < share else word for word in line.split())
            for line in references
        ]

    outputs = {("ls", s): wrong(0.2, s) for s in (0, 1)} | {
        ("labo", s): wrong(0.15, s) for s in (0, 1)
    }
    paths = [
        translations(tmp_path / f"{name}-{s}", lines, references, method={"name": name}, seed=s)
        for (name, s), lines in outputs.items()
    ]
    (group,) = groups_of(*paths)
    (difference,) = group.differences
    drawn = {key: bootstrap_bleu(lines, references) for key, lines in outputs.items()}
    ours, theirs = ([drawn[name, s] for s in (0, 1)] for name in ("labo", "ls"))
    assert difference.p_bootstrap == paired_bootstrap(ours, theirs)
    assert difference.p == 1.0  # the scores in results.json are equal


@pytest.mark.parametrize("damage", ["missing", "wrong", "other"])
def test_without_the_records_of_both_there_is_no_bootstrap_and_a_note(tmp_path, damage):
    texts = ["one two three four", "five six seven eight"]
    ls = translations(tmp_path / "ls", texts, texts, method={"name": "ls"})
    labo = translations(tmp_path / "labo", texts, texts, method={"name": "labo"})
    records = labo / "records" / "test.jsonl"
    if damage == "missing":
        records.unlink()
    elif damage == "wrong":
        records.write_text("{}\n")
    else:
        write_lines(records, [sentence("another text", "another text")] * 2)
    (group,) = groups_of(ls, labo)
    (difference,) = group.differences
    assert difference.mean == 0
    assert difference.p_bootstrap is None
    (note,) = group.notes
    assert note.startswith("no bootstrap over examples: ")
    assert "labo" in note
