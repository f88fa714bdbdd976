"""Modules: hyper-parameters, state, repr and copies."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import torch

import labo
from conftest import MODULES, gradient
from labo import functional as F
from probes import is_fused

K = 6
WITH_TEACHER = {"kd", "dkd", "cskd", "betals", "pskd", "alspast"}
WITH_STATES = {"rdrop", "connet"}  # a third argument with a gradient, which is no teacher

each_module = pytest.mark.parametrize("name", labo.LOSSES)


def build(name: str) -> torch.nn.Module:
    return MODULES[name](K)


def call(name: str, loss: torch.nn.Module, logits: torch.Tensor, target: torch.Tensor):
    torch.manual_seed(0)
    teacher = (logits.detach().sin(),) if name in WITH_TEACHER | WITH_STATES else ()
    return loss(logits, target, *teacher)


def batch():
    torch.manual_seed(1)
    return torch.randn(8, K, dtype=torch.float64), torch.randint(K, (8,))


@each_module
def test_registry_builds(name):
    loss = build(name)
    assert type(loss) is labo.LOSSES[name]
    assert type(loss).__name__ in labo.__all__
    logits, target = batch()
    assert call(name, loss, logits, target).isfinite()


@each_module
def test_signature_has_the_shared_arguments(name):
    parameters = inspect.signature(labo.LOSSES[name]).parameters
    for shared, default in (("ignore_index", -100), ("reduction", "mean"), ("dim", -1)):
        assert parameters[shared].default == default
    assert parameters["weight"].default is None


@each_module
def test_repr_tells_the_hyper_parameters(name):
    loss = build(name)
    text = repr(loss)
    for hyper in set(loss._own) - {"prior"}:
        assert f"{hyper}=" in text
    assert "reduction='mean'" not in text
    loss.reduction = "sum"
    assert "reduction='sum'" in repr(loss)


@each_module
def test_deep_copy_pickle_and_state_dict(name):
    logits, target = batch()
    loss = build(name)
    call(name, loss, logits, target)  # tables gather something
    if hasattr(loss, "end_epoch"):
        loss.end_epoch()
        call(name, loss, logits, target)
    fresh = build(name)
    fresh.load_state_dict(loss.state_dict())
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), fresh):
        assert repr(twin) == repr(loss)
        for key, value in loss.state_dict().items():
            assert torch.equal(twin.state_dict()[key], value), key
        expected = call(name, copy.deepcopy(loss), logits, target)
        assert torch.equal(call(name, twin, logits, target), expected)


# One of each kind, and those with a state. betals and connet draw at random, which compiled code
# does otherwise; their functions are compared.
@pytest.mark.parametrize("name", ["labo", "fl", "maxsup", "mls", "dkd", "pskd", "rdrop", "ols"])
def test_compiles_whole(name):
    logits, target = batch()
    torch._dynamo.reset()
    loss = build(name)
    expected = call(name, copy.deepcopy(loss), logits, target)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(name, compiled, logits, target), expected)


@each_module
def test_hyper_parameters_may_change_on_the_way(name):
    """The attribute counts, so that a schedule may set it."""
    logits, target = batch()
    loss = build(name)
    loss.reduction = "sum"
    total = call(name, loss, logits, target)
    loss.reduction = "mean"
    torch.testing.assert_close(call(name, loss, logits, target), total / 8)


def test_labo_tau_may_change():
    logits, target = batch()
    loss = labo.LABOLoss()
    loss.tau = 2.0
    assert torch.equal(loss(logits, target), F.labo_loss(logits, target, tau=2.0))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: labo.LABOLoss(tau=0), "tau must be"),
        (lambda: labo.LabelSmoothingLoss(alpha=-0.1), "alpha must be"),
        (lambda: labo.CrossEntropyLoss(reduction="avg"), "unknown reduction"),
        (lambda: labo.TFRegLoss(mode="x"), "unknown mode"),
        (lambda: labo.PSKDLoss(epochs=0), "epochs must be"),
        (lambda: labo.DecoupledDistillationLoss(warmup_epochs=-1), "warmup_epochs must be"),
        (lambda: labo.DecoupledDistillationLoss(warmup_epochs=1.5), "warmup_epochs must be"),
        (lambda: labo.OnlineLabelSmoothingLoss(3, first_table="ones"), "unknown first_table"),
        (lambda: labo.RDropLoss(label="hard"), "unknown label"),
        (lambda: labo.RDropLoss(alpha=0.1), "alpha goes with label"),
        (lambda: labo.RDropLoss(label="smoothed", alpha="adaptive"), 'goes with label="labo"'),
        (lambda: labo.Warmup(labo.CrossEntropyLoss(), labo.LABOLoss(), -1), "steps must be"),
        (lambda: labo.Warmup(labo.CrossEntropyLoss(), labo.LABOLoss(), 1.5), "steps must be"),
    ],
)
def test_wrong_hyper_parameters_are_refused_when_built(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_weight_is_a_buffer():
    loss = labo.LABOLoss(weight=torch.tensor([1.0, 2.0]))
    assert "weight" in dict(loss.named_buffers())
    assert loss.double().weight.dtype == torch.float64
    assert "weight=<2 classes>" in repr(loss)


# ------------------------------------------------------------------ state


def test_warmup_counts_steps_and_resumes():
    def make():
        return labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=4)

    loss = make()
    loss.step()
    loss.step()
    assert loss.active is loss.before
    resumed = make()
    resumed.load_state_dict(loss.state_dict())
    assert resumed.steps_done == 2
    resumed.step()
    assert resumed.active is resumed.after
    assert loss.active is loss.before
    assert "steps=4, steps_done=3" in repr(resumed)


def test_warmup_of_zero_or_one_step_is_off():
    for steps in (0, 1):
        loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=steps)
        assert loss.active is loss.after


def test_warmup_compiles_at_most_twice():
    logits, target = batch()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=4)
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for _ in range(8):
        torch.testing.assert_close(compiled(logits, target), loss.active(logits, target))
        loss.step()
    assert counter.frame_count == 2


def test_ols_evaluation_leaves_the_table_alone():
    logits, target = batch()
    loss = labo.OnlineLabelSmoothingLoss(K).eval()
    loss(logits, target)
    assert loss.counts.sum() == 0
    loss.train()
    loss(logits, logits.softmax(-1))  # mixed labels: used, not gathered
    assert loss.counts.sum() == 0


def test_ols_gathers_only_right_rows_that_count():
    logits = torch.eye(K, dtype=torch.float64) * 5
    target = torch.arange(K)
    target[1], target[2] = -100, 3
    loss = labo.OnlineLabelSmoothingLoss(K)
    loss(logits, target)
    assert loss.counts.tolist() == [1, 0, 0, 1, 1, 1]
    loss.end_epoch()
    torch.testing.assert_close(loss.table.sum(-1), torch.ones(K))
    torch.testing.assert_close(loss.table[1], torch.full((K,), 1 / K))
    assert loss.counts.sum() == 0
    loss.end_epoch()  # only the last epoch counts
    torch.testing.assert_close(loss.table, torch.full((K, K), 1 / K))


def test_ols_freezes_confident_rows():
    loss = labo.OnlineLabelSmoothingLoss(2, first_table="uniform", freeze_above=0.88)
    assert loss.table.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    loss(torch.tensor([[9.0, 0.0], [0.0, 0.5]]), torch.tensor([0, 1]))
    loss.end_epoch()
    first = loss.table.clone()
    loss(torch.tensor([[0.1, 0.0], [0.0, 9.0]]), torch.tensor([0, 1]))
    loss.end_epoch()
    assert torch.equal(loss.table[0], first[0])
    assert not torch.equal(loss.table[1], first[1])


def test_ols_makes_a_frozen_row_uniform_after_an_epoch_without_a_correct_prediction():
    """As the authors' code does, and as for rows that are not frozen."""
    loss = labo.OnlineLabelSmoothingLoss(2, freeze_above=0.88)
    sure = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    loss(sure, torch.tensor([0, 1]))
    loss.end_epoch()
    assert (loss.table.amax(-1) > 0.99).all()
    loss(sure, torch.tensor([1, 1]))  # class 0 does not occur
    loss.end_epoch()
    assert loss.table[0].tolist() == [0.5, 0.5]
    assert loss.table[1, 1] > 0.99
    loss(sure, torch.tensor([1, 0]))  # class 0 and 1 are predicted wrongly
    loss.end_epoch()
    assert loss.table.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_ols_table_in_use_survives_the_end_of_the_epoch():
    """backward() after end_epoch() still sees the table of its own forward pass."""
    logits, target = batch()
    loss = labo.OnlineLabelSmoothingLoss(K, first_table="uniform")
    expected = gradient(lambda z: loss(z, target), logits)
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    loss.end_epoch()
    value.backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_kr_ls_table_learns():
    """Gradient steps on the table bring q_res to the p_res of its class."""
    torch.manual_seed(0)
    loss = labo.KRLSLoss(K, alpha=1.0)
    logits, target = torch.randn(1, K), torch.tensor([2])
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    for _ in range(2000):
        optimizer.zero_grad()
        loss(logits, target).backward()
        optimizer.step()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        loss.table[2, others].softmax(-1), logits[0, others].softmax(-1), atol=1e-4, rtol=0
    )


