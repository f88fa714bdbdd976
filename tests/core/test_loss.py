"""What every loss does alike: shapes, dtypes, edges, compilation, determinism, errors.

A property that comes from one helper of src runs on one loss of each kind. A property that a
formula can break runs on every loss.
"""

from __future__ import annotations

import math

import pytest
import torch

import labo
from conftest import LOSS_CASES, REPRESENTATIVES, each_kind, each_loss, gradient
from labo import functional as F
from labo import smoothing

CASES = {case.name: case for case in LOSS_CASES}
ROWWISE = [case for case in REPRESENTATIVES if case.rowwise]


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * torch.randn(shape, dtype=dtype), torch.randint(shape[-1], shape[:-1])


# ------------------------------------------------------------------ shapes


@each_kind
def test_any_leading_shape(case):
    logits, target = sample(2, 3, 4, 5)
    value = case(logits, target, reduction="none")
    assert value.shape == target.shape
    flat = case(logits.reshape(-1, 5), target.reshape(-1), reduction="none")
    torch.testing.assert_close(value.reshape(-1), flat)


@each_kind
def test_no_leading_dimension(case):
    logits, target = sample(5)
    for reduction in ("none", "mean", "sum"):
        assert case(logits, target, reduction=reduction).shape == ()


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
def test_classes_in_dimension_1(case):
    logits, target = sample(3, 2, 4, 6)
    channels = logits.movedim(-1, 1)
    extra = case.extra(logits)
    moved = tuple(x.movedim(-1, 1) if x.shape == logits.shape else x for x in extra)
    torch.testing.assert_close(
        case(channels, target, dim=1, reduction="none", extra=moved),
        case(logits, target, reduction="none", extra=extra),
    )
    if case.linear:
        soft = torch.rand_like(logits).softmax(-1)
        torch.testing.assert_close(
            case(channels, soft.movedim(-1, 1), dim=1, extra=moved),
            case(logits, soft, extra=extra),
        )


@each_kind
@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)])
def test_zero_rows(case, shape):
    logits, target = sample(*shape)
    leaf = logits.requires_grad_()
    assert case(leaf, target, reduction="none").shape == target.shape
    for reduction in ("mean", "sum"):
        value = case(leaf, target, reduction=reduction)
        assert value == 0
        value.backward()


@each_kind
def test_all_ignored_is_zero_with_a_graph(case):
    logits, target = sample(3, 5)
    leaf = logits.requires_grad_()
    value = case(leaf, torch.full_like(target, -100))
    assert value == 0
    value.backward()
    assert leaf.grad is not None
    assert leaf.grad.count_nonzero() == 0


@each_loss
def test_one_class(case):
    """With one class there is nothing to learn: no gradient, and no loss but that of penalties."""
    logits, target = sample(3, 1)
    extra = case.extra(logits)
    slope = gradient(lambda z: case(z, target, extra=extra), logits)
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    if case.name not in ("cp-hinge", "connet"):
        assert case(logits, target, extra=extra).item() == pytest.approx(0, abs=1e-12)


@each_loss
def test_two_classes(case):
    logits, target = sample(4, 2)
    extra = case.extra(logits)
    assert case(logits, target, extra=extra).isfinite()
    assert gradient(lambda z: case(z, target, extra=extra), logits).isfinite().all()


NARROW = [torch.uint8, torch.int8, torch.int16, torch.int32]


@each_kind
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_targets(case, dtype):
    """More classes than the type can name, and an ignore_index outside of it."""
    logits, _ = sample(4, 300)
    target = torch.tensor([0, 7, 100, 126])
    assert torch.equal(case(logits, target.to(dtype)), case(logits, target))
    arguments = {"ignore_index": 7}
    assert torch.equal(
        case(logits, target.to(dtype), **arguments), case(logits, target, **arguments)
    )
    with pytest.raises(IndexError, match="target 126 at position 3 is outside"):
        case(logits[:, :120], target.to(dtype))


