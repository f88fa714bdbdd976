"""The samples of the worked numbers: K = 4, natural log, float64, six decimals.

Each worked number was computed outside this library, twice. A and B are samples, T a teacher.
"""

from __future__ import annotations

import torch

A = torch.tensor([2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
B = torch.tensor([0.5, -0.5, 1.5, 0.0], dtype=torch.float64)
T = torch.tensor([3.0, 1.0, 0.2, -0.5], dtype=torch.float64)
Y0, Y1 = torch.tensor(0), torch.tensor(1)
BATCH, TARGETS = torch.stack([A, B]), torch.tensor([0, 1])


def near(value: torch.Tensor | float | list, expected: float | list) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=6e-7,
        rtol=0,
    )
