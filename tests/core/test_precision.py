"""float64 is exact to 1e-12, and float16 under a loss scale is as good as float16 can be."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labo
from conftest import MODULES, gradient, triton_for_native
from labo import functional as F
from labo import smoothing

K = 6
quick = settings(max_examples=25, deadline=None)

unit = st.floats(0, 1)
strength = st.floats(0, 3)
tau = st.floats(0.3, 30)


def either(**options):
    """Hyper-parameters, each of them drawn or left at its default."""
    return st.fixed_dictionaries({}, optional=options)


# Divergences with a mixture, and all others.
mixtures = st.fixed_dictionaries(
    {"divergence": st.sampled_from(["jsd", "skew", "skew_reverse"])},
    optional={"mixture": st.floats(0.05, 0.95)},
)
divergences = mixtures | st.just({"divergence": "reverse"})


def from_two_stored(logits, target, teacher, **arguments):
    """Distillation from the two largest probabilities of the teacher."""
    top = teacher.log_softmax(-1).topk(2)
    return F.topk_distillation_loss(logits, target, top.indices, top.values, **arguments)


def with_confidence(logits, target, given, **arguments):
    """ConNet-LS; ``given`` has the logit of the confidence, its mean, and what is trusted."""
    mean, trusted = given[:1, 1], given[:, 2] > 0
    return F.connet_loss(
        logits, target, given[:, 0], mean_confidence=mean, trusted=trusted, **arguments
    )


# (name, function, oracle, hyper-parameters, what it takes besides). Numbers such as 0.1 are not
# dyadic: a detour through float32 changes them by 1e-9.
LOSSES = [
    ("ce", F.cross_entropy_loss, oracle.cross_entropy, either(), None),
    ("ls", F.label_smoothing_loss, oracle.label_smoothing, either(alpha=unit), None),
    (
        "ls-fairseq",
        F.label_smoothing_loss,
        oracle.label_smoothing,
        st.builds(lambda a: {"alpha": a, "convention": "fairseq"}, unit),
        None,
    ),
    (
        "ls-joeynmt",
        F.label_smoothing_loss,
        oracle.label_smoothing,
        st.builds(lambda a: {"alpha": a, "convention": "joeynmt", "padding_idx": 0}, unit),
        None,
    ),
    (
        "labo",
        F.labo_loss,
        oracle.labo,
        either(tau=tau, alpha=st.just("adaptive") | unit, rho=unit, alpha_grad=st.booleans()),
        None,
    ),
    (
        "cp",
        F.confidence_penalty_loss,
        oracle.confidence_penalty,
        either(beta=strength, threshold=strength),
        None,
    ),
    ("maxsup", F.max_suppression_loss, oracle.max_suppression, either(lam=strength), None),
    (
        "mbls",
        F.margin_smoothing_loss,
        oracle.margin_smoothing,
        either(lam=strength, margin=strength),
        None,
    ),
    ("poly", F.poly1_loss, oracle.poly1, either(epsilon=st.floats(-1, 3)), None),
    ("logitnorm", F.logit_norm_loss, oracle.logit_norm, either(tau=tau), None),
    ("dft", F.dft_loss, oracle.dft, either(), None),
    (
        "eaft",
        F.eaft_loss,
        oracle.eaft,
        either(
            gamma=strength,
            top_k=st.integers(2, 9),
            normalizer=st.sampled_from(["log_k", 3.0, None]),
        ),
        None,
    ),
    ("fl", F.focal_loss, oracle.focal, either(gamma=strength), None),
    ("afl", F.anti_focal_loss, oracle.anti_focal, either(gamma=strength, scale=strength), None),
    (
        "ger",
        F.generalized_entropy_loss,
        oracle.generalized_entropy,
        either(
            alpha=st.sampled_from([0, 1]) | st.floats(0.05, 0.95),
            beta=strength,
            generator=st.sampled_from(["kl", "euclidean"]),
            prior=st.sampled_from([None, [0.1, 0.3, 0.05, 0.15, 0.2, 0.2]]),
        ),
        None,
    ),
    (
        "tfreg",
        F.tf_reg_loss,
        oracle.tf_reg,
        either(
            alpha=unit,
            tau=tau,
            mode=st.sampled_from(["repo", "paper"]),
            multiplier=strength,
            confidence=unit,
            tau_squared=st.booleans(),
        ),
        None,
    ),
    (
        "kd",
        F.distillation_loss,
        oracle.distillation,
        either(
            alpha=unit,
            tau=tau,
            kl_reduction=st.sampled_from(["batchmean", "elementwise"]),
            multiplier=strength,
            standardize=st.booleans(),
        ),
        "teacher",
    ),
    (
        "kd-divergence",
        F.distillation_loss,
        oracle.distillation,
        st.builds(
            lambda one, other: one | other,
            either(alpha=unit, tau=tau, tau_squared=st.booleans()),
            divergences,
        ),
        "teacher",
    ),
    (
        "dkd",
        F.decoupled_distillation_loss,
        oracle.decoupled_distillation,
        either(
            alpha=unit,
            beta=strength,
            tau=tau,
            hard_weight=strength,
            multiplier=strength,
            standardize=st.booleans(),
        ),
        "teacher",
    ),
    (
        "topk",
        from_two_stored,
        oracle.topk_distillation,
        either(
            alpha=unit,
            tail=st.sampled_from(["bucket", "uniform", "labo", "drop", "renormalize"]),
            tau=tau,
        ),
        "teacher",
    ),
    (
        "topk-divergence",
        from_two_stored,
        oracle.topk_distillation,
        st.builds(
            lambda one, other: one | other,
            either(alpha=unit),
            divergences | mixtures.map(lambda given: given | {"tail": "renormalize"}),
        ),
        "teacher",
    ),
    ("cskd", F.cs_kd_loss, oracle.cs_kd, either(lam=strength, tau=tau), "teacher"),
    ("pskd", F.ps_kd_loss, oracle.ps_kd, either(alpha=unit), "teacher"),
    (
        "ols",
        F.online_label_smoothing_loss,
        oracle.online_label_smoothing,
        either(hard_weight=strength, soft_weight=strength),
        "soft table",
    ),
    (
        "krls",
        F.kr_ls_loss,
        oracle.kr_ls,
        either(alpha=unit, order=st.sampled_from(["pq", "qp"])),
        "table",
    ),
    (
        "mls",
        F.masked_label_smoothing_loss,
        oracle.masked_label_smoothing,
        either(alpha=unit),
        "mask",
    ),
    (
        "wls",
        F.weighted_label_smoothing_loss,
        oracle.weighted_label_smoothing,
        either(
            alpha=unit,
            shares=st.tuples(*[st.floats(0.01, 1)] * 3),
            normalize=st.booleans(),
        ),
        "groups",
    ),
    (
        "labo-held",
        F.held_labo_loss,
        oracle.held_labo,
        either(tau=tau, alpha=st.just("adaptive") | unit, rho=unit),
        "teacher",
    ),
    (
        "connet",
        with_confidence,
        oracle.connet,
        either(alpha=st.floats(0, 0.3), lam=strength),
        "confidence",
    ),
    (
        "rdrop",
        F.r_drop_loss,
        oracle.r_drop,
        st.one_of(
            either(lam=strength, hard_weight=strength),
            st.builds(lambda a: {"label": "smoothed", "alpha": a}, st.none() | unit),
            st.builds(
                lambda a, t, r: {"label": "labo", "alpha": a, "tau": t, "rho": r},
                st.none() | unit,
                tau,
                unit,
            ),
        ),
        "teacher",
    ),
]
FUSED = [row for row in LOSSES if row[0] in ("ce", "ls", "labo")]
ROWS = ("teacher", "confidence")  # what has a row for each sample
TEACHERS = [row for row in LOSSES if row[4] == "teacher"]

weights = st.none() | st.lists(st.floats(0.1, 2), min_size=K, max_size=K)


def draw(seed: int):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, K, generator=random, dtype=torch.float64)
    target = torch.randint(K, (4,), generator=random)
    table = torch.randn(K, K, generator=random, dtype=torch.float64)
    besides = {
        None: None,
        "teacher": 2 * torch.randn(4, K, generator=random, dtype=torch.float64),
        "table": table,
        "soft table": table.softmax(-1),
        "mask": torch.tensor([True, False, True, True, False, True]),
        "groups": torch.tensor([0, 1, 2, 0, 1, 1]),
    }
    u = 2 * torch.randn(4, generator=random, dtype=torch.float64)
    mean = u.sigmoid().mean().expand(4)
    besides["confidence"] = torch.stack([u, mean, torch.tensor([0.0, 1, 0, 0]).double()], 1)
    return logits, target, besides


def expected(compute, logits, target, weight, hyper, besides, per_row):
    """The mean of the oracle."""
    z = oracle.real(logits.numpy())
    w = oracle.real(np.ones(K) if weight is None else weight)
    extra = None if besides is None else besides.numpy()
    extra = oracle.real(extra) if extra is not None and extra.dtype == np.float64 else extra
    values = []
    for i, y in enumerate(target.tolist()):
        given = () if extra is None else (extra[i] if per_row else extra,)
        values.append(compute(z[i], y, w, *given, **hyper))
    return oracle.mean(values, target.tolist(), w)


def as_tensors(hyper, weight):
    hyper = {
        name: torch.tensor(value, dtype=torch.float64) if name == "prior" and value else value
        for name, value in hyper.items()
    }
    if weight is not None:
        hyper["weight"] = torch.tensor(weight, dtype=torch.float64)
    return hyper


def close(value: torch.Tensor, wanted: float) -> None:
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("function", "compute", "hypers", "needs"),
    [row[1:] for row in LOSSES],
    ids=[row[0] for row in LOSSES],
)
@quick
@given(st.integers(0, 1000), weights, st.data())
def test_float64_is_that_of_the_oracle(function, compute, hypers, needs, seed, weight, data):
    hyper = data.draw(hypers)
    logits, target, besides = draw(seed)
    extra = () if needs is None else (besides[needs],)
    value = function(logits, target, *extra, **as_tensors(hyper, weight))
    wanted = expected(compute, logits, target, weight, hyper, besides[needs], needs in ROWS)
    close(value, wanted)


@pytest.mark.parametrize(
    ("function", "compute", "hypers"),
    [row[1:4] for row in FUSED],
    ids=[row[0] for row in FUSED],
)
@quick
@given(st.integers(0, 1000), weights, st.data())
def test_float64_on_the_blocked_backend(function, compute, hypers, seed, weight, data):
    hyper = data.draw(hypers)
    hyper.pop("alpha_grad", None)
    logits, target, _ = draw(seed)
    arguments = as_tensors(hyper, weight)
    value = function(logits, target, impl="blocked", **arguments)
    close(value, expected(compute, logits, target, weight, hyper, None, False))
    slope = gradient(lambda z: function(z, target, impl="blocked", **arguments), logits)
    truth = gradient(lambda z: function(z, target, impl="reference", **arguments), logits)
    torch.testing.assert_close(slope, truth, rtol=1e-12, atol=1e-13)


ROWWISE = [row for row in LOSSES if row[0] in labo.LOSSES and labo.LOSSES[row[0]].rowwise]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("impl", ["auto", "blocked"])
@pytest.mark.parametrize(
    ("name", "compute", "needs"), [(r[0], r[2], r[4]) for r in ROWWISE], ids=[r[0] for r in ROWWISE]
)
def test_float64_of_linear_loss(name, compute, needs, impl, weighted):
    if impl == "blocked" and name not in ("ce", "ls", "labo"):
        impl = "reference"
    logits, target, besides = draw(7)
    loss = MODULES[name](K)
    if needs in ("mask", "groups"):
        setattr(loss, needs, besides[needs])
    weight = [0.1, 0.3, 0.7, 1.1, 0.9, 1.3] if weighted else None
    if weighted:
        loss.weight = torch.tensor(weight, dtype=torch.float64)
    # the first of 4 and of 20 epochs
    hyper = {"pskd": {"alpha": 0.8 / 4}, "dkd": {"multiplier": 1 / 20}}.get(name, {})
    value = labo.linear_loss(
        logits,
        torch.eye(K, dtype=torch.float64),
        target,
        loss,
        teacher_logits=besides["teacher"] if needs == "teacher" else None,
        impl=impl,
        options=labo.LinearLossOptions(batch_chunk_size=3),
    )
    wanted = expected(compute, logits, target, weight, hyper, besides[needs], needs == "teacher")
    close(value, wanted)


def test_float64_of_beta_smoothing():
    logits, target, besides = draw(3)
    draws = torch.tensor([0.3, 0.9, 0.1, 0.7], dtype=torch.float64)
    confidence = besides["teacher"].softmax(-1).gather(1, target[:, None]).squeeze(1)
    value = F.beta_smoothing_loss(logits, target, besides["teacher"], draws=draws)
    z, w = oracle.real(logits.numpy()), oracle.real(np.ones(K))
    values = []
    for i, y in enumerate(target.tolist()):
        b = oracle.real(sorted(draws.tolist())[sorted(confidence).index(confidence[i])])
        others = (1 - oracle.onehot(y, K)) / (K - 1)
        q = b * oracle.onehot(y, K) + (1 - b) * others
        values.append(oracle.smoothed(z[i], y, w, q, oracle.real(0.6)))
    close(value, oracle.mean(values, target.tolist(), w))


def test_float64_of_any_smoothing_with_strengths_per_sample():
    logits, target, besides = draw(4)
    p = besides["teacher"].softmax(-1)
    alpha = torch.tensor([0.1, 0.3, 0.7, 0.9], dtype=torch.float64)
    beta = torch.tensor([0.3, 0.0, 1.1, 0.1], dtype=torch.float64)
    value = F.smoothed_cross_entropy(logits, target, p, alpha=alpha, beta=beta)
    z, q, w = oracle.real(logits.numpy()), oracle.real(p.numpy()), oracle.real(np.ones(K))
    values = [
        oracle.smoothed(z[i], y, w, q[i], oracle.real(alpha[i].item()))
        + oracle.real(beta[i].item()) * oracle.kl(q[i], 1 / oracle.real(K))
        for i, y in enumerate(target.tolist())
    ]
    close(value, oracle.mean(values, target.tolist(), w))


def test_float64_of_ps_kd_over_its_epochs():
    logits, target, besides = draw(5)
    loss = labo.PSKDLoss(epochs=3, alpha=0.8)
    for epoch in range(3):
        hyper = {"alpha": 0.8 * (epoch + 1) / 3}
        arguments = (logits, target, None, hyper, besides["teacher"], True)
        close(loss(logits, target, besides["teacher"]), expected(oracle.ps_kd, *arguments))
        loss.end_epoch()


def test_float64_of_the_smoothing_functions():
    logits, target, _ = draw(6)
    teacher = smoothing.virtual_teacher(logits, target, confidence=0.9, tau=1.7)
    label = smoothing.smoothed_target(target, smoothing.uniform(logits), 0.1)
    for i, y in enumerate(target.tolist()):
        v = np.full(K, (1 - oracle.real(0.9)) / (K - 1))
        v[y] = 0.9
        assert np.abs(teacher[i].numpy() - oracle.softmax(v / oracle.real(1.7))).max() < 1e-15
        q = oracle.real(0.9) * oracle.onehot(y, K) + oracle.real(0.1) / K
        assert np.abs(label[i].numpy() - q).max() < 1e-15


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float64_mean_without_the_c_helper(monkeypatch, compiled):
    """The weights are added up by PyTorch: on other devices, and under torch.compile."""
    monkeypatch.setattr(labo.fast.native, "unavailable", lambda: "not built")
    logits, target, _ = draw(8)
    weight = [0.1, 0.3, 0.7, 1.1, 0.9, 1.3]

    def loss(z):
        tensor = torch.tensor(weight, dtype=torch.float64)
        return F.cross_entropy_loss(z, target, weight=tensor, impl="blocked")

    torch._dynamo.reset()
    run = torch.compile(loss, backend="eager") if compiled else loss
    arguments = (logits, target, weight, {}, None, False)
    close(run(logits), expected(oracle.cross_entropy, *arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_class_weights_are_added_up_in_float32(dtype):
    """1000 weights of about 1: in bfloat16 their sum would be off by a percent."""
    logits, target = torch.randn(1000, K), torch.randint(K, (1000,))
    weight = torch.tensor([0.9, 1.1, 1.05, 0.95, 1.0, 1.2]).to(dtype)
    expected = torch.nn.functional.cross_entropy(logits, target, weight.float())
    for impl in ("reference", "blocked", "native"):
        value = F.cross_entropy_loss(logits, target, weight=weight, impl=impl)
        torch.testing.assert_close(value, expected)
    hidden, head = logits, torch.eye(K)
    value = labo.linear_loss(hidden, head, target, labo.CrossEntropyLoss(weight=weight))
    torch.testing.assert_close(value, expected)


# ------------------------------------------------------------------ float16 under a loss scale


SCALE = 65536.0  # that of a GradScaler at the start
FUNCTIONS = {
    "ce": F.cross_entropy_loss,
    "ls": F.label_smoothing_loss,
    "labo": F.labo_loss,
    "labo-fixed": lambda *a, **k: F.labo_loss(*a, alpha=0.4, **k),
}


def half_problem(rows: int, spread: float):
    random = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(rows, 24, generator=random)).half()
    return logits, torch.randint(24, (rows,), generator=random)


def assert_rounded_once(slope: torch.Tensor, exact: torch.Tensor) -> None:
    """Each entry is the exact one, computed in float32 and rounded to float16."""
    assert slope.dtype == torch.float16
    limits = torch.finfo(torch.float16)
    spacing = exact.abs().clamp(min=limits.smallest_normal) * limits.eps
    error = (slope.double() - exact).abs()
    assert (error <= 0.51 * spacing + 1e-6 * exact.abs().max()).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("run", ["blocked", "auto", "compiled", "in place"])
def test_float16_gradient_has_the_loss_scale_before_it_is_rounded(name, weighted, run):
    logits, target = half_problem(16384, 2.0)
    target[5] = -100
    weight = torch.rand(24, generator=torch.Generator().manual_seed(1)) if weighted else None
    function = FUNCTIONS[name]

    def scaled(z, **arguments):
        return SCALE * function(z, target, weight=weight, **arguments)

    exact = gradient(lambda z: scaled(z, impl="reference"), logits.double())
    if run == "compiled":
        torch._dynamo.reset()
        step = torch.compile(lambda z: scaled(z, impl="blocked"), backend="aot_eager")
        slope = gradient(step, logits)
    elif run == "in place":
        slope = gradient(lambda z: scaled(z * 1, impl="blocked", inplace=True), logits)
    else:
        slope = gradient(lambda z: scaled(z, impl=run), logits)
    assert_rounded_once(slope, exact)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradient_of_the_triton_kernels(name, weighted, compiled, monkeypatch):
    """Few rows, as the interpreter is slow, but a wide spread of probabilities."""
    triton_for_native(monkeypatch)
    logits, target = half_problem(48, 4.0)
    weight = torch.rand(24, generator=torch.Generator().manual_seed(1)) if weighted else None

    def scaled(z, impl="native"):
        return SCALE * FUNCTIONS[name](z, target, weight=weight, impl=impl)

    exact = gradient(lambda z: scaled(z, "reference"), logits.double())
    torch._dynamo.reset()
    slope = gradient(torch.compile(scaled, backend="aot_eager") if compiled else scaled, logits)
    assert_rounded_once(slope, exact)


@pytest.mark.parametrize("name", ["ce", "ls", "labo", "cp"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradients_of_linear_loss(name, compiled):
    """The error is that of the layer and the loss apart, which autograd scales before rounding."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16384, 8, generator=random).half()
    weight = torch.randn(500, 8, generator=random).half()
    bias = torch.randn(500, generator=random).half()
    target = torch.randint(500, (16384,), generator=random)
    loss = MODULES[name](500)

    def fused(x, w, b):
        return SCALE * labo.linear_loss(x, w, target, loss, linear_bias=b)

    def apart(x, w, b):
        return SCALE * loss(torch.nn.functional.linear(x, w, b), target)

    def gradients(function, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves)

    torch._dynamo.reset()
    ours = gradients(
        torch.compile(fused, backend="aot_eager") if compiled else fused, x, weight, bias
    )
    naive = gradients(apart, x, weight, bias)
    exact = gradients(apart, x.double(), weight.double(), bias.double())
    for mine, usual, truth in zip(ours, naive, exact, strict=True):
        assert mine.dtype == torch.float16
        error, expected = ((g.double() - truth).norm() / truth.norm() for g in (mine, usual))
        assert error <= 1.2 * expected + 2e-4
        assert error < 2e-3


def test_float16_loss_can_be_differentiated_again():
    """Nothing is handed out in the forward pass: a second backward pass is the first one again."""
    logits, target = half_problem(8, 2.0)
    leaf = logits.requires_grad_()
    loss = F.labo_loss(leaf, target)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, again)
    loss = F.labo_loss(leaf * 1, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()


def test_float16_backward_notices_changed_tensors():
    for changed in (0, 1):
        logits, target = half_problem(8, 2.0)
        tensors = [logits.requires_grad_() * 1, target]
        loss = F.labo_loss(*tensors)
        with torch.no_grad():
            tensors[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_large_scale_overflows_to_infinity():
    """As a GradScaler expects: it then lowers the scale."""
    logits, target = half_problem(4, 2.0)
    slope = gradient(lambda z: 1e9 * F.labo_loss(z, target), logits)
    assert slope.isinf().any()
    assert not slope.isnan().any()
    assert math.isfinite(F.labo_loss(logits, target).item())