def test_dkd_teacher_weight_grows_to_its_end():
    logits, target = batch()
    teacher = logits.flip(1)
    loss = labo.DecoupledDistillationLoss(warmup_epochs=4, multiplier=3.0)
    for multiplier in (0.75, 1.5, 2.25, 3.0, 3.0):
        expected = F.decoupled_distillation_loss(logits, target, teacher, multiplier=multiplier)
        torch.testing.assert_close(loss(logits, target, teacher), expected)
        loss.end_epoch()
    for epochs in (0, 1):
        loss = labo.DecoupledDistillationLoss(warmup_epochs=epochs)
        expected = F.decoupled_distillation_loss(logits, target, teacher)
        torch.testing.assert_close(loss(logits, target, teacher), expected)


def test_ps_kd_alpha_grows_to_its_end():
    logits, target = batch()
    past = logits.flip(1)
    loss = labo.PSKDLoss(epochs=4, alpha=0.8)
    for alpha in (0.2, 0.4, 0.6, 0.8, 0.8):
        expected = F.ps_kd_loss(logits, target, past, alpha=alpha)
        torch.testing.assert_close(loss(logits, target, past), expected)
        loss.end_epoch()


def test_connet_price_falls_and_eval_mode_trusts_nothing():
    logits, target = batch()
    states = logits.sin()
    loss = labo.ConNetLoss(K, lam=2.0, decay_steps=3.0, trust=1.0)
    confidence, trusted, mean = loss.confidences(target, states)
    assert trusted.all()
    torch.testing.assert_close(mean, confidence.sigmoid().mean())
    for step in range(3):
        expected = F.connet_loss(
            logits, target, confidence, trusted=trusted, lam=2.0 * math.exp(-step / 3)
        )
        torch.testing.assert_close(loss(logits, target, states), expected)
        loss.step()
    resumed = labo.ConNetLoss(K, lam=2.0, decay_steps=3.0, trust=1.0)
    resumed.load_state_dict(loss.state_dict())
    assert torch.equal(resumed(logits, target, states), loss(logits, target, states))
    loss.eval()
    expected = F.connet_loss(logits, target, confidence, lam=2.0 * math.exp(-1))
    torch.testing.assert_close(loss(logits, target, states), expected)


