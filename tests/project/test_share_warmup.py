"""tools/share_warmup.py: a LABO run that starts from one with label smoothing has the same bits."""

from __future__ import annotations

import pytest
from tools import share_warmup

from labo.lab.errors import RequestError
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import MODEL, RunDirectory
from labo.lab.train import train

SHORT = ["train.epochs=3", "train.batch_size=256", "seed=5"]
STEPS = 6  # of an epoch
LABO = [*SHORT, f"method.warmup_steps={2 * STEPS + 1}"]


def trained(out, *keys):
    train(load_recipe("digits", keys), out)
    return RunDirectory(out)


def test_it_has_the_bits_of_a_run_from_the_start(tmp_path):
    smoothed = trained(tmp_path / "ls", *SHORT, "method=ls")
    whole = trained(tmp_path / "labo", *LABO)
    shared = RunDirectory(tmp_path / "shared")
    assert share_warmup.share(smoothed, shared, "digits", LABO) == 2 * STEPS
    train(load_recipe("digits", LABO), shared.path)
    assert (shared.best / MODEL).read_bytes() == (whole.best / MODEL).read_bytes()
    assert shared.results()["test"] == whole.results()["test"]
    assert (shared.best / MODEL).read_bytes() != (smoothed.best / MODEL).read_bytes()


def test_another_recipe_is_refused(tmp_path):
    smoothed = trained(tmp_path / "ls", *SHORT, "method=ls")
    out = RunDirectory(tmp_path / "shared")
    with pytest.raises(RequestError, match=r"differ in optim\.lr"):
        share_warmup.share(smoothed, out, "digits", [*LABO, "optim.lr=0.1"])
    with pytest.raises(RequestError, match="wanted labo after"):
        share_warmup.share(smoothed, out, "digits", [*LABO, "method.warmup_alpha=0.2"])
    with pytest.raises(RequestError, match="no checkpoint before step 1"):
        share_warmup.share(smoothed, out, "digits", [*SHORT, "method.warmup_steps=1"])
    assert not out.path.exists()
