"""Calibration errors and the temperature: oracles, worked numbers, and what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

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


def drawn(seed, rows, classes, *, sharpness=1.0, masked=False, dtype=torch.float64):
    """Logits and labels drawn from them, the logits then sharpened; some classes masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    logits = logits * sharpness
    if masked and classes > 2:
        others = torch.rand(rows, classes, generator=generator) < 0.3
        others[torch.arange(rows), target] = False
        logits = logits.masked_fill(others, -math.inf)
    return logits.to(dtype), target


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


def nll(logits, labels, temperature):
    log_p = log_softmax(logits / temperature, -1)
    return -log_p[np.arange(len(labels)), labels].mean()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(2, 6),
    sharpness=st.floats(0.05, 20),
    masked=st.booleans(),
)
def test_the_temperature_is_the_minimum_that_scipy_finds(seed, classes, sharpness, masked):
    logits, target = drawn(seed, 60, classes, sharpness=sharpness, masked=masked)
    scores, labels = logits.numpy(), target.numpy()
    try:
        fit = calibration.fit_temperature(logits, target)
    except calibration.TemperatureError:
        ends = [nll(scores, labels, T) for T in (1e-9 * sharpness, 1e9 * sharpness)]
        inside = [nll(scores, labels, sharpness * T) for T in np.geomspace(1e-3, 1e3, 61)]
        assert min(ends) <= min(inside) + 1e-9
        return
    log_t = math.log(fit.temperature)
    found = minimize_scalar(
        lambda u: nll(scores, labels, math.exp(u)),
        bounds=(log_t - 2, log_t + 2),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert fit.nll_after <= found.fun + 1e-13
    assert log_t == pytest.approx(found.x, abs=1e-5)  # as near as values of a minimum can tell
    assert fit.nll_before == pytest.approx(nll(scores, labels, 1.0), rel=1e-12)
    assert fit.nll_after == pytest.approx(nll(scores, labels, fit.temperature), rel=1e-12)
    assert fit.nll_after <= fit.nll_before + 1e-15
    assert fit.count == 60
    again = calibration.fit_temperature(logits / fit.temperature, target)
    assert again.temperature == pytest.approx(1, abs=1e-9)


# ------------------------------------------------------------------ worked numbers


def pairs(*confidences):
    """Logits of two classes, the first of which has these probabilities."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([p, 1 - p], -1).log()


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


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_of_drawn_labels_undoes_the_sharpening(sharpness):
    logits, target = drawn(0, 20_000, 5, sharpness=sharpness)
    fit = calibration.fit_temperature(logits, target)
    assert fit.temperature == pytest.approx(sharpness, rel=0.05)
    after = calibration.expected_calibration_error(logits, target, temperature=fit.temperature)
    assert after < 0.01


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


@settings(max_examples=15, deadline=None)
@given(DATA)
def test_the_size_of_blocks(drawing):
    logits, target = data(drawing)
    expected = results(logits, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_batches, "_BLOCK", 3 * logits.shape[-1])
        assert results(logits, target) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(DATA)
def test_strided_views_and_the_dimension_of_the_classes(drawing):
    logits, target = data(drawing)
    expected = pytest.approx(results(logits, target), rel=1e-9, abs=1e-12)
    wide = torch.full((len(logits), 2 * logits.shape[-1]), math.nan, dtype=torch.float64)
    wide[:, ::2] = logits
    assert results(wide[:, ::2], target) == expected
    assert results(logits.T.contiguous(), target, dim=0) == expected
    even = len(logits) // 2 * 2
    image = logits[:even].reshape(2, even // 2, -1).permute(0, 2, 1)  # (2, K, H)
    rows = results(image, target[:even].reshape(2, -1), dim=1)
    assert rows == pytest.approx(results(logits[:even], target[:even]), rel=1e-9, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(DATA, st.sampled_from([-100, 2]))
def test_ignored_rows_count_nothing_whatever_they_hold(drawing, ignore_index):
    logits, target = data(drawing)
    keep = target != ignore_index
    expected = results(logits[keep], target[keep])
    junk = torch.tensor([[math.nan], [math.inf], [-math.inf]]).double().expand(3, logits.shape[-1])
    logits = torch.cat([junk, logits])
    target = torch.cat([torch.full((3,), ignore_index), target])
    found = results(logits, target, ignore_index=ignore_index)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(DATA)
def test_class_indices_are_one_hot_probabilities(drawing):
    logits, target = data(drawing)
    one_hot = torch.nn.functional.one_hot(target, logits.shape[-1]).double()
    expected = results(logits, target)
    assert results(logits, one_hot) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(DATA)
def test_a_constant_added_to_a_row_changes_nothing(drawing):
    logits, target = data(drawing)
    moved = logits + torch.linspace(-50, 50, len(logits)).double().unsqueeze(-1)
    assert results(moved, target) == pytest.approx(results(logits, target), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, target = drawn(3, 300, 7, sharpness=1.5, masked=True, dtype=dtype)
    assert results(logits, target) == results(logits.float(), target)
    exact = results(logits.double(), target)
    assert results(logits, target) == pytest.approx(exact, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e12, 1e30])
def test_the_scale_of_the_logits(scale):
    logits, target = drawn(0, 200, 5)
    exact = calibration.fit_temperature(logits, target)
    fit = calibration.fit_temperature(logits * scale, target)
    assert fit.temperature == pytest.approx(scale * exact.temperature, rel=1e-9)
    assert fit.nll_after == pytest.approx(exact.nll_after, rel=1e-12)
    rounded = calibration.fit_temperature((logits * scale).float(), target)
    assert rounded.temperature == pytest.approx(scale * exact.temperature, rel=1e-5)


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


def test_several_processes_sum_their_shares():
    logits, target = drawn(0, 60, 4, sharpness=2.0)
    whole = calibration.fit_temperature(logits, target)
    # What the other process would send, pass by pass: recorded from a fit of the whole.
    sums: list[torch.Tensor] = []
    calibration.fit_temperature(logits, target, reduce=lambda x: sums.append(x.clone()) or x)
    sent = iter(sums)
    found = calibration.fit_temperature(
        [(logits[:0], target[:0])], reduce=lambda mine: mine + next(sent)
    )
    assert found == whole


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_few_passes_are_enough(sharpness):
    logits, target = drawn(0, 500, 10, sharpness=sharpness)
    passes = []
    calibration.fit_temperature(lambda: passes.append(1) or [(logits, target)])
    assert len(passes) <= 5


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("logits", "target", "sentence"),
    [
        (pairs(0.7, 0.6), [0, 0], "all 2 predictions are right.* as T does"),
        (pairs(0.7, 0.6), [1, 1], "NLL falls as T grows"),
        (pairs(0.7, 0.7), [0, 1], "NLL falls as T grows"),
        (pairs(0.5, 0.5), [0, 1], "all equal"),
        (torch.zeros(3, 1), [0, 0, 0], "all equal"),
    ],
)
def test_no_minimum(logits, target, sentence):
    with pytest.raises(calibration.TemperatureError, match=sentence):
        calibration.fit_temperature(logits, torch.tensor(target))


def nan_row(value):
    logits, target = drawn(0, 5, 3)
    logits[3] = value
    return logits, target


@pytest.mark.parametrize("measure", [*MEASURES.values(), calibration.fit_temperature])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution(measure, value):
    with pytest.raises(ValueError, match="a row that counts hold NaN or"):
        measure(*nan_row(value))


@pytest.mark.parametrize("measure", [*MEASURES.values(), calibration.fit_temperature])
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


@pytest.mark.parametrize("measure", [*MEASURES.values(), calibration.fit_temperature])
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
    with pytest.raises(ValueError, match="a batch has 3 classes, and one before 4"):
        calibration.classwise_calibration_error([drawn(0, 5, 4), drawn(0, 5, 3)])


def test_what_a_fit_cannot_use():
    logits, target = drawn(0, 50, 3)
    with pytest.raises(TypeError, match="an iterator can be read once"):
        calibration.fit_temperature((part, target[:10]) for part in logits.split(10))
    with pytest.raises(ValueError, match="a label has the logit -inf"):
        calibration.fit_temperature(
            logits.masked_fill(torch.arange(3) == target[0], -math.inf), target
        )
    drop = torch.nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"is the model in eval mode\?"):
        calibration.fit_temperature(lambda: [(drop(logits), target)])
    remaining = [[(logits, target)] * 2, [(logits, target)]]
    with pytest.raises(ValueError, match="the batches changed"):
        calibration.fit_temperature(lambda: remaining.pop(0))