def test_connet_learns_from_rows_that_count_only():
    """Everything gets a gradient; an ignored row changes nothing, not even the mean."""
    logits, target = batch()
    states, ignored = logits.sin(), target.clone()
    ignored[3] = -100
    keep = [0, 1, 2, 4, 5, 6, 7]
    loss = labo.ConNetLoss(K, trust=0.5)
    draws = torch.linspace(0, 1, 8)
    both = []
    for rows, labels in (((slice(None)), ignored), (keep, target[keep])):
        states.requires_grad_().grad = None
        loss.zero_grad()
        value = loss(logits[rows], labels, states[rows], draws[rows])
        value.backward()
        both.append((value.detach(), states.grad[keep].clone(), loss.network.weight.grad.clone()))
    torch.testing.assert_close(*both)
    assert both[0][1].any(-1).all()
    assert both[0][2].any()


@pytest.mark.parametrize("states", [None, torch.zeros(3, K)])
def test_connet_names_missing_states(states):
    logits, target = batch()
    with pytest.raises(ValueError, match="ConNetLoss needs states: hidden states of the model"):
        labo.ConNetLoss(K)(logits, target, states)


# ------------------------------------------------------------------ teacher logits


@pytest.mark.parametrize("name", sorted(WITH_TEACHER - {"pskd", "alspast"}))
def test_missing_teacher_logits_are_named(name):
    logits, target = batch()
    loss = build(name)
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=f"{type(loss).__name__} needs teacher_logits"):
            loss(logits, target)
    function, argument = getattr(F, loss.function_name), loss.teacher_argument
    for call in (lambda: function(logits, target), lambda: function(logits, target, None)):
        with pytest.raises(TypeError, match=f"this loss needs {argument}: the logits of a teacher"):
            call()


