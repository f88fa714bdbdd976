# Written by `python tools/functional_stub.py` from the classes in labo/losses. Do not edit.
"""Every loss as a pure function of logits and target, derived from its class in ``labo.losses``."""

import torch
from torch import Tensor

def acls_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 0.1,
    lam_top: float = 1.0,
    lam_rest: float = 0.1,
    margin: float = 10.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Adaptive and conditional label smoothing (ACLS): margins on the logits themselves.

    .. math::
        -\log p_y + \lambda \Bigl(\lambda_1 \sum_{j \in M} \max(0, z_j - m)^2 +
        \frac{\lambda_2}{K-1} \sum_{j \notin M} \max(0, \max z - z_j - m)^2\Bigr)

    M are the classes with the largest logit, which is held constant in the second sum. The first
    sum depends on a shift of all logits: this loss does not see the softmax alone. It has the
        plain
    formula alone: no other loss sums squares beyond a margin, and the backends do not.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: weight lambda of both penalties.
        lam_top: lambda_1, the weight of the largest logits.
        lam_rest: lambda_2, the weight of the other logits.
        margin: the margin m.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Park et al. 2023, ACLS: Adaptive and Conditional Label Smoothing for Network Calibration.
    """

def adaptive_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    rho: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Label smoothing with the alpha of LABO: smoothing is even, its strength is not.

    .. math:: \mathrm{CE}((1-\alpha)\,\mathrm{onehot}(y) + \alpha U, p), \qquad
        \alpha = 1 - \rho H(p)/\log K

    alpha is held constant. Beside LABO it tells what its alpha and what its optimal smoothing
    distribution contribute.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        rho: how far the entropy of a prediction lowers alpha.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lee et al. 2022, Adaptive Label Smoothing with Self-Knowledge in Natural Language
        Generation.
    """

def anti_focal_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    scale: float = 0.5,
    detach_factor: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Anti-focal loss: more weight on well-fitted samples, for better rare tokens.

    .. math:: -(1 + s\,p_y)^\gamma \log p_y

    Args:
        logits: (..., K).
        target: (...) class indices.
        gamma: strength; 0 is cross entropy.
        scale: the factor s of the probability, called alpha by the authors; -1 is focal loss.
        detach_factor: hold the factor fixed, as the authors' code does.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Raunak et al. 2020, On Long-Tailed Phenomena in Neural Machine Translation.
    """

def beta_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    ema_logits: Tensor | None = None,
    *,
    alpha: float = 0.6,
    a: float = 3.0,
    draws: Tensor | None = None,
    rng: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Beta smoothing (Beta-LS): random soft labels, harder where the averaged model is confident.

    Called as ``loss(logits, target, teacher_logits, draws=None)`` with the logits of the averaged
    model, which are used for the ranking only. One draw b from Beta(a, 1) per sample, from the
    default generator of PyTorch if they are not given; the i-th smallest goes to the sample with
    the i-th smallest confidence of the averaged model. The label is
    :math:`(1-\alpha)\,\mathrm{onehot}(y) + \alpha\,(b` on y, :math:`(1-b)/(K-1)` elsewhere).
    The ranking makes the rows of a batch depend on each other.

    Args:
        logits: (..., K).
        target: (...) class indices.
        alpha: weight of the random label, in [0, 1].
        a: first parameter of the Beta distribution.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Zhang and Sabuncu 2020, Self-Distillation as Instance-Specific Label Smoothing.
    """

