"""The numbers of the paper (Lu et al. 2023) as printed there. None of them was measured by us.

The tables by their LaTeX labels: table 1 ``tab:MT``, table 2 ``tab:MMT``, table 3 ``tab:cv-tf``,
table 4 ``tab:split``; ImageNet (``tab:imagenet``) is in the appendix.
Figure 1 is ``fig2``, figure 2 is ``fig_analysis``. Methods have the names of ``METHODS``.
"""

from __future__ import annotations

Score = tuple[float, float]

# Table 1: BLEU, mean and standard deviation, beam 5. The paper does not give the number of runs.
BILINGUAL_COLUMNS = (
    "iwslt14-de-en",
    "iwslt14-en-de",
    "iwslt14-en-fr",
    "iwslt14-fr-en",
    "wmt14-en-de",
    "wmt14-de-en",
)
BILINGUAL: dict[str, tuple[Score, ...]] = {
    "base": ((33.9, 0.09), (27.8, 0.11), (40.0, 0.15), (39.0, 0.14), (27.1, 0.03), (29.8, 0.10)),
    "ls": ((34.5, 0.14), (28.3, 0.16), (40.5, 0.16), (39.8, 0.05), (27.7, 0.09), (31.9, 0.09)),
    "cp": ((34.2, 0.15), (27.9, 0.07), (40.4, 0.20), (39.2, 0.13), (27.4, 0.13), (30.4, 0.08)),
    "fl": ((33.0, 0.13), (26.8, 0.16), (39.2, 0.16), (38.3, 0.05), (26.6, 0.09), (28.9, 0.09)),
    "afl": ((34.2, 0.14), (27.9, 0.13), (40.5, 0.09), (39.5, 0.16), (27.5, 0.10), (30.3, 0.08)),
    "labo": ((35.2, 0.07), (28.8, 0.15), (40.9, 0.08), (40.3, 0.05), (28.3, 0.05), (32.3, 0.06)),
}

# Table 2: sacreBLEU of one model for both pairs.
MULTILINGUAL_COLUMNS = ("de-en", "fr-en")
MULTILINGUAL: dict[str, tuple[float, ...]] = {
    "base": (26.9, 35.4),
    "ls": (28.0, 36.8),
    "labo": (28.4, 37.2),
}

# Table 3: test accuracy in percent, mean of five runs; and training time relative to Base.
CIFAR_COLUMNS = (
    "cifar100-mobilenet-v2",
    "cifar100-resnet18",
    "cifar10-mobilenet-v2",
    "cifar10-resnet18",
)
CIFAR: dict[str, tuple[Score, ...]] = {
    "base": ((67.98, 1.0), (76.92, 1.0), (90.55, 1.0), (94.82, 1.0)),
    "kd": ((70.99, 3.7), (77.78, 3.8), (91.52, 3.7), (95.28, 3.9)),
    "ls": ((68.69, 1.0), (77.67, 1.0), (90.82, 1.0), (95.02, 1.0)),
    "cs-kd": ((70.36, 1.1), (77.95, 1.3), (91.17, 1.1), (94.90, 1.3)),
    "tf-reg": ((70.08, 1.0), (77.91, 1.2), (90.97, 1.1), (95.05, 1.2)),
    "beta-ls": ((70.45, 1.5), (77.83, 1.4), (90.89, 1.5), (94.87, 1.6)),
    "kr-ls": ((70.12, 1.0), (77.82, 1.0), (90.67, 1.0), (94.76, 1.0)),
    "labo": ((71.05, 1.0), (78.10, 1.0), (91.53, 1.0), (95.21, 1.0)),
}

# Table 4: BLEU on thirds of the IWSLT'14 DE-EN sentences, by the mean frequency of their tokens.
FREQUENCY_COLUMNS = ("most", "medium", "least")
FREQUENCY: dict[str, dict[str, tuple[float, ...]]] = {
    "valid": {"ls": (40.3, 35.2, 33.1), "labo": (40.7, 35.8, 33.8)},
    "test": {"ls": (38.4, 33.5, 32.1), "labo": (39.0, 34.3, 32.7)},
}

# Figure 2: the mode of the probabilities of the chosen tokens, from the paper's text.
PEAKS = {"ls": 0.9, "labo": 0.4}

# Appendix: ImageNet validation accuracy in percent, and time relative to Base.
IMAGENET_COLUMNS = ("imagenet-resnet50", "imagenet-resnet152")
IMAGENET: dict[str, tuple[Score, ...]] = {
    "base": ((75.81, 1.0), (77.92, 1.0)),
    "ls": ((76.17, 1.0), (78.33, 1.0)),
    "tf-reg": ((76.21, 1.1), (78.12, 1.1)),
    "beta-ls": ((76.13, 1.5), (78.56, 1.6)),
    "kr-ls": ((76.32, 1.3), (78.48, 1.3)),
    "labo": ((76.55, 1.1), (78.62, 1.1)),
}

# The names of the methods in the rows of the paper.
ROWS = {
    "base": "Base",
    "ls": "LS",
    "cp": "CP",
    "fl": "FL",
    "afl": "AFL",
    "kd": "KD",
    "cs-kd": "CS-KD",
    "tf-reg": "TF-reg",
    "beta-ls": "Beta-LS",
    "kr-ls": "KR-LS",
    "labo": "LABO",
}
