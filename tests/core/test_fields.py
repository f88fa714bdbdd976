"""One declaration: a field of a loss is in the function, the help, the recipes and the backends."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from tools import functional_stub, recipe_page
from torch import Tensor

import labo
from labo import cli
from labo.fast import dispatch
from labo.fast.formula import plan_of
from labo.fields import POSITIVE, Range
from labo.lab.methods import METHODS, Method, hyper_parameters
from labo.loss import Loss, function_of, hyper
from labo.sums import RowSums

SOURCE = Path(labo.__file__).parent


class Scaled(Loss):
    r"""Cross entropy of tempered logits, times a factor.

    .. math:: f\,\tau\,(-\log p_y)
    """

    name, function_name = "scaled", "scaled_loss"

    factor: float = hyper(default=2.0, within=POSITIVE, doc="the factor f of the whole loss")
    tau: float = hyper(default=1.5, within=POSITIVE, doc="temperature of the logits")

    def value(self, row: RowSums) -> Tensor:
        return self.factor * row.weigh(row.tempered(self.tau).log() - row.u_y / self.tau)


def test_a_field_is_an_argument_of_module_and_function():
    function = function_of(Scaled)
    for of in (Scaled, function):
        assert inspect.signature(of).parameters["factor"].default == 2.0
        assert "factor: the factor f of the whole loss." in of.__doc__
        with pytest.raises(TypeError, match="unexpected keyword argument 'facto'"):
            of(**({} if of is Scaled else {"logits": 0, "target": 0}), facto=1.0)
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    expected = 3 * torch.nn.functional.cross_entropy(logits / 1.5, target)
    torch.testing.assert_close(function(logits, target, factor=3.0), expected)
    torch.testing.assert_close(Scaled(factor=3.0)(logits, target), expected)
    assert repr(Scaled()) == "Scaled(factor=2.0, tau=1.5)"


def test_its_range_is_checked_everywhere():
    sentence = "factor must be a finite number above 0, got -1"
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    loss = Scaled()
    with pytest.raises(ValueError, match=sentence):
        Scaled(factor=-1)
    with pytest.raises(ValueError, match=sentence):
        loss.factor = -1
    with pytest.raises(ValueError, match=sentence):
        function_of(Scaled)(logits, target, factor=-1)


def test_it_reaches_every_backend_and_the_operators():
    logits, target = torch.randn(3, 40, requires_grad=True), torch.tensor([0, 1, 2])
    (expected,) = torch.autograd.grad(Scaled(impl="reference", factor=3.0)(logits, target), logits)
    for impl in ("blocked", "native"):
        loss = Scaled(impl=impl, factor=3.0)
        torch.testing.assert_close(torch.autograd.grad(loss(logits, target), logits)[0], expected)
    torch.testing.assert_close(
        labo.linear_loss(logits, torch.eye(40), target, Scaled(factor=3.0)),
        Scaled(factor=3.0)(logits, target),
    )
    assert plan_of(Scaled(), weighted=False).tau == 1.5
    again = dispatch.FastRows.unpack(*dispatch.FastRows(Scaled(factor=3.0), "blocked").pack())
    assert again.loss.factor == 3.0


def test_it_is_a_recipe_key_with_help_and_a_row_on_the_page_of_keys(monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "scaled", Method(Scaled))
    monkeypatch.setenv("COLUMNS", "400")
    field = hyper_parameters("scaled", "image_classification").model_fields["factor"]
    assert (field.default, field.description) == (2.0, "the factor f of the whole loss.")
    cli.methods("image_classification")
    row = next(line for line in capsys.readouterr().out.splitlines() if "scaled" in line)
    assert "Cross entropy of tempered logits, times a factor" in row
    assert "factor=2.0 tau=1.5" in row
    _, _, section = recipe_page.page().partition("### `scaled`")
    key = next(line for line in section.splitlines() if "method.factor" in line)
    assert "2.0" in key
    assert "The factor f of the whole loss." in key


def test_what_all_losses_share_is_declared_once():
    shared = ("weight", "ignore_index", "reduction", "dim", "z_loss", "impl", "inplace")
    assert tuple(Loss.fields) == shared
    text = "".join(path.read_text() for path in sorted(SOURCE.glob("losses/*.py")))
    for name in shared:
        assert not re.search(rf"^    {name}: .*= hyper\(", text, re.MULTILINE), name
    for loss in labo.losses.ALL:
        assert {*shared} - {*loss.without} <= {*loss.fields}


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "sentence"),
    [
        (Range(at_least=0, at_most=1), (0, 0.5, 1), (-0.1, 1.1, True, "x"), r"in \[0, 1\]"),
        (Range(above=0), (1e-9, 5), (0, float("inf"), float("nan")), "a finite number above 0"),
        (Range(at_least=2, whole=True), (2, 3), (1, 2.0), "a whole number of 2 or more"),
    ],
)
def test_ranges(limits, inside, outside, sentence):
    for value in (*inside, None, torch.tensor(7.0)):
        limits.check("x", value)
    for value in outside:
        with pytest.raises(ValueError, match=f"x must be .*{sentence}, got"):
            limits.check("x", value)


def test_a_formula_has_one_temperature():
    class Two(Loss):
        def value(self, row: RowSums) -> Tensor:
            return row.tempered(1.0) + row.tempered(2.0)

    with pytest.raises(ValueError, match=r"a formula has one tau, not 1\.0 and 2\.0"):
        plan_of(Two(), weighted=False)


def test_the_stub_for_editors_is_current():
    assert functional_stub.OUT.read_text() == functional_stub.stub()