@pytest.mark.parametrize("impl", ["reference", "blocked", "native"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_targets_on_every_backend(impl, dtype):
    classes = 33_000 if dtype == torch.int16 else 300
    logits, target = sample(3, classes, dtype=torch.float32)[0], torch.tensor([0, 7, 126])
    expected = F.labo_loss(logits, target)
    torch.testing.assert_close(F.labo_loss(logits, target.to(dtype), impl=impl), expected)
    strided = torch.stack([target, target], 1).to(dtype)[:, 0]
    torch.testing.assert_close(F.labo_loss(logits, strided, impl=impl), expected)
    hidden, matrix = torch.ones(3, 1), logits[:1].T
    torch.testing.assert_close(
        labo.linear_loss(hidden, matrix, target.to(dtype), labo.LABOLoss(), impl=impl),
        labo.linear_loss(hidden, matrix, target, labo.LABOLoss()),
    )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_targets_of_distributions(dtype):
    """As an index a uint8 tensor would be a mask."""
    logits, target = torch.randn(3, 300), torch.tensor([1, 0, 126])
    table = torch.rand(300, 300).softmax(-1)
    for function in (
        smoothing.others,
        smoothing.virtual_teacher,
        lambda z, t: smoothing.class_table(table, t, z),
        lambda z, t: smoothing.smoothed_target(t, smoothing.uniform(z), 0.1),
    ):
        assert torch.equal(function(logits, target.to(dtype)), function(logits, target))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_groups(dtype):
    logits, target = sample(4, 300)
    groups = torch.arange(300) % 3
    assert torch.equal(
        F.weighted_label_smoothing_loss(logits, target, groups.to(dtype)),
        F.weighted_label_smoothing_loss(logits, target, groups),
    )


@pytest.mark.parametrize("bad", [3, -1])
def test_groups_out_of_range_are_refused(bad):
    logits, target = sample(4, 5)
    groups = torch.tensor([0, 1, 2, bad, 0])
    with pytest.raises(ValueError, match="groups must be 0, 1 or 2, got values from"):
        F.weighted_label_smoothing_loss(logits, target, groups)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_probabilities_need_not_add_up_exactly(dtype):
    """In bfloat16, 200 times 1/200 is off by 0.002."""
    logits, _ = sample(4, 200, dtype=torch.float32)
    uniform = torch.full((4, 200), 1 / 200)
    expected = F.cross_entropy_loss(logits, uniform)
    value = F.cross_entropy_loss(logits, uniform.to(dtype))
    torch.testing.assert_close(value, expected, rtol=1e-2, atol=0)
    value = F.smoothed_cross_entropy(logits, uniform, uniform.to(dtype), alpha=1.0)
    torch.testing.assert_close(value, expected, rtol=1e-2, atol=0)
    with pytest.raises(ValueError, match="sum to 1"):
        F.cross_entropy_loss(logits, 1.05 * uniform.to(dtype))


@each_kind
def test_not_contiguous(case):
    logits, target = sample(4, 5)
    wide = torch.randn(5, 8, dtype=torch.float64)
    wide[:, ::2] = logits.T
    view = wide[:, ::2].T
    assert not view.is_contiguous()
    extra = case.extra(logits)
    torch.testing.assert_close(case(view, target, extra=extra), case(logits, target, extra=extra))
    torch.testing.assert_close(
        gradient(lambda z: case(z.T, target, extra=extra), logits.T.contiguous()).T,
        gradient(lambda z: case(z, target, extra=extra), logits),
    )


class Tagged(torch.Tensor):
    """A plain subclass."""


@each_kind
def test_subclass(case):
    logits, target = sample(4, 5)
    extra = case.extra(logits)
    value = case(logits.as_subclass(Tagged), target, extra=extra)
    torch.testing.assert_close(value.as_subclass(torch.Tensor), case(logits, target, extra=extra))


# ------------------------------------------------------------------ precision


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(case, dtype):
    logits, target = sample(4, 50, dtype=torch.float32)
    half = logits.to(dtype)
    extra = case.extra(half.float())
    value = case(half, target, extra=extra)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, case(half.float(), target, extra=extra))
    slope = gradient(lambda z: case(z, target, extra=extra), half)
    assert slope.dtype == dtype
    exact = gradient(lambda z: case(z, target, extra=extra), half.float())
    torch.testing.assert_close(slope, exact.to(dtype))


@each_kind
def test_float64_stays(case):
    logits, target = sample(4, 5)
    assert case(logits, target).dtype == torch.float64


@each_loss
def test_float32_is_accurate(case):
    logits, target = sample(16, 1000)
    extra = case.extra(logits)
    single = tuple(x.float() if x.is_floating_point() else x for x in extra)
    torch.testing.assert_close(
        case(logits.float(), target, extra=single).double(),
        case(logits.float().double(), target, extra=extra),
        rtol=2e-5,
        atol=1e-6,
    )


@each_kind
def test_autocast(case):
    logits, target = sample(4, 50, dtype=torch.float32)
    if case.linear:
        target = torch.rand(4, 50).softmax(-1)
    extra = case.extra(logits)
    plain = case(logits, target, extra=extra)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(case(logits, target, extra=extra), plain)


@each_kind
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits(case, size):
    logits, target = sample(6, 5, dtype=torch.float32)
    logits = logits.clone()
    logits[:, 1] = size
    extra = case.extra(logits)
    exact = case(logits.double(), target, reduction="none", extra=extra)
    value = case(logits, target, reduction="none", extra=extra)
    assert value.isfinite().all()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    assert gradient(lambda z: case(z, target, extra=extra), logits).isfinite().all()


@each_loss
def test_nan_stays_nan(case):
    logits, target = sample(3, 5)
    logits[1, 2] = math.nan
    extra = case.extra(torch.nan_to_num(logits))
    value = case(logits, target, reduction="none", extra=extra)
    if case.rowwise:
        assert value.isnan().tolist() == [False, True, False]
    assert case(logits, target, extra=extra).isnan()


# ------------------------------------------------------------------ determinism


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
def test_bits_depend_on_the_row_alone(case):
    """Neither the number of threads nor the other rows change a bit of value or gradient."""
    classes = 200 if "table" in case.extra.__name__ else 40_000
    logits, target = sample(3, classes, dtype=torch.float32)
    extra = case.extra(logits)

    def value_and_slope(rows):
        part = case.take(extra, rows)
        leaf = logits[rows].clone().requires_grad_()
        value = case(leaf, target[rows], reduction="none", extra=part)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        value, slope = value_and_slope(slice(None))
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (slice(0, 1), slice(1, 3), slice(None)):
                again, again_slope = value_and_slope(rows)
                assert torch.equal(again, value[rows])
                assert torch.equal(again_slope, slope[rows])
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------ compilation and transforms


@each_kind
def test_compiles_whole(case):
    """No graph break, and the same result, ignored rows included."""
    logits, target = sample(5, 6, dtype=torch.float32)
    target[2] = -100
    extra = case.extra(logits)
    eager = gradient(lambda z: case(z, target, extra=extra), logits)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda z, t, s: case(z, t, extra=s), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(logits, target, extra), case(logits, target, extra=extra))
    slope = gradient(lambda z: compiled(z, target, extra), logits)
    torch.testing.assert_close(slope, eager)


