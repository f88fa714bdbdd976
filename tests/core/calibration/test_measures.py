"""Calibration errors: oracles, worked numbers, and what must not matter, also for the fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from drawn_labels import drawn, pairs
from labo import calibration
from labo.calibration import _batches

MEASURES = {
    "ece": calibration.expected_calibration_error,
    "adaptive": calibration.adaptive_calibration_error,
    "maximum": calibration.maximum_calibration_error,
    "classwise": calibration.classwise_calibration_error,
    "brier": calibration.brier_score,
}
each_measure = pytest.mark.parametrize("name", MEASURES)
each_reader = pytest.mark.parametrize("measure", [*MEASURES.values(), calibration.fit_temperature])


# ------------------------------------------------------------------ oracles


def oracle(name, p, labels, bins=15):
    """The measures in numpy, from probabilities (N, K) and labels (N,)."""
    n, k = p.shape
    right = (p.argmax(-1) == labels).astype(float)
    confidence = p.max(-1)

    def by_width(c, r):
        index = np.searchsorted(np.arange(1, bins) / bins, c, side="right")
        return [(c[index == b], r[index == b]) for b in range(bins) if (index == b).any()]

    if name == "brier":
        return ((p - np.eye(k)[labels]) ** 2).sum(-1).mean()
    if name == "classwise":
        each = [by_width(p[:, j], (labels == j).astype(float)) for j in range(k)]
        return sum(abs(c.sum() - r.sum()) for found in each for c, r in found) / (n * k)
    if name == "adaptive":
        order = np.argsort(confidence, kind="stable")
        runs = np.array_split(order, min(bins, n))
        found = [(confidence[run], right[run]) for run in runs]
    else:
        found = by_width(confidence, right)
    gaps = [abs(c.mean() - r.mean()) for c, r in found]
    if name == "maximum":
        return max(gaps)
    return sum(gap * len(c) for gap, (c, _) in zip(gaps, found, strict=True)) / n


@each_measure
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 80),
    classes=st.integers(1, 7),
    bins=st.integers(1, 20),
    masked=st.booleans(),
    temperature=st.sampled_from([0.4, 1.0, 3.0]),
)
def test_against_numpy(name, seed, rows, classes, bins, masked, temperature):
    logits, target = drawn(seed, rows, classes, sharpness=1.5, masked=masked)
    options = {} if name == "brier" else {"bins": bins}
    found = MEASURES[name](logits, target, temperature=temperature, **options)
    p = softmax(logits.numpy() / temperature, -1)
    assert found == pytest.approx(oracle(name, p, target.numpy(), bins), abs=1e-12)


# ------------------------------------------------------------------ worked numbers


def test_worked_numbers():
    # Two bins. Below 0.5 nothing is; in [0.5, 1]: 0.6, 0.7, 0.9, 1.0 with three right.
    logits, target = pairs(0.6, 0.7, 0.9, 1.0), torch.tensor([0, 1, 0, 0])
    assert calibration.expected_calibration_error(logits, target, bins=2) == pytest.approx(0.05)
    assert calibration.maximum_calibration_error(logits, target, bins=2) == pytest.approx(0.05)
    # In order, cut 2 + 2: |1.3 - 1| and |1.9 - 2|.
    assert calibration.adaptive_calibration_error(logits, target, bins=2) == pytest.approx(0.1)
    # 2 (1 - p_label)^2: 2 (0.16 + 0.49 + 0.01 + 0) / 4
    assert calibration.brier_score(logits, target) == pytest.approx(0.33)
    found = calibration.reliability_bins(logits, target, bins=5)
    assert found.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert found.count.tolist() == [0, 0, 0, 2, 2]
    torch.testing.assert_close(found.gap, torch.tensor([0, 0, 0, 0.15, -0.05]).double())


def test_three_classes_and_a_temperature_by_hand():
    p = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)
    # freq - conf of each class: 1/2 - 0.6, 0 - 0.3, 1/2 - 0.1
    found = calibration.classwise_calibration_error(p.log(), torch.tensor([0, 2]))
    assert found == pytest.approx((0.1 + 0.3 + 0.4) / 3)
    # sigmoid(log 9 / T) = 3/4, so log 9 / T = log 3
    fit = calibration.fit_temperature(pairs(*[0.9] * 4), torch.tensor([0, 0, 0, 1]))
    assert fit.temperature == pytest.approx(2, rel=1e-12)
    assert fit.nll_after == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert fit.nll_before == pytest.approx(-0.75 * math.log(0.9) - 0.25 * math.log(0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_belong_to_the_bin_above_and_the_last_bin_is_closed(dtype):
    """Every edge, though 0.57 * 100 is 56.99999999999999 in floating point."""
    for bins in (1, 3, 10, 15, 49, 100, 1000):
        edges = (torch.arange(bins + 1, dtype=torch.float64) / bins).to(dtype)
        found = calibration.ReliabilityBins.of(edges, torch.ones(bins + 1), bins)
        assert found.count.tolist() == [1] * (bins - 1) + [2]
        assert found.edges[:-1].tolist() == [b / bins for b in range(bins)]
        below = edges[1:].nextafter(torch.zeros(()).to(dtype))
        found = calibration.ReliabilityBins.of(below, torch.ones(bins), bins)
        assert found.count.tolist() == [1] * bins


def test_an_empty_bin_has_no_mean_and_no_gap():
    found = calibration.ReliabilityBins.of(torch.tensor([1.0]), torch.tensor([True]), bins=3)
    assert found.count.tolist() == [0, 0, 1]
    assert found.confidence[:2].isnan().all()
    assert found.expected_error == found.maximum_error == 0


def test_bins_of_batches_and_processes_are_added():
    logits, target = drawn(0, 50, 4)
    whole = calibration.reliability_bins(logits, target)
    nothing = calibration.reliability_bins(logits[:0], target[:0])
    assert nothing.count.sum() == 0
    shares = [
        calibration.reliability_bins(z, y)
        for z, y in zip(logits.split(20), target.split(20), strict=True)
    ]
    total = sum(shares, nothing)
    assert torch.equal(total.count, whole.count)
    assert total.expected_error == pytest.approx(whole.expected_error, rel=1e-12)
    torch.testing.assert_close(total.accuracy, whole.accuracy, equal_nan=True)
    with pytest.raises(ValueError, match="only bins with the same edges"):
        _ = whole + calibration.reliability_bins(logits, target, bins=3)


def test_adaptive_bins():
    confidence = torch.tensor([0.9, 0.1, 0.5, 0.7, 0.3])
    found = calibration.ReliabilityBins.of(confidence, torch.ones(5), bins=2, adaptive=True)
    assert found.count.tolist() == [3, 2]
    torch.testing.assert_close(found.confidence, torch.tensor([0.3, 0.8]).double())
    torch.testing.assert_close(found.edges, torch.tensor([0.1, 0.7, 0.9]).double())
    few = calibration.ReliabilityBins.of(confidence, torch.ones(5), bins=9, adaptive=True)
    assert few.count.tolist() == [1] * 5


def test_equal_confidences_share_their_accuracy():
    right = torch.tensor([True, True, False, False])
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0]):
        found = calibration.ReliabilityBins.of(
            torch.full((4,), 0.5), right[order], bins=2, adaptive=True
        )
        assert found.expected_error == 0


# ------------------------------------------------------------------ what must not matter


def results(logits, target=None, **options):
    """Every measure and the fitted temperature."""
    found = {name: measure(logits, target, **options) for name, measure in MEASURES.items()}
    fit = calibration.fit_temperature(logits, target, **options)
    return [*found.values(), fit.temperature, fit.nll_before, fit.nll_after]


DATA = st.tuples(st.integers(0, 10_000), st.integers(20, 60), st.integers(3, 6), st.booleans())


def data(drawing):
    seed, rows, classes, masked = drawing
    logits, target = drawn(seed, rows, classes, sharpness=1.5, masked=masked)
    # One label that is surely wrong and one that is surely right: there is a best temperature.
    logits[:2] = torch.arange(classes).double()
    target[0], target[1] = 0, classes - 1
    return logits, target


@settings(max_examples=25, deadline=None)
@given(DATA, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_batches(drawing, random):
    logits, target = data(drawing)
    order = list(range(len(logits)))
    random.shuffle(order)
    size = random.randint(1, len(logits))
    batches = list(zip(logits[order].split(size), target[order].split(size), strict=True))
    expected = pytest.approx(results(logits, target), rel=1e-9, abs=1e-12)
    assert results(batches) == expected
    assert results(lambda: iter(batches)) == expected


def in_blocks(logits, target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_batches, "_BLOCK", 3 * logits.shape[-1])
        return results(logits, target)


def strided(logits, target):
    wide = torch.full((len(logits), 2 * logits.shape[-1]), math.nan, dtype=torch.float64)
    wide[:, ::2] = logits
    return results(wide[:, ::2], target)


def with_ignored_rows(logits, target):
    """They count nothing whatever they hold."""
    junk = torch.tensor([[math.nan], [math.inf], [-math.inf]]).double().expand(3, logits.shape[-1])
    return results(torch.cat([junk, logits]), torch.cat([torch.full((3,), -100), target]))


def shifted(logits, target):
    """A constant is added to each row."""
    return results(logits + torch.linspace(-50, 50, len(logits)).double().unsqueeze(-1), target)


def one_hot(logits, target):
    return results(logits, torch.nn.functional.one_hot(target, logits.shape[-1]).double())


def classes_first(logits, target):
    return results(logits.T.contiguous(), target, dim=0)


@pytest.mark.parametrize(
    "changed", [in_blocks, strided, with_ignored_rows, shifted, one_hot, classes_first]
)
@settings(max_examples=15, deadline=None)
@given(DATA)
def test_what_changes_nothing(changed, drawing):
    logits, target = data(drawing)
    tolerance = 1e-7 if changed is shifted else 1e-9
    expected = pytest.approx(results(logits, target), rel=tolerance, abs=tolerance)
    assert changed(logits, target) == expected


@settings(max_examples=15, deadline=None)
@given(DATA)
def test_images_and_an_ignored_class(drawing):
    logits, target = data(drawing)
    even = len(logits) // 2 * 2
    image = logits[:even].reshape(2, even // 2, -1).permute(0, 2, 1)  # (2, K, H)
    rows = results(image, target[:even].reshape(2, -1), dim=1)
    assert rows == pytest.approx(results(logits[:even], target[:even]), rel=1e-9, abs=1e-12)
    kept = results(logits[target != 2], target[target != 2])
    assert results(logits, target, ignore_index=2) == pytest.approx(kept, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, target = drawn(3, 300, 7, sharpness=1.5, masked=True, dtype=dtype)
    assert results(logits, target) == results(logits.float(), target)
    exact = results(logits.double(), target)
    assert results(logits, target) == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_soft_labels():
    logits, target = drawn(0, 50, 4)
    label = 0.8 * torch.nn.functional.one_hot(target, 4).double() + 0.05
    fit = calibration.fit_temperature(logits, label)

    def loss(T):
        return torch.nn.functional.cross_entropy(logits / T, label).item()

    assert fit.nll_after == pytest.approx(loss(fit.temperature), rel=1e-12)
    assert fit.nll_after < min(loss(fit.temperature * 1.01), loss(fit.temperature / 1.01))
    p = logits.softmax(-1)
    expected = (p - label).square().sum(-1).mean().item()
    assert calibration.brier_score(logits, label) == pytest.approx(expected, rel=1e-12)
    correct = label.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    bins = calibration.ReliabilityBins.of(p.amax(-1), correct)
    found = calibration.expected_calibration_error(logits, label)
    assert found == pytest.approx(bins.expected_error, rel=1e-12)


def test_no_graph_is_recorded_and_the_inputs_stay():
    logits, target = drawn(0, 50, 4)
    layer = torch.nn.Linear(4, 4, dtype=torch.float64)
    kept, graphs = logits.clone(), []

    def batches():
        for part in logits.split(10):
            out = layer(part)
            graphs.append(out.requires_grad)
            yield out, target[:10]

    calibration.fit_temperature(batches)
    calibration.expected_calibration_error(batches)
    assert graphs
    assert not any(graphs)
    results(logits, target)
    assert torch.equal(logits, kept)


# ------------------------------------------------------------------ refusals


def nan_row(value):
    logits, target = drawn(0, 5, 3)
    logits[3] = value
    return logits, target


@each_reader
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution(measure, value):
    with pytest.raises(ValueError, match="a row that counts hold NaN or"):
        measure(*nan_row(value))


@each_reader
@pytest.mark.parametrize(
    "empty",
    [
        (torch.zeros(2, 3), torch.full((2,), -100)),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)),
        ([], None),
    ],
    ids=["ignored", "no rows", "no batches"],
)
def test_nothing_to_measure(measure, empty):
    with pytest.raises(ValueError, match="no target counts"):
        measure(*empty)


@each_reader
def test_wrong_calls(measure):
    logits, target = drawn(0, 5, 3)
    with pytest.raises(TypeError, match="target is missing"):
        measure(logits)
    with pytest.raises(TypeError, match="batches hold their own targets"):
        measure([(logits, target)], target)
    with pytest.raises(TypeError, match="pair of tensors"):
        measure([logits])
    with pytest.raises(ValueError, match=r"target 7 at position 1 is outside \[0, 3\)"):
        measure(logits, torch.tensor([0, 7, 0, 0, 0]))
    with pytest.raises(ValueError, match="must have shape"):
        measure(logits, target[:3])
    with pytest.raises(ValueError, match="must be probabilities"):
        measure(logits, torch.full((5, 3), 0.5).double())
    with pytest.raises(ValueError, match="ignore_index needs class-index"):
        measure(logits, torch.full((5, 3), 1 / 3).double(), ignore_index=1)


def test_wrong_options():
    logits, target = drawn(0, 5, 3)
    with pytest.raises(ValueError, match="bins must be a whole number of 1 or more, got 0"):
        calibration.expected_calibration_error(logits, target, bins=0)
    with pytest.raises(ValueError, match=r"bins must be a whole number of 1 or more, got 2\.5"):
        calibration.classwise_calibration_error(logits, target, bins=2.5)
    with pytest.raises(ValueError, match="temperature must be a finite number above 0, got 0"):
        calibration.brier_score(logits, target, temperature=0)
    with pytest.raises(ValueError, match=r"confidence must lie in \[0, 1\]"):
        calibration.ReliabilityBins.of(torch.tensor([1.2]), torch.ones(1))
    with pytest.raises(ValueError, match="one length, got 1 and 2"):
        calibration.ReliabilityBins.of(torch.tensor([0.2]), torch.ones(2))
    for measure in (calibration.classwise_calibration_error, calibration.brier_score):
        with pytest.raises(ValueError, match="a batch has 3 classes, and one before 4"):
            measure([drawn(0, 5, 4), drawn(0, 5, 3)])