def confidence_penalty_loss(
    logits: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    threshold: float | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Confidence penalty: cross entropy minus beta times the entropy of the prediction.

    .. math:: -\log p_y - \beta H(p)

    With a ``threshold`` Gamma the penalty acts below that entropy only:
    :math:`+\beta\max(0, \Gamma - H(p))`. The sign is plus because low entropy is penalised.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        beta: strength; the LABO paper does not give its own. Search {0.05, 0.1, 0.3, 0.5, 1, 2}.
        threshold: entropy in nats below which the penalty acts; None applies it always.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Pereyra et al. 2017, Regularizing Neural Networks by Penalizing Confident Output
        Distributions.
    """

def connet_loss(
    logits: Tensor,
    target: Tensor,
    confidence: Tensor,
    *,
    alpha: float = 0.1,
    lam: float | Tensor = 30.0,
    trusted: Tensor | None = None,
    mean_confidence: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""ConNet-LS: a learned confidence decides how much to smooth, and may ask for the label.

    Called as ``loss(logits, target, states)``, with hidden states of the model, (..., D): the
    authors average the outputs of the first three decoder layers. The confidence of a row is
    sigmoid(linear(state)); pass ``network`` to the optimizer. With a confidence :math:`c` in (0,
        1)
    for each row and its mean :math:`\bar c` over the rows that count,

    .. math::
        p' = c\,p + (1-c)\,\mathrm{onehot}(y), \qquad
        \epsilon = \alpha \exp(1 - c/\bar c),

    .. math::
        -(1-\epsilon) \log p'_y - \frac{\epsilon}{K-1} \sum_{j \ne y} \log p'_j - \lambda \log c

    A low confidence makes a wrong prediction cheaper, raises the smoothing, and costs
    :math:`-\lambda\log c`. Gradients flow through everything, the mean included. Call ``step()``
    after each optimizer step: the price of a low confidence falls as lam exp(-t / decay_steps).
    Under ``torch.distributed`` the mean confidence is that of all processes.

    The function takes the logits of the confidence, (...), in place of the states, ``trusted``,
    (...) bool, rows with c = 1 in p', so that the label does not help them, and
    ``mean_confidence``, the mean of c, if it is over more rows than these.

    Args:
        logits: (..., K).
        target: (...) class indices.
        features: D, the size of a state.
        alpha: smoothing of a row of mean confidence.
        lam: lambda, the price of a low confidence at the start.
        decay_steps: steps in which lambda falls to 1/e; 30000 or 6000 in the authors' settings.
        trust: probability that the label does not help a row, in training mode.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lu et al. 2022, Learning Confidence for Transformer-based Neural Machine Translation.
    """

def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Cross entropy, the baseline, equal to ``F.cross_entropy``.

    .. math:: -\log p_y

    Two differences: if all targets are ignored the result is 0, with a graph, rather than NaN;
        and
    errors say what is wrong with the arguments.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.
    """

def cs_kd_loss(
    logits: Tensor,
    target: Tensor,
    peer_logits: Tensor | None = None,
    *,
    lam: float = 1.0,
    tau: float = 4.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""CS-KD: agree with the prediction for another sample of the same class.

    Called as ``loss(logits, target, teacher_logits)`` with the model's own logits z' for the
        other
    samples, held constant.

    .. math::
        \mathrm{CE} + \lambda \tau^2
        \mathrm{KL}(\mathrm{softmax}(z'/\tau) \Vert \mathrm{softmax}(z/\tau))

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: weight lambda of the KL divergence.
        tau: temperature of both predictions.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Yun et al. 2020, Regularizing Class-wise Predictions via Self-knowledge Distillation.
    """

def decoupled_distillation_loss(
    logits: Tensor,
    target: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    tau: float = 4.0,
    hard_weight: float = 1.0,
    multiplier: float | Tensor = 1.0,
    standardize: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Decoupled distillation (DKD): the target class and the other classes, weighted apart.

    Called as ``loss(logits, target, teacher_logits)``. With
    :math:`s = \mathrm{softmax}(z/\tau)` and :math:`u = \mathrm{softmax}(t/\tau)`, and a hat for
        the
    distribution over the classes other than y:

    .. math::
        w\,\mathrm{CE} + m \tau^2 \bigl(\alpha\,
        \mathrm{KL}((u_y, 1-u_y) \Vert (s_y, 1-s_y)) +
        \beta\,\mathrm{KL}(\hat u \Vert \hat s)\bigr)

    Distillation with the weights 1 and :math:`1-u_y` of the two terms is ordinary distillation.
    With two classes the second term is 0. In epoch e = 1, 2, ... the factor m of the Module is
    ``multiplier * min(e / warmup_epochs, 1)``. Call ``end_epoch()`` after each epoch.

    Args:
        logits: (..., K).
        target: (...) class indices.
        alpha: weight of the target class, in [0, 1]. For more, raise multiplier.
        beta: weight of the other classes; from 0.5 to 8 in the authors' settings.
        tau: temperature of teacher and model.
        hard_weight: w, weight of the cross entropy.
        multiplier: the factor m of both KL divergences.
        standardize: standardize the logits of both models in the KL divergences, as for
            :class:`labo.DistillationLoss`.
        warmup_epochs: epochs until the teacher has its full weight; 0 and 1 mean no warm-up.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Zhao et al. 2022, Decoupled Knowledge Distillation.
    """

def dft_loss(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Dynamic fine-tuning (DFT): cross entropy times the probability of the target.

    .. math:: -p_y \log p_y

    with the factor held constant. The gradient is that of the cross entropy times :math:`p_y`:
    targets that the model finds unlikely hardly count. The mean divides by the number of rows,
        not
    by the sum of the factors.

    Args:
        logits: (..., K).
        target: (...) class indices.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Wu et al. 2025, On the Generalization of SFT: A Reinforcement Learning Perspective with
        Reward Rectification.
    """

def distillation_loss(
    logits: Tensor,
    target: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    alpha: float = 0.9,
    tau: float = 4.0,
    kl_reduction: str = "batchmean",
    multiplier: float = 1.0,
    divergence: str = "forward",
    mixture: float | None = None,
    tau_squared: bool = True,
    standardize: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Knowledge distillation; called as ``loss(logits, target, teacher_logits)``.

    .. math::
        (1-\alpha)\,\mathrm{CE} + \alpha\, m\, \tau^2\,
        D(\mathrm{softmax}(v/\tau), \mathrm{softmax}(z/\tau))

    with the teacher's logits v. D(t, p) is a divergence:

    ================  ==========================================================================
    divergence        D
    ================  ==========================================================================
    ``forward``       KL(t || p)
    ``reverse``       KL(p || t)
    ``jsd``           b KL(t || m) + (1-b) KL(p || m), m = b t + (1-b) p; b = 0.5 by default
    ``skew``          KL(t || b t + (1-b) p); b = 0.1 by default
    ``skew_reverse``  KL(p || b p + (1-b) t); b = 0.1 by default
    ================  ==========================================================================

    A class that is masked for the model (logit -inf) is masked for the teacher too. One that the
    teacher alone masks makes ``reverse`` infinite, and no other divergence. The ``beta`` of TRL
        is
    b; its ends 0 and 1 are ``forward`` and ``reverse``, and it has no factor :math:`\tau^2`.

    ``kl_reduction="elementwise"`` also divides the KL by K, as code built on ``KLDivLoss()`` with
    its default reduction does (Tf-KD; the temperatures of the LABO paper fit that scale). With
    ``multiplier`` it is Tf-KD_self.

    ``standardize=True`` takes (v - mean v) / std v and (z - mean z) / std z in place of v and z
        in
    the KL divergence: the student is free to have another mean and scale of its logits. The
    standard deviation is the unbiased one. Masked classes are left out of it.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature of teacher and model.
        kl_reduction: "batchmean", or "elementwise" to divide the KL divergence by K as well.
        multiplier: the factor m of the KL divergence.
        divergence: "forward", "reverse", "jsd", "skew" or "skew_reverse", see the table.
        mixture: the weight b of a mixture: by default 0.5 for "jsd" and 0.1 for "skew" and
            "skew_reverse".
        tau_squared: multiply the divergence by tau^2.
        standardize: standardize the logits of both models in the KL divergence.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
        Agarwal et al. 2024, On-Policy Distillation of Language Models (``reverse``, ``jsd``).
        Ko et al. 2024, DistiLLM (``skew``, ``skew_reverse``).
        Sun et al. 2024, Logit Standardization in Knowledge Distillation.
    """

def eaft_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    top_k: int | None = None,
    normalizer: float | str | None = "log_k",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Entropy-adaptive fine-tuning (EAFT): cross entropy times the entropy of the prediction.

    .. math:: -\Bigl(\frac{H(p)}{\log K}\Bigr)^\gamma \log p_y

    with the factor held constant. A confident prediction, correct or not, hardly changes. At
    gamma = 1 the adaptive alpha of LABO is 1 minus rho times this factor. The mean divides by the
    number of rows, not by the sum of the factors.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        gamma: exponent of the factor; 0 is cross entropy.
        top_k: compute the entropy of the k largest probabilities, divided by their sum; 20 in the
            authors' code. None computes it exactly.
        normalizer: what the entropy is divided by: "log_k" for its largest value, log K or log k
            (masked classes do not count); a number, such as 3.0 in the authors' code; or None.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Diao et al. 2026, Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate
        Forgetting.
    """

def focal_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 1.0,
    detach_factor: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Focal loss: less weight on well-fitted samples.

    .. math:: -(1 - p_y)^\gamma \log p_y

    Args:
        logits: (..., K).
        target: (...) class indices.
        gamma: focusing strength; 0 is cross entropy.
        detach_factor: hold the factor constant, as the translation baselines of Raunak et al. do.
            The original differentiates through it. The values agree, the gradients do not.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lin et al. 2017, Focal Loss for Dense Object Detection.
    """

def gem_loss(
    logits: Tensor,
    target: Tensor,
    *,
    beta: float = 0.7,
    h: str = "linear",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""GEM: fine-tuning that keeps the entropy of the prediction.

    With :math:`q = \mathrm{softmax}(z/\beta)`, held constant:

    .. math:: \sum_j q_j w_j (\log p_j - \log p_y)

    where w is 1 (``h="linear"``) or :math:`\mathrm{sigmoid}(0.01 (z_j - z_y))`, held constant too
    (``h="logsigmoid"``). With the first, the gradient is q - onehot(y). The value may be
        negative:
    it is no likelihood, so compare models by their NLL. The second has the plain formula alone:
        its
    weights depend on the target and on each logit, so that it is no formula of sums over a row.

    Args:
        logits: (..., K).
        target: (...) class indices.
        beta: temperature of q.
        h: "linear", or "logsigmoid" with about half the gradient, by the reference.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Li et al. 2025, Preserving Diversity in Supervised Fine-Tuning of Large Language Models.
    """

def generalized_cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 0.7,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Generalized cross entropy (GCE): less weight on samples that are hard to fit.

    .. math:: \frac{1 - p_y^\gamma}{\gamma}

    Its gradient is that of the cross entropy times :math:`p_y^\gamma`: at gamma = 1 that of
    :class:`labo.DFTLoss`.

    Args:
        logits: (..., K).
        target: (...) class indices.
        gamma: from cross entropy (0, the limit) to the probability of an error (1).
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Zhang and Sabuncu 2018, Generalized Cross Entropy Loss for Training Deep Neural Networks
        with Noisy Labels.
    """

def generalized_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.5,
    beta: float = 0.7,
    prior: Tensor | None = None,
    generator: str = "kl",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Generalized entropy regularization: one family from confidence penalty to label smoothing.

    .. math::
        -\log p_y + \beta D_\alpha(u \Vert p), \qquad
        D_\alpha = \frac{(1-\alpha)G(u) + \alpha G(p) - G((1-\alpha)u + \alpha
            p)}{\alpha(1-\alpha)}

    with G(x) = sum x log x ("kl") or sum x^2 ("euclidean"). For "kl" the ends are limits: alpha =
        0
    is KL(p || u), the confidence penalty; alpha = 1 is KL(u || p), label smoothing. The authors'
    code leaves out the constant (1-alpha) G(u): its value is larger by beta log(K)/alpha, its
    gradient is the same.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: member of the family, from confidence penalty (0) to label smoothing (1).
        beta: strength.
        prior: (K,) the distribution u; uniform by default. At alpha = 0 every class that is not
            masked needs a probability above 0, because KL(p || u) is infinite otherwise.
        generator: the divergence: "kl", or "euclidean" for the squared distance.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Meister et al. 2020, Generalized Entropy Regularization or: There's Nothing Special about
        Label Smoothing.
    """

def held_labo_loss(
    logits: Tensor,
    target: Tensor,
    held_logits: Tensor | None = None,
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    multiplier: float = 1.0,
    confidence: float | None = None,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LABO whose optimal smoothing is held: the objective of its second and later outer steps.

    Called as ``loss(logits, target, held_logits)``. With the logits :math:`z_0` from the start of
    the outer loop, :math:`P^*_0 = \mathrm{softmax}(z_0/\tau)`, :math:`\alpha_0` from :math:`z_0`,
    :math:`\beta_0 = \alpha_0\tau` and
    :math:`\hat P_0 = (1-\alpha_0)\,\mathrm{onehot}(y) + \alpha_0 P^*_0`:

    .. math:: -\sum_j \hat P_{0,j} \log p_j + \beta_0\, \mathrm{KL}(P^*_0 \Vert U)

    The label is a constant, so the gradient is :math:`p - \hat P_0`. Without ``held_logits``, as
    for the first update on a batch, or with those of the same prediction, it is LABO.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        tau: beta / alpha, the temperature of the smoothing distribution; the paper searches
            {1.15, 1.25}. :func:`labo.smoothing.stationary_confidence` gives the confidence that a
            value leads to.
        alpha: weight of the smoothing distribution: "adaptive", or a number in [0, 1].
        rho: how far the entropy of a prediction lowers adaptive alpha.
        multiplier: factor of the loss; ours, not the paper's. With SGD, LABO learns slowly at the
            learning rate of cross entropy, because it keeps a part of the label only; 1 /
            :func:`labo.smoothing.stationary_label_weight` makes up for that.
        confidence: in place of tau: the confidence that fitted samples are to have;
            :func:`labo.smoothing.tau_for_confidence` gives the tau that leads there.
        num_classes: the number of classes, which confidence needs.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lu et al. 2023, LABO; their limitations name the number of outer steps.
    """

def kr_ls_loss(
    logits: Tensor,
    target: Tensor,
    table: Tensor,
    *,
    alpha: float = 0.5,
    order: str = "pq",
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""KR-LS (knowledge refinery): a learned table of the similarities between classes.

    Without the entry of the true class, :math:`p_{res} = \mathrm{softmax}(z_{\ne y})` and
    :math:`q_{res} = \mathrm{softmax}(S_{y,\ne y})`:

    .. math:: \mathrm{CE} + \alpha\,\mathrm{KL}(p_{res} \Vert q_{res})

    trains the network with q_res held constant. In the same backward pass the table S, (K, K)
    logits whose diagonal is not used, learns from :math:`\alpha\,\mathrm{KL}(q_{res} \Vert
    p_{res})` with p_res held constant. That term adds nothing to the value. The authors released
        no
    code: the order of the KL and what is detached follow the published algorithm. The method is
    experimental.

    The Module has the table: pass ``table`` to the optimizer. We suggest a parameter group of its
    own without weight decay; the authors do not say.

    Args:
        logits: (..., K).
        target: (...) class indices.
        num_classes: K.
        alpha: strength, in [0, 1].
        order: "pq" for KL(p_res || q_res) as above, "qp" for KL(q_res || p_res).
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Ding et al. 2021, Knowledge Refinery: Learning from Decoupled Label.
    """

def label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.1,
    convention: str = "torch",
    padding_idx: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Label smoothing, in the three conventions in use.

    .. math:: -\sum_j \hat P_j \log p_j

    with a label :math:`\hat P` that has a part of its mass on the other classes:

    ============  ====================================  =========================================
    convention    label of the true class, of others    used by
    ============  ====================================  =========================================
    ``torch``     1 - alpha + alpha/K, alpha/K          PyTorch, the paper's Eq. 1, Hugging Face
    ``fairseq``   1 - alpha, alpha/(K-1)                fairseq since 2021
    ``joeynmt``   1 - alpha, alpha/(K-2), padding 0     JoeyNMT (which logs the KL divergence:
        this
                                                        value minus the entropy of the label)
    ============  ====================================  =========================================

    fairseq(alpha) equals torch(alpha K/(K-1)). With "torch" the result equals
    ``F.cross_entropy(label_smoothing=alpha)``, except that masked classes (-inf) get no smoothing
    mass, where PyTorch returns inf.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: mass moved away from the label, in [0, 1].
        convention: which classes share alpha, see the table: "torch", "fairseq" or "joeynmt".
        padding_idx: the padding class, needed by "joeynmt" only.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision.
    """

def labo_loss(
    logits: Tensor,
    target: Tensor,
    *,
    tau: float = 1.25,
    alpha: float | str = "adaptive",
    rho: float = 0.5,
    multiplier: float = 1.0,
    alpha_grad: bool = False,
    confidence: float | None = None,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LABO: the generalized objective at its optimal smoothing distribution (Theorem 1).

    With :math:`P^* = \mathrm{softmax}(z/\tau)` and :math:`\beta = \alpha\tau` the objective has
    the closed form

    .. math::
        R^* = \mathrm{lse}(z) - (1-\alpha) z_y - \alpha\tau\,(\mathrm{lse}(z/\tau) - \log K)

    over the K classes that are not masked, and its gradient in the logits is :math:`p - \hat P`.
    The value includes the KL term, as in the paper. That term changes the value and not the
    gradient: compare models by their NLL, not by this value. With class weights the smoothing
    distribution is still that of Theorem 1, held constant.

    alpha = "adaptive" is :math:`1 - \rho H(p)/\log K` for each sample, held constant. The paper
    does not say whether gradients flow through it. It matters: the paper's argument for ignoring
    the hypergradient holds for a constant alpha only. With ``alpha_grad=True`` alpha stays in the
    graph. The gradient is then no longer p - P_hat and can lower the true class.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        tau: beta / alpha, the temperature of the smoothing distribution; the paper searches
            {1.15, 1.25}. :func:`labo.smoothing.stationary_confidence` gives the confidence that a
            value leads to.
        alpha: weight of the smoothing distribution: "adaptive", or a number in [0, 1].
        rho: how far the entropy of a prediction lowers adaptive alpha.
        multiplier: factor of the loss; ours, not the paper's. With SGD, LABO learns slowly at the
            learning rate of cross entropy, because it keeps a part of the label only; 1 /
            :func:`labo.smoothing.stationary_label_weight` makes up for that.
        alpha_grad: keep adaptive alpha in the graph, to study it.
        confidence: in place of tau: the confidence that fitted samples are to have;
            :func:`labo.smoothing.tau_for_confidence` gives the tau that leads there.
        num_classes: the number of classes, which confidence needs.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lu et al. 2023, LABO: Towards Learning Optimal Label Regularization via Bi-level
        Optimization.
    """

def logit_norm_loss(
    logits: Tensor,
    target: Tensor,
    *,
    tau: float = 0.04,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""LogitNorm: cross entropy of logits that are divided by their norm.

    .. math:: -\log \mathrm{softmax}\Bigl(\frac{z}{\tau \lVert z \rVert}\Bigr)_y

    The loss does not depend on the scale of the logits. Unlike the other losses it changes when a
    number is added to all logits. The norm is that of the classes that are not masked. It is
    at least 0.001, which bounds the gradient at 0.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        tau: temperature. The smallest value that the loss can have grows with it.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Wei et al. 2022, Mitigating Neural Network Overconfidence with Logit Normalization.
    """

def margin_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 0.1,
    margin: float = 10.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Margin-based label smoothing (MbLS): logits may differ by a margin without a penalty.

    .. math:: -\log p_y + \frac{\lambda}{K} \sum_j \max(0, \max_i z_i - z_j - m)

    With m = 0 it is max suppression.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda, called alpha by the authors. Their paper sums over the classes;
            their code, as here, takes the mean.
        margin: the difference m to the largest logit up to which there is no penalty.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Liu et al. 2022, The Devil is in the Margin: Margin-based Label Smoothing for Network
        Calibration.
    """

def masked_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    alpha: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Masked label smoothing: no smoothing mass on words that only the source language has.

    With M the classes of ``mask`` and :math:`e = \alpha/(|M|-1)` the label is
    :math:`(1 - \alpha - e)\,\mathrm{onehot}(y) + e\,1_M`: 1 - alpha on a true class in M, e on
        the
    other classes of M, 0 elsewhere.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        mask: (K,) bool, True for classes that may get smoothing mass (at least two).
        alpha: mass moved away from the label, in [0, 1].
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Chen et al. 2022, Focus on the Target's Vocabulary: Masked Label Smoothing for Machine
        Translation.
    """

def max_suppression_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float | Tensor = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Max suppression (MaxSup): the penalty of label smoothing, on the largest logit.

    .. math:: -\log p_y + \lambda \Bigl(\max_j z_j - \frac{1}{K} \sum_j z_j\Bigr)

    Label smoothing is the same with z_y in place of the maximum. The two agree where the
        prediction
    is correct. With ``final_lam`` the strength goes linearly from ``lam`` in the first of
    ``epochs`` epochs to ``final_lam`` in the last one. Call ``end_epoch()`` after each epoch.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda; with final_lam that of the first epoch.
        final_lam: lambda of the last epoch, reached linearly; None keeps lambda constant. The
            authors' code goes from 0.1 to 0.2.
        epochs: epochs of the whole training; needed with final_lam.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Zhou et al. 2025, MaxSup: Overcoming Representation Collapse in Label Smoothing.
    """

def online_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    table: Tensor,
    *,
    hard_weight: float = 0.5,
    soft_weight: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Online label smoothing (OLS): soft labels from the model's own correct predictions.

    :math:`w_h\,\mathrm{CE} + w_s\,\mathrm{CE}(S_y, p)` with row y of a class table S; a row of
    zeros adds nothing.

    The Module collects the table. In training mode each call adds the correct predictions to the
    row of their class. After each epoch, ``end_epoch()`` makes their means the table of the next
    epoch. A class without a correct prediction gets a uniform row. Mixed labels (probabilities)
        use
    the table and do not change it. Under ``torch.distributed`` the sums are added up over the
    processes.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        num_classes: K; the table has K x K entries, so this is for images rather than
            vocabularies.
        hard_weight: w_h; the authors use 0.5 on CIFAR, 1 for fine-grained data.
        soft_weight: w_s, likewise.
        first_table: "zeros" (their CIFAR code: the first epoch is half the cross entropy) or
            "uniform" (their code for fine-grained data).
        freeze_above: keep a row once its largest entry reaches this (0.88 in their code for
            fine-grained data), until an epoch without a correct prediction of its class, which
            makes it uniform again.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Zhang et al. 2021, Delving Deep into Label Smoothing.
    """

def poly1_loss(
    logits: Tensor,
    target: Tensor,
    *,
    epsilon: float = 2.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Poly-1: cross entropy with another first coefficient in its series in 1 - p_y.

    .. math:: -\log p_y + \epsilon (1 - p_y)

    The gradient is that of the cross entropy times :math:`1 + \epsilon p_y`: more weight on
    well-fitted samples. Class probabilities q give
    :math:`\sum_j q_j (-\log p_j + \epsilon (1 - p_j))`.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        epsilon: what is added to the coefficient, -1 or more; 0 is cross entropy.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Leng et al. 2022, PolyLoss: A Polynomial Expansion Perspective of Classification Loss
        Functions.
    """

def prior_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    prior_logits: Tensor | None = None,
    *,
    rho: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Adaptive label smoothing towards an earlier prediction.

    .. math:: \mathrm{CE}((1-\alpha)\,\mathrm{onehot}(y) + \alpha\,\mathrm{softmax}(t), p), \qquad
        \alpha = 1 - \rho H(p)/\log K

    :class:`labo.AdaptiveSmoothingLoss` with the prediction of an earlier model, whose logits are
        t,
    in place of U. It is held constant. Called as ``loss(logits, target, teacher_logits)``;
        without
    them, as in the first epoch, the smoothing is even.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        rho: how far the entropy of a prediction lowers alpha.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Lee et al. 2022, as for :class:`labo.AdaptiveSmoothingLoss`.
    """

def ps_kd_loss(
    logits: Tensor,
    target: Tensor,
    past_logits: Tensor | None = None,
    *,
    alpha: float | Tensor = 0.8,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""PS-KD: the label mixed with the model's own prediction of the epoch before.

    Cross entropy with :math:`(1-\alpha_t)\,\mathrm{onehot}(y) + \alpha_t p_{past}`. Called as
    ``loss(logits, target, teacher_logits)`` with the logits or log-probabilities of the past
    prediction, held constant. Without them, as in the first epoch, the loss is the cross entropy.

    The Module has alpha_t = alpha (e + 1) / epochs in epoch e = 0, 1, ... Call ``end_epoch()``
    after each epoch.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        epochs: epochs of the whole training.
        alpha: weight of the past prediction; in the Module that of the last epoch, reached
            linearly.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Kim et al. 2021, Self-Knowledge Distillation with Progressive Refinement of Targets.
    """

def r_drop_loss(
    logits: Tensor,
    target: Tensor,
    other_logits: Tensor | None = None,
    *,
    lam: float = 1.0,
    hard_weight: float = 0.5,
    label: str = "onehot",
    alpha: float | str | None = None,
    tau: float = 1.25,
    rho: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""R-Drop: two forward passes with different dropout are to agree.

    Called as ``loss(logits, target, other_logits)``. With z and z' the logits of the two passes,
        p
    and p' their probabilities:

    .. math::
        w\,(\ell(z) + \ell(z')) + \lambda\,
        \frac{\mathrm{KL}(p \Vert p') + \mathrm{KL}(p' \Vert p)}{2}

    where :math:`\ell` is the cross entropy with the label, with the smoothed label
    (:class:`labo.LabelSmoothingLoss`), or LABO (:class:`labo.LABOLoss`, each pass with its own
    optimal smoothing). Gradients flow through both passes and through both directions of the
    divergence.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: lambda, the weight of the divergence, called alpha by the authors.
        hard_weight: w, the weight of each of the two cross entropies; 1 in the authors' code.
        label: "onehot", "smoothed" or "labo".
        alpha: of label "smoothed", by default 0.1, or of "labo", by default "adaptive".
        tau: temperature of label "labo".
        rho: how much entropy lowers the adaptive alpha of label "labo".
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Wu et al. 2021, R-Drop: Regularized Dropout for Neural Networks.
    """

def smoothed_cross_entropy(
    logits: Tensor,
    target: Tensor,
    smoothing: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    r"""The generalized objective of the paper, for any smoothing distribution.

    .. math::
        R(P_{ls}) = -\sum_j \hat P_j \log p_j + \beta\, \mathrm{KL}(P_{ls} \Vert U),
        \qquad \hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}

    With the uniform distribution it is label smoothing. With a teacher's prediction and
    beta = alpha it is knowledge distillation plus alpha log K (Remarks 1 and 2). With
    beta = alpha tau its minimum over all P_ls is at ``tempered(logits, tau)``: LABO.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        smoothing: (..., K), P_ls, a distribution for every row. Gradients flow through it unless
            it is detached.
        alpha: a number in [0, 1], or one per sample, (...).
        beta: a number of 0 or more, or one per sample, (...).
        weight, ignore_index, reduction, dim: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Example:
        >>> logits, target = torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0])
        >>> prior = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
        >>> smoothed_cross_entropy(logits, target, prior, alpha=0.1)
        tensor(0.5473)
    """

def tf_reg_loss(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.1,
    tau: float = 20.0,
    mode: str = "repo",
    multiplier: float | None = None,
    confidence: float = 0.99,
    tau_squared: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""TF-reg: distillation from a virtual teacher, as in the authors' code or as in their paper.

    With s the :func:`labo.smoothing.virtual_teacher`:

    - ``mode="repo"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,(m/K)\,\mathrm{KL}(s \Vert p)`,
        the
      element-wise mean of the authors' code (hence 1/K), temperature on the teacher only.
    - ``mode="paper"``: :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,\mathrm{KL}(s \Vert p_\tau)`,
        their
      Eq. 9, temperature on both; ``tau_squared`` multiplies the KL by tau squared.

    Args:
        logits: (..., K).
        target: (...) class indices.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature of the virtual teacher; with mode "paper" of the model as well.
        mode: "repo", the loss of the authors' code, or "paper", their Eq. 9.
        multiplier: the factor m of mode "repo". None is K, which is what their CIFAR-100 ResNet18
            uses (100).
        confidence: the value of the virtual teacher for the true class.
        tau_squared: multiply the KL divergence of mode "paper" by tau squared.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Yuan et al. 2020, Revisiting Knowledge Distillation via Label Smoothing Regularization.
    """

def topk_distillation_loss(
    logits: Tensor,
    target: Tensor,
    indices: Tensor,
    log_probabilities: Tensor,
    *,
    alpha: float = 0.5,
    tail: str = "bucket",
    tau: float = 1.25,
    divergence: str = "forward",
    mixture: float | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Distillation from the stored k largest probabilities of a teacher.

    Called as ``loss(logits, target, indices, log_probabilities)``: (..., k) the stored classes,
    each at most once, a negative index for padding; and their log-probabilities under the whole
    softmax of the teacher, held constant. In :func:`labo.linear_loss` the two are passed as
    ``teacher_logits=(indices, log_probabilities)``.

    :math:`(1-\alpha)\,\mathrm{CE} + \alpha\,\mathrm{KL}`, where the KL divergence at temperature
        1
    is known for the stored classes S only. With t_j the probabilities of the teacher,
    :math:`m = 1 - \sum_S t_j` the mass of its other classes and :math:`w = \sum_{j \notin S} p_j`
    that of the model, ``tail`` says what takes its place:

    ================  ============================================================================
    tail              divergence
    ================  ============================================================================
    ``bucket``        :math:`\sum_S t_j \log(t_j/p_j) + m \log(m/w)`: the other classes as one
                      class. Never above the KL divergence to the whole teacher.
    ``uniform``       KL(Q || p) with the mass m spread evenly over the other classes
    ``labo``          KL(Q || p) with m spread as softmax(z / tau) over the other classes, held
                      constant: the optimal smoothing of LABO; at tau = 1 it equals ``bucket``
    ``drop``          :math:`\sum_S t_j \log(t_j/p_j)`: no tail; may be negative
    ``renormalize``   KL(t_S / (1-m) || p): the stored probabilities divided by their sum
    ================  ============================================================================

    Another ``divergence`` (see :class:`labo.DistillationLoss`) takes the other classes as one
        class
    (``bucket``): it is never above that to the whole teacher, because merging classes lowers it.
    ``jsd``, ``skew`` and ``skew_reverse`` also take ``renormalize``, which is no bound;
    ``reverse`` would be infinite there. With ``reverse`` m is at least 1e-8.

    A class that is masked for the model (logit -inf) is masked for the teacher too.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        alpha: weight of the teacher, in [0, 1].
        tail: "bucket", "uniform", "labo", "drop" or "renormalize", see the table.
        tau: temperature of the tail "labo".
        divergence: "forward", "reverse", "jsd", "skew" or "skew_reverse", see the table.
        mixture: the weight b of a mixture: by default 0.5 for "jsd" and 0.1 for "skew" and
            "skew_reverse".
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.
    """

def weighted_label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    groups: Tensor,
    *,
    alpha: float = 0.1,
    shares: tuple[float, float, float] = (0.4, 0.4, 0.2),
    normalize: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Weighted label smoothing: shares of the mass for target-only, common and source-only words.

    A class of group g gets :math:`e_g = \alpha s_g / |g|`, and the label is
    :math:`(1 - \alpha - e_0)\,\mathrm{onehot}(y) + \sum_g e_g 1_g`. In the authors' code this
        sums
    to 1 - e_0; ``normalize`` divides by that sum. The share of a group without classes goes to
        the
    other groups, and that of a masked class to the other classes.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        groups: (K,) integers: 0 for target-only, 1 for common, 2 for source-only classes.
        alpha: mass moved away from the label, in [0, 1].
        shares: shares of target-only, common and source-only classes in the smoothing mass; they
            are normalized.
        normalize: make the label sum to 1; False is the authors' code.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Chen et al. 2022, as for :class:`labo.MaskedLabelSmoothingLoss`.
    """

def z_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 0.0001,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""z-loss: a penalty that keeps the log-sum-exp of the logits near 0, to add to any loss.

    .. math:: \lambda \Bigl(\log \sum_j e^{z_j}\Bigr)^2

    Softmax does not determine the sum of the logits; this does, and leaves the probabilities
        free.
    The target tells only which rows count, and with which class weight, so that the sum
    ``cross_entropy_loss(logits, target) + z_loss(logits, target)`` has one reduction.

    Args:
        logits: (..., K).
        target: (...) class indices or (..., K) class probabilities.
        lam: strength lambda.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Chowdhery et al. 2022, PaLM: Scaling Language Modeling with Pathways.
    """

def zipf_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    lam: float = 0.1,
    power: float = 1.0,
    correct_only: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    dim: int = -1,
    z_loss: float = 0.0,
    impl: str = "auto",
    inplace: bool = False,
) -> Tensor:
    r"""Zipf label smoothing: the other classes by their rank in the prediction.

    .. math:: -\log p_y + \lambda\, \mathrm{KL}(\pi \Vert p_{others}), \qquad
        \pi_j \propto \mathrm{rank}_j^{-s}

    over the classes other than y, where :math:`p_{others}` is p renormalised over them. The rank
        of
    a class is that of its logit among all classes (1 is the largest; equal logits share the
    smallest rank), held constant. Ranks need the row in order, not sums over it: there is the
        plain
    formula alone.

    Args:
        logits: (..., K).
        target: (...) class indices.
        lam: weight lambda of the KL divergence.
        power: the exponent s of the ranks.
        correct_only: leave the KL divergence out where the prediction is wrong.
        weight, ignore_index, reduction, dim, z_loss, impl, inplace: as for every loss.

    Returns:
        The reduced loss, or (...) for ``reduction="none"``.

    Reference:
        Liang et al. 2022, Efficient One Pass Self-distillation with Zipf's Label Smoothing.
    """