@pytest.mark.parametrize("name", ["labo", "ls", "cp"])
def test_compiles_with_inductor(name):
    case = CASES[name]
    logits, target = sample(5, 6, dtype=torch.float32)
    target[2] = -100
    torch._dynamo.reset()
    compiled = torch.compile(lambda z, t: case(z, t), fullgraph=True)
    torch.testing.assert_close(
        gradient(lambda z: compiled(z, target), logits),
        gradient(lambda z: case(z, target), logits),
    )
    with pytest.raises(RuntimeError):
        compiled(logits, torch.full_like(target, 6))


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
def test_func_transforms(case):
    logits, target = sample(4, 5)
    extra = case.extra(logits)

    def one(z, t, *teacher):
        return case(z, t, extra=teacher or extra)

    teachers = extra if case.has_teacher else ()
    each = torch.func.vmap(torch.func.grad(one))(logits, target, *teachers)
    whole = gradient(lambda z: case(z, target, reduction="sum", extra=extra), logits)
    torch.testing.assert_close(each, whole)


# ------------------------------------------------------------------ wrong use


@each_kind
def test_refuses_wrong_shapes(case):
    logits, target = sample(4, 5)
    extra = case.extra(logits)
    with pytest.raises(ValueError, match=r"shape \(4,\).*got \(3,\)"):
        case(logits, target[:3], extra=extra)
    image, _ = sample(2, 5, 3)
    with pytest.raises(ValueError, match=r"dimension 1: pass dim=1"):
        case(image, torch.zeros(2, 3, dtype=torch.long), extra=case.extra(image))
    with pytest.raises(ValueError, match=r"last dimension: pass dim=-1"):
        case(image, torch.zeros(2, 5, dtype=torch.long), dim=1, extra=case.extra(image))