def test_ps_kd_without_a_past_is_cross_entropy():
    logits, target = batch()
    expected = F.cross_entropy_loss(logits, target)
    torch.testing.assert_close(build("pskd")(logits, target), expected)


@pytest.mark.parametrize("name", sorted(set(labo.LOSSES) - WITH_TEACHER - WITH_STATES))
def test_teacher_logits_that_a_loss_does_not_take_are_refused(name):
    logits, target = batch()
    loss = build(name)
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=f"{type(loss).__name__} takes no teacher logits"):
            loss(logits, target, logits)


@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_teacher_logits_of_another_shape_are_refused(name):
    logits, target = batch()
    loss = build(name)
    for wrong in (logits[:4], logits.T, logits[:, :4], logits[0], logits[None], logits[0, 0]):
        with pytest.raises(ValueError, match="must have the shape of the logits"):
            loss(logits, target, wrong)
    with pytest.raises(ValueError, match="is on meta, the logits are on cpu"):
        loss(logits, target, logits.to("meta"))


@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_teacher_logits_by_keyword(name):
    logits, target = batch()
    loss = build(name)
    torch.manual_seed(0)
    expected = loss(logits, target, logits.sin())
    torch.manual_seed(0)
    assert torch.equal(loss(logits, target, teacher_logits=logits.sin()), expected)


def test_warmup_passes_teacher_logits_to_the_loss_that_takes_them():
    logits, target = batch()
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    teacher = logits.sin()
    assert torch.equal(loss(logits, target, teacher), loss.before(logits, target))
    loss.step()
    assert torch.equal(loss(logits, target, teacher), loss.after(logits, target, teacher))
    with pytest.raises(TypeError, match="DistillationLoss needs teacher_logits"):
        loss(logits, target)
    draws = torch.linspace(0.1, 0.9, 8)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.BetaSmoothingLoss(), steps=0)
    expected = loss.after(logits, target, teacher, draws)
    assert torch.equal(loss(logits, target, teacher, draws), expected)


def test_strength_of_max_suppression_grows_to_the_last_epoch():
    logits, target = batch()
    loss = labo.MaxSuppressionLoss(lam=0.1, final_lam=0.2, epochs=3)
    for lam in (0.1, 0.15, 0.2, 0.2):
        expected = F.max_suppression_loss(logits, target, lam=lam)
        torch.testing.assert_close(loss(logits, target), expected)
        fused = loss(logits.float().requires_grad_(), target)
        assert is_fused(fused)
        torch.testing.assert_close(fused.double(), expected, rtol=1e-6, atol=1e-6)
        loss.end_epoch()
    fresh = labo.MaxSuppressionLoss(lam=0.1, final_lam=0.2, epochs=3)
    fresh.load_state_dict(loss.state_dict())
    assert fresh.epoch == 4
    with pytest.raises(ValueError, match="final_lam needs epochs"):
        labo.MaxSuppressionLoss(final_lam=0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_table_of_ols_survives_a_cast_to_half(dtype):
    """3,000 samples of one class: a counter in half precision would stop at 2048 or at 256."""
    logits, target = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([0])
    losses = [labo.OnlineLabelSmoothingLoss(3), labo.OnlineLabelSmoothingLoss(3).to(dtype)]
    for loss in losses:
        for _ in range(3000):
            loss(logits, target)
        assert loss.counts[0] == 3000
        loss.end_epoch()
    torch.testing.assert_close(losses[1].table, losses[0].table)


def test_ols_counts_beyond_what_float32_can():
    loss = labo.OnlineLabelSmoothingLoss(2)
    loss.counts[0] = 2**24
    loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert loss.counts[0] == 2**24 + 1
