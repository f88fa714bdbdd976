"""Every loss once more, row by row in NumPy's longest float, written from its equation.

Nothing here is shared with the library. Each function takes the logits z, (K,), the label y, the
class weights w, (K,), what the loss takes besides, and its hyper-parameters, and returns the value
of the row. ``mean`` reduces rows as ``F.cross_entropy`` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Row = Any  # (K,) of np.longdouble


def real(x: Any) -> Row:
    return np.asarray(x, dtype=np.longdouble)


def log_softmax(z: Row) -> Row:
    u = z - z.max()
    return u - np.log(np.exp(u).sum())


def softmax(z: Row) -> Row:
    return np.exp(log_softmax(z))


def onehot(y: int, size: int) -> Row:
    return real(np.arange(size) == y)


def entropy(p: Row) -> Row:
    return -(p * np.log(p)).sum()


def kl(p: Row, q: Row) -> Row:
    return (p * np.log(np.where(p > 0, p / q, 1))).sum()


def ce(z: Row, q: Row, w: Row) -> Row:
    return -(w * q * log_softmax(z)).sum()


def smoothed(z: Row, y: int, w: Row, p: Row, alpha: Any) -> Row:
    return ce(z, (1 - alpha) * onehot(y, len(z)) + alpha * p, w)


def cross_entropy(z, y, w):
    return ce(z, onehot(y, len(z)), w)


def label_smoothing(z, y, w, *, alpha=0.1, convention="torch", padding_idx=None):
    k = len(z)
    allowed = np.ones(k, dtype=bool)
    if convention != "torch":
        allowed[y] = False
    if padding_idx is not None:
        allowed[padding_idx] = False
    return smoothed(z, y, w, real(allowed) / allowed.sum(), real(alpha))


def held_labo(z, y, w, held, *, tau=1.25, alpha="adaptive", rho=0.5, multiplier=1):
    k = real((z != -np.inf).sum())
    if alpha == "adaptive":
        alpha = 1 - real(rho) * entropy(softmax(held)) / np.log(k)
    p = softmax(held / real(tau))
    divergence = w[y] * real(alpha) * real(tau) * kl(p, 1 / k)
    return real(multiplier) * (smoothed(z, y, w, p, real(alpha)) + divergence)


def labo(z, y, w, *, alpha_grad=False, **hyper):
    return held_labo(z, y, w, z, **hyper)


def confidence_penalty(z, y, w, *, beta=0.1, threshold=None):
    h = entropy(softmax(z))
    penalty = -h if threshold is None else max(real(0), real(threshold) - h)
    return cross_entropy(z, y, w) + w[y] * real(beta) * penalty


def max_suppression(z, y, w, *, lam=0.1):
    return cross_entropy(z, y, w) + w[y] * real(lam) * (z.max() - z.mean())


def margin_smoothing(z, y, w, *, lam=0.1, margin=10.0):
    excess = [max(real(0), z.max() - x - real(margin)) for x in z]
    return cross_entropy(z, y, w) + w[y] * real(lam) * sum(excess) / len(z)


def poly1(z, y, w, *, epsilon=2.0):
    return cross_entropy(z, y, w) + w[y] * real(epsilon) * (1 - softmax(z)[y])


def logit_norm(z, y, w, *, tau=0.04):
    return cross_entropy(z / (real(tau) * (np.sqrt((z * z).sum()) + real(1e-7))), y, w)


def dft(z, y, w):
    return softmax(z)[y] * cross_entropy(z, y, w)


def eaft(z, y, w, *, gamma=1.0, top_k=None, normalizer="log_k"):
    p = np.sort(softmax(z))[-(top_k or len(z)) :]
    largest = np.log(real(len(p)))
    by = {"log_k": largest, None: real(1)}.get(normalizer, normalizer)
    return (entropy(p / p.sum()) / real(by)) ** real(gamma) * cross_entropy(z, y, w)


def focal(z, y, w, *, gamma=1.0, detach_factor=False):
    return (1 - softmax(z)[y]) ** real(gamma) * cross_entropy(z, y, w)


def anti_focal(z, y, w, *, gamma=1.0, scale=0.5, detach_factor=True):
    return (1 + real(scale) * softmax(z)[y]) ** real(gamma) * cross_entropy(z, y, w)


def generalized_cross_entropy(z, y, w, *, gamma=0.7):
    if gamma == 0:
        return cross_entropy(z, y, w)
    return w[y] * (1 - softmax(z)[y] ** real(gamma)) / real(gamma)


def gem(z, y, w, *, beta=0.7, h="linear"):
    log_p = log_softmax(z)
    q = softmax(z / real(beta))
    kept = 1 / (1 + np.exp(-(z - z[y]) / 100)) if h == "logsigmoid" else 1
    return w[y] * (q * kept * (log_p - log_p[y])).sum()


def zipf_smoothing(z, y, w, *, lam=0.1, power=1.0, correct_only=False):
    rank = real([1 + (z > x).sum() for x in z])
    rest = np.arange(len(z)) != y
    mass = rank[rest] ** -real(power)
    divergence = kl(mass / mass.sum(), softmax(z[rest]))
    if correct_only and rank[y] > 1:
        divergence = real(0)
    return cross_entropy(z, y, w) + w[y] * real(lam) * divergence


def acls(z, y, w, *, lam=0.1, lam_top=1.0, lam_rest=0.1, margin=10.0):
    at_top = z == z.max()
    over = np.maximum(0, z[at_top] - real(margin)) ** 2
    below = np.maximum(0, z.max() - z[~at_top] - real(margin)) ** 2
    penalty = real(lam_top) * over.sum() + real(lam_rest) / (len(z) - 1) * below.sum()
    return cross_entropy(z, y, w) + w[y] * real(lam) * penalty


def adaptive_smoothing(z, y, w, prior=None, *, rho=0.5):
    k = real(len(z))
    alpha = 1 - real(rho) * entropy(softmax(z)) / np.log(k)
    return smoothed(z, y, w, 1 / k if prior is None else softmax(prior), alpha)


prior_smoothing = adaptive_smoothing


def generalized_entropy(z, y, w, *, alpha=0.5, beta=0.7, prior=None, generator="kl"):
    p = softmax(z)
    u = np.full(len(z), 1 / real(len(z))) if prior is None else real(prior)
    if generator == "euclidean":
        divergence = ((u - p) ** 2).sum()
    elif alpha in (0, 1):
        divergence = kl(p, u) if alpha == 0 else kl(u, p)
    else:
        a = real(alpha)
        g = [(x * np.log(x)).sum() for x in (u, p, (1 - a) * u + a * p)]
        divergence = ((1 - a) * g[0] + a * g[1] - g[2]) / (a * (1 - a))
    return cross_entropy(z, y, w) + w[y] * real(beta) * divergence


def tf_reg(z, y, w, *, alpha=0.1, tau=20.0, mode="repo", multiplier=None, confidence=0.99, **rest):
    k = len(z)
    v = np.full(k, (1 - real(confidence)) / (k - 1))
    v[y] = confidence
    s = softmax(v / real(tau))
    if mode == "repo":
        distance = (1 if multiplier is None else real(multiplier) / k) * kl(s, softmax(z))
    else:
        distance = kl(s, softmax(z / real(tau)))
        distance = distance * real(tau) ** 2 if rest.get("tau_squared") else distance
    return (1 - real(alpha)) * cross_entropy(z, y, w) + w[y] * real(alpha) * distance


def standardized(z):
    return (z - z.mean()) / (np.std(z, ddof=1) + real(1e-7))


def diverging(t, p, divergence="forward", mixture=None):
    """The divergence of two distributions."""
    b = real({"jsd": 0.5}.get(divergence, 0.1) if mixture is None else mixture)
    if divergence == "forward":
        return kl(t, p)
    if divergence == "reverse":
        return kl(p, t)
    if divergence == "jsd":
        m = b * t + (1 - b) * p
        return b * kl(t, m) + (1 - b) * kl(p, m)
    if divergence == "skew":
        return kl(t, b * t + (1 - b) * p)
    return kl(p, b * p + (1 - b) * t)


def distillation(
    z,
    y,
    w,
    teacher,
    *,
    alpha=0.9,
    tau=4.0,
    kl_reduction="batchmean",
    multiplier=1.0,
    standardize=False,
    tau_squared=True,
    **divergence,
):
    pair = (standardized(teacher), standardized(z)) if standardize else (teacher, z)
    soft = diverging(*(softmax(x / real(tau)) for x in pair), **divergence)
    soft = real(multiplier) * (real(tau) ** 2 if tau_squared else 1) * soft
    soft = soft / len(z) if kl_reduction == "elementwise" else soft
    return (1 - real(alpha)) * cross_entropy(z, y, w) + w[y] * real(alpha) * soft


def decoupled_distillation(
    z,
    y,
    w,
    teacher,
    *,
    alpha=1.0,
    beta=8.0,
    tau=4.0,
    hard_weight=1.0,
    multiplier=1.0,
    standardize=False,
):
    pair = (standardized(z), standardized(teacher)) if standardize else (z, teacher)
    s, u = (softmax(x / real(tau)) for x in pair)
    rest = np.arange(len(z)) != y
    binary = kl(real([u[y], u[rest].sum()]), real([s[y], s[rest].sum()]))
    others = kl(u[rest] / u[rest].sum(), s[rest] / s[rest].sum())
    soft = real(alpha) * binary + real(beta) * others
    soft = real(multiplier) * real(tau) ** 2 * soft
    return real(hard_weight) * cross_entropy(z, y, w) + w[y] * soft


def topk_distillation(z, y, w, teacher, *, alpha=0.5, tail="bucket", tau=1.25, **divergence):
    """With the two largest probabilities of the teacher stored."""
    p, t = softmax(z), softmax(teacher)
    kept = np.argsort(t)[-2:]
    rest = np.setdiff1d(np.arange(len(z)), kept)
    m, q = t[rest].sum(), t.copy()
    if tail == "bucket" or divergence:
        label = np.append(t[kept], m)
        if tail == "renormalize":
            label = np.append(t[kept] / t[kept].sum(), 0)
        soft = diverging(label, np.append(p[kept], p[rest].sum()), **divergence)
    elif tail == "drop":
        soft = kl(t[kept], p[kept])
    elif tail == "renormalize":
        soft = kl(t[kept] / t[kept].sum(), p[kept])
    else:
        q[rest] = m * (softmax(z[rest] / real(tau)) if tail == "labo" else 1 / real(len(rest)))
        soft = kl(q, p)
    return (1 - real(alpha)) * cross_entropy(z, y, w) + w[y] * real(alpha) * soft


def cs_kd(z, y, w, peer, *, lam=1.0, tau=4.0):
    soft = real(tau) ** 2 * kl(softmax(peer / real(tau)), softmax(z / real(tau)))
    return cross_entropy(z, y, w) + w[y] * real(lam) * soft


def ps_kd(z, y, w, past, *, alpha=0.8):
    return smoothed(z, y, w, softmax(past), real(alpha))


def online_label_smoothing(z, y, w, table, *, hard_weight=0.5, soft_weight=0.5):
    return real(hard_weight) * cross_entropy(z, y, w) + real(soft_weight) * ce(z, table[y], w)


def kr_ls(z, y, w, table, *, alpha=0.5, order="pq"):
    rest = np.arange(len(z)) != y
    p, q = softmax(z[rest]), softmax(table[y][rest])
    return cross_entropy(z, y, w) + w[y] * real(alpha) * (kl(p, q) if order == "pq" else kl(q, p))


def masked_label_smoothing(z, y, w, mask, *, alpha=0.1):
    e = real(alpha) / (mask.sum() - 1)
    return ce(z, (1 - real(alpha) - e) * onehot(y, len(z)) + e * real(mask), w)


def weighted_label_smoothing(z, y, w, groups, *, alpha=0.1, shares=(0.4, 0.4, 0.2), normalize=True):
    present = [g for g in range(3) if (groups == g).any()]
    total = sum(real(shares[g]) for g in present)
    e = [real(alpha) * real(shares[g]) / total if g in present else real(0) for g in range(3)]
    e = [mass / max(1, (groups == g).sum()) for g, mass in enumerate(e)]
    q = (1 - real(alpha) - e[0]) * onehot(y, len(z)) + real([e[g] for g in groups])
    return ce(z, q / (1 - e[0]) if normalize else q, w)


def r_drop(
    z, y, w, other, *, lam=1.0, hard_weight=0.5, label="onehot", alpha=None, tau=1.25, rho=0.5
):
    def hard(x):
        if label == "onehot":
            return cross_entropy(x, y, w)
        if label == "smoothed":
            return label_smoothing(x, y, w, alpha=0.1 if alpha is None else alpha)
        return labo(x, y, w, tau=tau, alpha="adaptive" if alpha is None else alpha, rho=rho)

    p, r = softmax(z), softmax(other)
    divergence = (kl(p, r) + kl(r, p)) / 2
    return real(hard_weight) * (hard(z) + hard(other)) + w[y] * real(lam) * divergence


def connet(z, y, w, given, *, alpha=0.1, lam=30.0):
    """``given`` is the logit of the confidence, the mean confidence, and whether it is trusted."""
    u, average, trusted = given
    c = 1 / (1 + np.exp(-u))
    hint = real(0) if trusted else 1 - c
    mixed = np.log((1 - hint) * softmax(z) + hint * onehot(y, len(z)))
    eps = real(alpha) * np.exp(1 - c / average)
    others = real(np.arange(len(z)) != y) / (len(z) - 1)
    label = (1 - eps) * onehot(y, len(z)) + eps * others
    return -(w * label * mixed).sum() - w[y] * real(lam) * np.log(c)


def mean(values: list[Any], target: list[int], w: Row) -> float:
    return float(sum(values) / sum(w[y] for y in target))