@each_kind
def test_refuses_wrong_values(case):
    logits, target = sample(4, 5)
    extra = case.extra(logits)
    with pytest.raises(TypeError, match="logits must be a tensor, got dict: pass the logits of"):
        case({"logits": logits}, target, extra=extra)
    with pytest.raises(TypeError, match="target must be a tensor, got list: pass class indices"):
        case(logits, target.tolist(), extra=extra)
    with pytest.raises(TypeError, match=r"logits must be floating point, got torch\.int64"):
        case(logits.long(), target, extra=extra)
    with pytest.raises(TypeError, match=r"got torch\.bool"):
        case(logits, target > 2, extra=extra)
    with pytest.raises(ValueError, match="class indices must be integers"):
        case(logits, target.double(), extra=extra)
    for bad in (5, -1):
        wrong = target.clone()
        wrong[2] = bad
        sentence = (
            rf"target {bad} at position 2 is outside \[0, 5\) and is not ignore_index \(-100\)"
        )
        with pytest.raises(IndexError, match=sentence):
            case(logits, wrong, extra=extra)
    with pytest.raises(ValueError, match=r"unknown reduction 'meen'; did you mean 'mean'\?"):
        case(logits, target, reduction="meen", extra=extra)
    with pytest.raises(ValueError, match=r"weight must have shape \(5,\)"):
        case(logits, target, weight=torch.ones(4), extra=extra)
    with pytest.raises(ValueError, match="dim=3 is not a dimension"):
        case(logits, target, dim=3, extra=extra)
    with pytest.raises(ValueError, match="without dimensions"):
        case(logits[0, 0], target, extra=extra)


def test_position_of_a_bad_target_in_several_dimensions():
    logits, target = sample(2, 3, 5)
    target[1, 2] = 9
    with pytest.raises(ValueError, match=r"target 9 at position \(1, 2\)"):
        F.labo_loss(logits, target)


@pytest.mark.parametrize("case", [c for c in REPRESENTATIVES if c.linear], ids=lambda c: c.name)
def test_refuses_targets_that_are_no_probabilities(case):
    logits, _ = sample(4, 5)
    extra = case.extra(logits)
    probabilities = torch.rand_like(logits).softmax(-1)
    with pytest.raises(ValueError, match="sum to 1"):
        case(logits, 1.1 * probabilities, extra=extra)
    negative = probabilities.clone()
    negative[0, 0] -= 1
    negative[0, 1] += 1
    with pytest.raises(ValueError, match="0 or more"):
        case(logits, negative, extra=extra)
    with pytest.raises(ValueError, match="ignore_index needs class-index targets"):
        case(logits, probabilities, ignore_index=1, extra=extra)


