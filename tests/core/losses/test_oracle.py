"""Every loss in float64 is that of its equation in long double, to 1e-12."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from labo import functional as F
from labo import smoothing

K = 6
quick = settings(max_examples=20, deadline=None)

unit = st.floats(0, 1)
strength = st.floats(0, 3)
tau = st.floats(0.3, 30)
gamma = st.just(0.0) | st.floats(0.01, 3)


def either(**options):
    """Hyper-parameters, each of them drawn or left at its default."""
    return st.fixed_dictionaries({}, optional=options)


def together(one, other):
    """The hyper-parameters of both."""
    return st.builds(lambda a, b: a | b, one, other)


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


labo_like = {"tau": tau, "alpha": st.just("adaptive") | unit, "rho": unit}
ger = {
    "alpha": st.sampled_from([0, 1]) | st.floats(0.05, 0.95),
    "beta": strength,
    "generator": st.sampled_from(["kl", "euclidean"]),
    "prior": st.sampled_from([None, [0.1, 0.3, 0.05, 0.15, 0.2, 0.2]]),
}
eaft = {
    "gamma": strength,
    "top_k": st.integers(2, 9),
    "normalizer": st.sampled_from(["log_k", 3.0, None]),
}
tf_reg = {
    "alpha": unit,
    "tau": tau,
    "mode": st.sampled_from(["repo", "paper"]),
    "multiplier": strength,
    "confidence": unit,
    "tau_squared": st.booleans(),
}
distilled = {"alpha": unit, "tau": tau, "multiplier": strength, "standardize": st.booleans()}
kd = distilled | {"kl_reduction": st.sampled_from(["batchmean", "elementwise"])}
dkd = distilled | {"beta": strength, "hard_weight": strength}
tails = st.sampled_from(["bucket", "uniform", "labo", "drop", "renormalize"])
wls = {"alpha": unit, "shares": st.tuples(*[st.floats(0.01, 1)] * 3), "normalize": st.booleans()}
r_drop = st.one_of(
    either(lam=strength, hard_weight=strength),
    st.builds(lambda a: {"label": "smoothed", "alpha": a}, st.none() | unit),
    st.builds(
        lambda a, t, r: {"label": "labo", "alpha": a, "tau": t, "rho": r},
        st.none() | unit,
        tau,
        unit,
    ),
)

# The hyper-parameters of a loss, by the name that its function and its oracle have; what follows a
# comma tells several of one loss apart. Numbers such as 0.1 are not dyadic: a detour through
# float32 changes them by 1e-9.
HYPERS = {
    "cross_entropy": either(),
    "label_smoothing": either(alpha=unit),
    "label_smoothing, fairseq": st.builds(lambda a: {"alpha": a, "convention": "fairseq"}, unit),
    "label_smoothing, joeynmt": st.builds(
        lambda a: {"alpha": a, "convention": "joeynmt", "padding_idx": 0}, unit
    ),
    "labo": either(**labo_like, alpha_grad=st.booleans()),
    "held_labo": either(**labo_like),
    "confidence_penalty": either(beta=strength, threshold=strength),
    "max_suppression": either(lam=strength),
    "margin_smoothing": either(lam=strength, margin=strength),
    "acls": either(lam=strength, lam_top=strength, lam_rest=strength, margin=strength),
    "generalized_cross_entropy": either(gamma=gamma),
    "gem": either(beta=tau, h=st.sampled_from(["linear", "logsigmoid"])),
    "zipf_smoothing": either(lam=strength, power=strength, correct_only=st.booleans()),
    "adaptive_smoothing": either(rho=unit),
    "prior_smoothing": either(rho=unit),
    "poly1": either(epsilon=st.floats(-1, 3)),
    "logit_norm": either(tau=tau),
    "dft": either(),
    "eaft": either(**eaft),
    "focal": either(gamma=strength),
    "anti_focal": either(gamma=strength, scale=strength),
    "generalized_entropy": either(**ger),
    "tf_reg": either(**tf_reg),
    "distillation": either(**kd),
    "distillation, divergence": together(
        either(alpha=unit, tau=tau, tau_squared=st.booleans()), divergences
    ),
    "decoupled_distillation": either(**dkd),
    "topk_distillation": either(alpha=unit, tail=tails, tau=tau),
    "topk_distillation, divergence": together(
        either(alpha=unit),
        divergences | mixtures.map(lambda given: given | {"tail": "renormalize"}),
    ),
    "cs_kd": either(lam=strength, tau=tau),
    "ps_kd": either(alpha=unit),
    "online_label_smoothing": either(hard_weight=strength, soft_weight=strength),
    "kr_ls": either(alpha=unit, order=st.sampled_from(["pq", "qp"])),
    "masked_label_smoothing": either(alpha=unit),
    "weighted_label_smoothing": either(**wls),
    "connet": either(alpha=st.floats(0, 0.3), lam=strength),
    "r_drop": r_drop,
}
FUNCTIONS = {"topk_distillation": from_two_stored, "connet": with_confidence}
# What a loss takes besides.
NEEDS = dict.fromkeys(["held_labo", "prior_smoothing", "cs_kd", "ps_kd", "r_drop"], "teacher")
NEEDS |= dict.fromkeys(["distillation", "decoupled_distillation", "topk_distillation"], "teacher")
NEEDS |= {"connet": "confidence", "online_label_smoothing": "soft table", "kr_ls": "table"}
NEEDS |= {"masked_label_smoothing": "mask", "weighted_label_smoothing": "groups"}
ROWS = ("teacher", "confidence")  # what has a row for each sample

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


@pytest.mark.parametrize("case", HYPERS)
@quick
@given(st.integers(0, 1000), weights, st.data())
def test_float64_is_that_of_the_oracle(case, seed, weight, data):
    hyper, name = data.draw(HYPERS[case]), case.partition(",")[0]
    function = FUNCTIONS.get(name) or getattr(F, f"{name}_loss")
    logits, target, besides = draw(seed)
    needs = NEEDS.get(name)
    extra = () if needs is None else (besides[needs],)
    value = function(logits, target, *extra, **as_tensors(hyper, weight))
    compute = getattr(oracle, name)
    close(value, expected(compute, logits, target, weight, hyper, besides[needs], needs in ROWS))


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
