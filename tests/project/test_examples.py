"""Every example runs, at a tiny size, and prints what its docstring shows, numbers apart."""

from __future__ import annotations

import re
import warnings

import pytest

from scripts import EXAMPLES, load_example

# How to make each one tiny. An example without a line here fails the first test.
TINY = {
    "calibration": ["--epochs", "2"],
    "causal_lm": ["--steps", "3", "--size", "16"],
    "custom_smoothing": ["--epochs", "1"],
    "digits": ["--seeds", "1", "--epochs", "2"],
    "distillation": ["--steps", "5"],
    "image_training": ["--epochs", "1"],
    "lightning_module": ["--epochs", "5"],
    "mixup": ["--epochs", "1"],
    "plain_loop": ["--epochs", "1"],
    "seq2seq_trainer": ["--steps", "3"],
}
# What some need beyond torch; these libraries give advice as warnings.
NEEDS = {"causal_lm": "transformers", "lightning_module": "lightning"}
NEEDS |= {"seq2seq_trainer": "transformers"}
SHOWN = re.compile(r"^    \$ python examples/(\w+)\.py.*\n((?:    .*\n)+)", re.MULTILINE)
NUMBER = re.compile(r"\d+(\.\d+)?")


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TINY.keys()


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with warnings.catch_warnings():
        if name in NEEDS:
            pytest.importorskip(NEEDS[name])
            warnings.simplefilter("ignore")
        load_example(name).main(TINY[name])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in TINY if name != "digits"])
def test_the_docstring_shows_what_is_printed(name, capsys):
    shown_name, shown = SHOWN.search(load_example(name).__doc__).groups()
    assert shown_name == name

    def form(text: str) -> list[str]:
        """The lines without numbers, the spaces that their lengths make, and what a model said."""
        lines = [line.partition(":")[0] for line in text.splitlines()]
        return [" ".join(NUMBER.sub("#", line).split()) for line in lines]

    assert form(run(name, capsys)) == form(shown)


def test_digits_compares_all_losses(capsys):
    printed = run("digits", capsys)
    assert "LABO tau 1.25" in printed
    assert printed.count("±") == 20


@pytest.mark.parametrize("name", TINY)
def test_an_example_fits_one_screen(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 110