WRONG = [
    (F.labo_loss, {"tau": 0.0}, "tau must be a finite number above 0"),
    (F.labo_loss, {"tau": -1.0}, "tau must be a finite number above 0"),
    (F.labo_loss, {"tau": math.nan}, "tau must be a finite number above 0"),
    (F.labo_loss, {"rho": 1.5}, r"rho must be a number in \[0, 1\]"),
    (F.labo_loss, {"alpha": -0.1}, r"alpha must be a number in \[0, 1\]"),
    (F.labo_loss, {"alpha": "adaptiv"}, 'or "adaptive", got'),
    (F.label_smoothing_loss, {"alpha": -0.1}, r"alpha must be a number in \[0, 1\], got -0.1"),
    (F.label_smoothing_loss, {"alpha": 1.5}, r"alpha must be a number in \[0, 1\], got 1.5"),
    (F.label_smoothing_loss, {"convention": "fairsec"}, "did you mean 'fairseq'"),
    (F.label_smoothing_loss, {"convention": "joeynmt"}, "padding_idx go together"),
    (F.label_smoothing_loss, {"padding_idx": 0}, "padding_idx go together"),
    (F.confidence_penalty_loss, {"beta": -1}, "beta must be a finite number of 0 or more"),
    (F.focal_loss, {"gamma": -1}, "gamma must be"),
    (F.anti_focal_loss, {"scale": -2}, "scale must be"),
    (F.poly1_loss, {"epsilon": -1.1}, "epsilon must be a finite number of -1 or more"),
    (F.margin_smoothing_loss, {"margin": -1}, "margin must be a finite number of 0 or more"),
    (F.eaft_loss, {"top_k": 1}, "top_k must be a whole number of 2 or more, got 1"),
    (F.eaft_loss, {"normalizer": "log"}, 'a finite number above 0 or "log_k", got'),
    (F.tf_reg_loss, {"mode": "papper"}, "did you mean 'paper'"),
    (F.generalized_entropy_loss, {"alpha": 2}, "alpha must be"),
    (F.generalized_entropy_loss, {"prior": torch.ones(3) / 3}, r"prior must have shape \(5,\)"),
    (F.generalized_entropy_loss, {"prior": torch.ones(5)}, "sum to 1"),
]


@pytest.mark.parametrize(("function", "hyper", "sentence"), WRONG)
def test_refuses_hyper_parameters_out_of_range(function, hyper, sentence):
    logits, target = sample(4, 5)
    with pytest.raises(ValueError, match=sentence):
        function(logits, target, **hyper)


def test_refuses_wrong_smoothing():
    logits, target = sample(4, 5)
    uniform = smoothing.uniform(logits)

    def objective(p_ls, **arguments):
        return F.smoothed_cross_entropy(logits, target, p_ls, **({"alpha": 0.1} | arguments))

    with pytest.raises(ValueError, match="smoothing must have the shape of the logits"):
        objective(uniform[0])
    with pytest.raises(ValueError, match="smoothing must be probabilities"):
        objective(2 * uniform)
    with pytest.raises(ValueError, match=r"alpha must be a number or have the shape \(4,\)"):
        objective(uniform, alpha=torch.zeros(3))
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\]"):
        objective(uniform, alpha=torch.tensor([0.1, 0.2, -0.3, 0.4]))


def test_refuses_wrong_extra_arguments():
    logits, target = sample(4, 5)
    with pytest.raises(ValueError, match="teacher_logits must have the shape of the logits"):
        F.distillation_loss(logits, target, logits[:, :4])
    with pytest.raises(ValueError, match=r"table must have shape \(5, 5\)"):
        F.kr_ls_loss(logits, target, torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"mask must be a bool tensor of shape \(5,\)"):
        F.masked_label_smoothing_loss(logits, target, torch.ones(5))
    with pytest.raises(ValueError, match="groups must be integers"):
        F.weighted_label_smoothing_loss(logits, target, torch.ones(5))
    with pytest.raises(ValueError, match="shares must be three numbers"):
        F.weighted_label_smoothing_loss(
            logits, target, torch.zeros(5, dtype=torch.long), shares=(1.0, -1.0, 0.0)
        )


def test_unknown_loss_names_the_nearest():
    with pytest.raises(KeyError, match=r"unknown loss 'lobo'; did you mean 'labo'\?"):
        labo.LOSSES["lobo"]
    assert labo.LOSSES.get("lobo") is None
