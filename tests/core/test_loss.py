"""What every loss does alike: shapes, dtypes, edges, state, copies, refusals.

A property that comes from one helper of src runs on one loss of each kind. A property that a
formula can break runs on every loss: losses/test_every_loss.py.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor

import labo
from labo import functional as F
from labo import smoothing
from loss_cases import MODULES, REPRESENTATIVES, both, each_kind, gradient

K = 6
NARROW = [torch.uint8, torch.int8, torch.int16, torch.int32]


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(shape, dtype=dtype), torch.randint(shape[-1], shape[:-1])


# ------------------------------------------------------------------ shapes


@each_kind
def test_any_leading_shape_and_dimension_of_classes(case):
    logits, target = sample(2, 3, 4, 5)
    extra = case.extra(logits)
    value = case(logits, target, reduction="none", extra=extra)
    assert value.shape == target.shape
    flat = case(logits.reshape(-1, 5), target.reshape(-1), reduction="none")
    torch.testing.assert_close(value.reshape(-1), flat)
    for reduction in ("none", "mean", "sum"):
        assert case(logits[0, 0, 0], target[0, 0, 0], reduction=reduction).shape == ()
    channels = logits.movedim(-1, 1)
    moved = tuple(x.movedim(-1, 1) if x.shape == logits.shape else x for x in extra)
    torch.testing.assert_close(case(channels, target, dim=1, reduction="none", extra=moved), value)
    if case.linear:
        soft = torch.rand_like(logits).softmax(-1)
        torch.testing.assert_close(
            case(channels, soft.movedim(-1, 1), dim=1, extra=moved), case(logits, soft, extra=extra)
        )


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_counts(case, dtype):
    """No rows, or all of them ignored: 0, with a gradient of 0."""
    for shape in ((0, 5), (0, 3, 5), (2, 0, 5), (3, 5)):
        logits, target = sample(*shape, dtype=dtype)
        ignored = torch.full_like(target, -100)
        assert case(logits, ignored, reduction="none").shape == target.shape
        for reduction in ("mean", "sum"):
            value, slope = both(case, logits, ignored, reduction=reduction)
            assert value == 0
            assert slope.count_nonzero() == 0


# ------------------------------------------------------------------ dtypes


@each_kind
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_targets(case, dtype):
    """More classes than the type can name, and an ignore_index outside of it."""
    logits, _ = sample(4, 300)
    target = torch.tensor([0, 7, 100, 126])
    for ignore_index in (-100, 7):
        values = (case(logits, t, ignore_index=ignore_index) for t in (target.to(dtype), target))
        assert torch.equal(*values)
    with pytest.raises(IndexError, match="target 126 at position 3 is outside"):
        case(logits[:, :120], target.to(dtype))


@pytest.mark.parametrize("impl", ["reference", "blocked", "native"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integer_targets_on_every_backend(impl, dtype):
    classes = 33_000 if dtype == torch.int16 else 300
    logits, target = sample(3, classes, dtype=torch.float32)[0], torch.tensor([0, 7, 126])
    expected = F.labo_loss(logits, target)
    strided = torch.stack([target, target], 1).to(dtype)[:, 0]
    for given in (target.to(dtype), strided):
        torch.testing.assert_close(F.labo_loss(logits, given, impl=impl), expected)
    hidden, matrix = torch.ones(3, 1), logits[:1].T
    torch.testing.assert_close(
        labo.linear_loss(hidden, matrix, target.to(dtype), labo.LABOLoss(), impl=impl),
        labo.linear_loss(hidden, matrix, target, labo.LABOLoss()),
    )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_integers_of_distributions_and_groups(dtype):
    """As an index a uint8 tensor would be a mask."""
    logits, target = torch.randn(3, 300), torch.tensor([1, 0, 126])
    table = torch.rand(300, 300).softmax(-1)
    groups = torch.arange(300) % 3
    for function in (
        smoothing.others,
        smoothing.virtual_teacher,
        lambda z, t: smoothing.class_table(table, t, z),
        lambda z, t: smoothing.smoothed_target(t, smoothing.uniform(z), 0.1),
        lambda z, t: F.weighted_label_smoothing_loss(z, target, groups.to(t.dtype)),
    ):
        assert torch.equal(function(logits, target.to(dtype)), function(logits, target))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(case, dtype):
    half, target = sample(4, 50, dtype=dtype)
    extra = case.extra(half.float())
    value = case(half, target, extra=extra)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, case(half.float(), target, extra=extra))
    slope = gradient(lambda z: case(z, target, extra=extra), half)
    assert slope.dtype == dtype
    exact = gradient(lambda z: case(z, target, extra=extra), half.float())
    torch.testing.assert_close(slope, exact.to(dtype))


@each_kind
def test_autocast(case):
    logits, target = sample(4, 50, dtype=torch.float32)
    if case.linear:
        target = torch.rand(4, 50).softmax(-1)
    extra = case.extra(logits)
    plain = case(logits, target, extra=extra)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(case(logits, target, extra=extra), plain)


class Tagged(torch.Tensor):
    """A plain subclass."""


@each_kind
def test_subclasses_and_transforms(case):
    logits, target = sample(4, 5)
    extra = case.extra(logits)
    value = case(logits.as_subclass(Tagged), target, extra=extra)
    torch.testing.assert_close(value.as_subclass(Tensor), case(logits, target, extra=extra))

    def one(z, t, *teacher):
        return case(z, t, extra=teacher or extra)

    teachers = extra if case.has_teacher else ()
    each = torch.func.vmap(torch.func.grad(one))(logits, target, *teachers)
    whole = gradient(lambda z: case(z, target, reduction="sum", extra=extra), logits)
    torch.testing.assert_close(each, whole)


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


# Ranges and choices are checked by one helper (test_fields.py): here is what else is refused.
WRONG = [
    (labo.LABOLoss, {"alpha": "adaptiv"}, 'or "adaptive", got'),
    (labo.LabelSmoothingLoss, {"convention": "fairsec"}, "did you mean 'fairseq'"),
    (labo.LabelSmoothingLoss, {"convention": "joeynmt"}, "padding_idx go together"),
    (labo.LabelSmoothingLoss, {"padding_idx": 0}, "padding_idx go together"),
    (labo.Poly1Loss, {"epsilon": -1.1}, "epsilon must be a finite number of -1 or more"),
    (labo.EAFTLoss, {"top_k": 1}, "top_k must be a whole number of 2 or more, got 1"),
    (labo.PSKDLoss, {"epochs": 0}, "epochs must be"),
    (labo.DecoupledDistillationLoss, {"warmup_epochs": 1.5}, "warmup_epochs must be"),
    (labo.RDropLoss, {"alpha": 0.1}, "alpha goes with label"),
    (labo.RDropLoss, {"label": "smoothed", "alpha": "adaptive"}, 'goes with label="labo"'),
    (partial(labo.Warmup, labo.FocalLoss(), labo.LABOLoss()), {"steps": -1}, "steps must be"),
    (partial(labo.Warmup, labo.FocalLoss(), labo.LABOLoss()), {"steps": 1.5}, "steps must be"),
]


@pytest.mark.parametrize(("build", "hyper", "sentence"), WRONG)
def test_refuses_hyper_parameters_out_of_range(build, hyper, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**hyper)


def test_refuses_wrong_extra_arguments():
    logits, target = sample(4, 5)
    with pytest.raises(ValueError, match="teacher_logits must have the shape of the logits"):
        F.distillation_loss(logits, target, logits[:, :4])
    for prior, sentence in (
        (torch.ones(3) / 3, r"prior must have shape \(5,\)"),
        (torch.ones(5), "sum to 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            F.generalized_entropy_loss(logits, target, prior=prior)
    with pytest.raises(ValueError, match=r"table must have shape \(5, 5\)"):
        F.kr_ls_loss(logits, target, torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"mask must be a bool tensor of shape \(5,\)"):
        F.masked_label_smoothing_loss(logits, target, torch.ones(5))
    with pytest.raises(ValueError, match="groups must be integers"):
        F.weighted_label_smoothing_loss(logits, target, torch.ones(5))
    for bad in (3, -1):
        with pytest.raises(ValueError, match="groups must be 0, 1 or 2, got values from"):
            F.weighted_label_smoothing_loss(logits, target, torch.tensor([0, 1, 2, bad, 0]))
    with pytest.raises(ValueError, match="shares must be three numbers"):
        F.weighted_label_smoothing_loss(
            logits, target, torch.zeros(5, dtype=torch.long), shares=(1.0, -1.0, 0.0)
        )


def test_position_of_a_bad_target_in_several_dimensions():
    logits, target = sample(2, 3, 5)
    target[1, 2] = 9
    with pytest.raises(ValueError, match=r"target 9 at position \(1, 2\)"):
        F.labo_loss(logits, target)


def test_unknown_loss_names_the_nearest():
    with pytest.raises(KeyError, match=r"unknown loss 'lobo'; did you mean 'labo'\?"):
        labo.LOSSES["lobo"]
    assert labo.LOSSES.get("lobo") is None


@pytest.mark.parametrize(("name", "former"), [("base", "ce"), ("cs-kd", "cskd")])
def test_a_loss_has_one_name_and_is_found_by_other_spellings(name, former):
    loss = labo.LOSSES[name]
    assert labo.LOSSES[former] is loss is labo.LOSSES.get(former)
    assert labo.LOSSES[name.upper().replace("-", "_")] is loss
    assert former in labo.LOSSES
    assert name in list(labo.LOSSES)
    assert former not in list(labo.LOSSES)


def test_every_loss_is_found_by_name():
    assert {*labo.LOSSES.values()} == {loss for loss in labo.losses.ALL if loss.name is not None}
    assert {loss for loss in labo.losses.ALL if loss.name is None} == {labo.losses.weights.ZLoss}
    assert labo.LOSSES["held-labo"] is labo.HeldLABOLoss
    assert labo.LOSSES["topk-kd"] is labo.TopKDistillationLoss


# ------------------------------------------------------------------ Modules


WITH_TEACHER = {"kd", "dkd", "cs-kd", "beta-ls", "ps-kd", "als-past", "held-labo"}
STORED = {"topk-kd"}  # two classes of a teacher, and their log-probabilities
WITH_STATES = {"r-drop", "connet"}  # a third argument with a gradient, which is no teacher
each_module = pytest.mark.parametrize("name", labo.LOSSES)


def call(name: str, loss: torch.nn.Module, logits: Tensor, target: Tensor) -> Tensor:
    torch.manual_seed(0)
    teacher = logits.detach().sin()
    if name in STORED:
        top = teacher.log_softmax(-1).topk(2)
        return loss(logits, target, top.indices, top.values)
    return loss(logits, target, *([teacher] if name in WITH_TEACHER | WITH_STATES else []))


@each_module
def test_repr_and_attributes(name):
    """An attribute counts when the loss is called, so that a schedule may set it."""
    loss = MODULES[name](K)
    assert type(loss) is labo.LOSSES[name]
    assert type(loss).__name__ in labo.__all__
    for hyper in set(loss._own) - {"prior"}:
        assert (f"{hyper}=" in repr(loss)) == (getattr(loss, hyper) is not None)
    assert "reduction='mean'" not in repr(loss)
    logits, target = sample(8, K)
    mean = call(name, loss, logits, target)
    assert mean.isfinite()
    loss.reduction = "sum"
    assert "reduction='sum'" in repr(loss)
    torch.testing.assert_close(call(name, loss, logits, target) / 8, mean)


def test_a_hyper_parameter_and_the_class_weights_may_change():
    logits, target = sample(8, K)
    loss = labo.LABOLoss(weight=torch.ones(K))
    loss.tau = 2.0
    torch.testing.assert_close(loss(logits, target), F.labo_loss(logits, target, tau=2.0))
    assert "weight" in dict(loss.named_buffers())
    assert loss.double().weight.dtype == torch.float64
    assert "weight=<6 classes>" in repr(loss)


@each_module
def test_deep_copy_pickle_and_state_dict(name):
    logits, target = sample(8, K)
    loss = MODULES[name](K)
    call(name, loss, logits, target)  # tables gather something
    if hasattr(loss, "end_epoch"):
        loss.end_epoch()
        call(name, loss, logits, target)
    fresh = MODULES[name](K)
    fresh.load_state_dict(loss.state_dict())
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), fresh):
        assert repr(twin) == repr(loss)
        for key, value in loss.state_dict().items():
            assert torch.equal(twin.state_dict()[key], value), key
        expected = call(name, copy.deepcopy(loss), logits, target)
        assert torch.equal(call(name, twin, logits, target), expected)


@pytest.mark.parametrize("name", ["maxsup", "dkd", "ps-kd", "ols"])
def test_losses_with_a_state_compile_whole(name):
    logits, target = sample(8, K)
    torch._dynamo.reset()
    loss = MODULES[name](K)
    expected = call(name, copy.deepcopy(loss), logits, target)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(name, compiled, logits, target), expected)


@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_teacher_logits(name):
    """By keyword; missing, misshaped and misplaced ones are named."""
    logits, target = sample(8, K)
    loss = MODULES[name](K)
    torch.manual_seed(0)
    by_keyword = loss(logits, target, teacher_logits=logits.sin())
    assert torch.equal(by_keyword, call(name, loss, logits, target))
    for wrong in (logits[:4], logits.T, logits[:, :4], logits[0], logits[None], logits[0, 0]):
        with pytest.raises(ValueError, match="must have the shape of the logits"):
            loss(logits, target, wrong)
    with pytest.raises(ValueError, match="is on meta, the logits are on cpu"):
        loss(logits, target, logits.to("meta"))
    if loss.without_teacher is not None:
        return
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=f"{type(loss).__name__} needs teacher_logits"):
            loss(logits, target)
    function, argument = getattr(F, loss.function_name), loss.teacher_argument
    for given in ((), (None,)):
        with pytest.raises(TypeError, match=f"this loss needs {argument}: the logits of a teacher"):
            function(logits, target, *given)


@pytest.mark.parametrize("name", ["labo", "ols", "fl"])
def test_teacher_logits_that_a_loss_does_not_take_are_refused(name):
    logits, target = sample(8, K)
    loss = MODULES[name](K)
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=f"{type(loss).__name__} takes no teacher logits"):
            loss(logits, target, logits)


def test_a_row_made_of_numbers_goes_to_the_device_of_the_logits():
    loss = labo.LabelSmoothingLoss(convention="joeynmt", padding_idx=0)
    logits = torch.empty(2, 4, device="meta")
    assert loss.mass_source(logits).device == logits.device


def test_a_row_made_of_a_field_is_refused_by_its_name():
    logits = torch.empty(2, 4, device="meta")
    masked = labo.MaskedLabelSmoothingLoss(torch.tensor([True, True, False, True]))
    with pytest.raises(ValueError, match="mask is on cpu, the logits are on meta"):
        masked.mass_source(logits)
    grouped = labo.WeightedLabelSmoothingLoss(torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="groups is on cpu, the logits are on meta"):
        grouped.mass_source(logits)
