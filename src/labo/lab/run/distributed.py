"""What the lab needs of many processes beyond what accelerate has."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor


def gather_rows(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of the processes; their numbers may differ."""
    if accelerator.num_processes == 1:
        return rows
    sizes = accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).tolist()
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = accelerator.gather(padded.to(accelerator.device)).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
