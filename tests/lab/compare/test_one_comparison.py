"""compare, analyze, report and reproduce print the same groups, differences and p-values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import sacrebleu

from analysis_runs import sentence, write_lines
from command import labo
from labo.lab.analysis.collection import claim_folder
from labo.lab.analysis.significance import paired_bootstrap, paired_difference
from labo.lab.reproduce.command import plan
from labo.lab.translation.bleu import bootstrap_bleu


def shown(difference: dict[str, Any], p_bootstrap: float) -> str:
    """A pattern of a difference, its interval and both p-values as all commands print them."""
    low, high = difference["interval"]
    cell = re.escape(f"{difference['mean']:+.2f} ({low:+.2f}, {high:+.2f})")
    return rf"{cell}[|\s]+{difference['p']:.3f}\d?[|\s]+{p_bootstrap:.3f}"


TEXTS = [f"this is sentence number {i} of a small test set" for i in range(25)]


def test_differences_of_translations(tmp_path, capsys):
    planned = plan("table2", "demo", out=tmp_path, seeds=2)
    claim_folder(tmp_path)
    (comparison,) = planned.all()
    outputs: dict[tuple[str, int], list[str]] = {}
    random = np.random.default_rng(1)
    shares = {"base": 0.3, "ls": 0.2, "labo": 0.15}
    for run in comparison.runs:
        share = shares[run.variant.method]
        lines = [
            " ".join("x" if random.random() < share else word for word in text.split())
            for text in TEXTS
        ]
        scores = {"bleu": sacrebleu.corpus_bleu(lines, [TEXTS]).score, "chrf": 50.0, "nll": 1.0}
        selected = {"bleu": 50.0 if run.point == "tau=1.15" else 40.0}
        results = {
            "valid": selected,
            "test": scores,
            "signature": f"labo:0|data:t@1|seed:{run.seed}",
        }
        run.directory.start(run.recipe)
        run.directory.finish({**results, "steps": 10, "seconds": 5.0})
        run.directory.records.mkdir()
        records = [sentence(text, line) for text, line in zip(TEXTS, lines, strict=True)]
        for split in ("valid", "test"):
            write_lines(run.directory.records / f"{split}.jsonl", records)
        if run.point in ("", "tau=1.15"):
            outputs[run.variant.method, run.seed] = lines
    runs = [run.path for run in comparison.selected()]
    assert len(runs) == 6
    settings = ["data.languages=[de-en,fr-en]", "data.size=8000", "optim.warmup_steps=150"]
    compare = ["cldr", *settings, "--methods", "base,ls,labo:warmup_steps=200"]
    compare += ["--grid", "labo.tau=1.15,1.25", "--out", str(comparison.out)]
    page = tmp_path / "report.html"
    ended_of = {
        "compare": labo(capsys, "compare", *compare, "--seeds", 2),
        "analyze": labo(capsys, "analyze", *runs),
        "report": labo(capsys, "report", *runs, "-o", page),
        "reproduce": labo(capsys, "reproduce", "table2", "--seeds", 2, "--out", tmp_path),
    }
    assert [ended.status for ended in ended_of.values()] == [0] * 4
    printed = {command: ended.out for command, ended in ended_of.items()}
    text = re.sub("<[^>]*>", " ", page.read_text(encoding="utf-8"))
    printed["report"] = text.replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
    drawn = {key: bootstrap_bleu(lines, TEXTS) for key, lines in outputs.items()}
    for method, reference in (("ls", "base"), ("labo", "base"), ("base", "ls"), ("labo", "ls")):
        ours, theirs = ([drawn[name, seed] for seed in (0, 1)] for name in (method, reference))
        difference = paired_difference([d[0] for d in ours], [d[0] for d in theirs])
        pattern = shown(difference, paired_bootstrap(ours, theirs))
        for command, said in printed.items():
            assert re.search(pattern, said), (command, pattern)
