"""The divergences of distillation: TRL's, on every backend, with both heads, of stored classes."""

from __future__ import annotations

import math

import pytest
import torch

import labo
from backends import each_of_four, on_backend
from labo import functional as F
from loss_cases import gradient
from worked import Y0, A, T, near

ALL = ["forward", "reverse", "jsd", "skew", "skew_reverse"]
N, K, D, E = 7, 301, 12, 9


def heads(dtype=torch.float32, spread=2.0):
    """Hidden states, weight and bias of a student and of a teacher with other sizes."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape):
        return (spread * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype)

    student = (draw(N, D), draw(K, D) / D**0.5, draw(K) / 4)
    return student, (draw(N, E), draw(K, E) / E**0.5, draw(K) / 4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_trl_computes_the_same_from_both_heads(beta, temperature):
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    student, teacher = heads()
    name = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    loss = labo.DistillationLoss(
        alpha=1.0,
        tau=temperature,
        tau_squared=False,
        divergence=name,
        mixture=beta if name == "jsd" else None,
        reduction="none",
    )
    upstream = torch.linspace(0.5, 2.0, N)

    def run(compute):
        leaves = [x.detach().clone().requires_grad_() for x in student]
        values = compute(*leaves)
        return values.detach(), *torch.autograd.grad(values, leaves, upstream)

    theirs = run(
        lambda *layer: ChunkedDivergenceFunction.apply(*layer, *teacher, beta, temperature)[0]
    )
    target, options = torch.zeros(N, dtype=torch.long), labo.LinearLossOptions(batch_chunk_size=3)
    ours = run(
        lambda hidden, weight, bias: labo.linear_loss(
            hidden,
            weight,
            target,
            loss,
            linear_bias=bias,
            teacher_logits=labo.TeacherHead(*teacher),
            options=options,
        )
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@each_of_four
def test_a_class_that_the_teacher_alone_masks(backend):
    random = torch.Generator().manual_seed(0)
    z, t = (torch.randn(2, 5000, generator=random) for _ in range(2))
    t[0, 7] = -math.inf
    z[1, 7] = t[1, 7] = -math.inf
    t[1, 9], z[1, 9] = -math.inf, -1e4  # where p is 0
    target = torch.zeros(2, dtype=torch.long)
    with on_backend(backend) as impl:
        fixed = {"tau": 1.0, "impl": impl, "reduction": "none"}
        values = {name: F.distillation_loss(z, target, t, divergence=name, **fixed) for name in ALL}
    assert values["reverse"][0] == math.inf
    assert values["reverse"][1].isfinite()
    assert all(values[name].isfinite().all() for name in ALL if name != "reverse")


@pytest.mark.parametrize("divergence", ALL)
def test_one_bucket_is_a_lower_bound_of_every_divergence(divergence):
    random = torch.Generator().manual_seed(1)
    z, t = (3 * torch.randn(500, 12, generator=random, dtype=torch.float64) for _ in range(2))
    target = torch.zeros(500, dtype=torch.long)
    hyper = {"alpha": 1.0, "divergence": divergence, "reduction": "none"}
    whole = F.distillation_loss(z, target, t, tau=1.0, **hyper)
    for k in (1, 4):
        stored = t.log_softmax(-1).topk(k)
        bucket = F.topk_distillation_loss(z, target, stored.indices, stored.values, **hyper)
        assert (bucket <= whole + 1e-12).all()
        assert (bucket < whole - 1e-3).any()


def test_a_tail_that_is_rounded_away_is_finite():
    z = torch.tensor([[1.0, 0.5, 0.0]])
    indices, log_t = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log()
    for divergence in ALL:
        value = F.topk_distillation_loss(
            z, torch.tensor([0]), indices, log_t, divergence=divergence
        )
        assert value.isfinite()


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"mixture": 0.5}, 'mixture goes with divergence="jsd"'),
        ({"divergence": "jsd", "mixture": 0}, 'say divergence="forward"'),
        ({"divergence": "jsd", "mixture": 1.0}, 'say divergence="forward"'),
        ({"divergence": "reverse", "standardize": True}, 'goes with divergence="forward"'),
        ({"divergence": "jenson"}, "jsd"),
    ],
)
def test_bad_input_is_one_clear_line(hyper, message):
    with pytest.raises(ValueError, match=message) as error:
        labo.DistillationLoss(**hyper)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tail", ["uniform", "labo", "drop"])
def test_tails_for_which_a_divergence_is_not_defined(tail):
    with pytest.raises(ValueError, match='use tail="bucket"'):
        labo.TopKDistillationLoss(tail=tail, divergence="jsd")
    with pytest.raises(ValueError, match='use tail="bucket"'):
        labo.TopKDistillationLoss(tail="renormalize", divergence="reverse")


WORKED = {
    ("forward", None, 1.0): (0.077980, None),
    ("reverse", None, 1.0): (0.091230, [-0.214713, 0.155743, 0.053777, 0.005194]),
    ("reverse", None, 4.0): (0.094348, None),
    ("jsd", 0.1, 1.0): (0.007098, [-0.016150, 0.011352, 0.004168, 0.000630]),
    ("jsd", None, 1.0): (0.020801, [-0.047649, 0.033869, 0.012191, 0.001589]),
    ("jsd", 0.9, 1.0): (0.008037, None),
    ("jsd", 0.5, 2.0): (0.025589, None),
    ("skew", None, 1.0): (0.064632, [-0.147138, 0.103674, 0.037911, 0.005553]),
    ("skew_reverse", 0.1, 1.0): (0.070846, [-0.164248, 0.117984, 0.041607, 0.004657]),
}


@pytest.mark.parametrize("given", WORKED, ids=str)
def test_worked_numbers(given):
    (divergence, mixture, tau), (value, slopes) = given, WORKED[given]

    def distilled(z, **options):
        hyper = {"alpha": 1.0, "tau": tau, "divergence": divergence, "mixture": mixture}
        return F.distillation_loss(z, Y0, T, **hyper, **options)

    near(distilled(A), value)
    near(distilled(A, tau_squared=False), value / tau**2)
    if slopes is not None:
        near(gradient(distilled, A), slopes)
