"""What one of several processes does for all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from PIL import Image

from gloo import launch
from labo.lab.errors import DataError
from labo.lab.images import sources
from labo.lab.images.sources import load_images


def list_images(rank: int, root: str) -> None:
    dist.init_process_group("gloo")
    if rank:
        sources.ON_DISK["folder"] = None  # it must not be called here
    data = load_images("folder", root, holdout=0)
    assert data.train.images.names == ("cat/0.png", "dog/0.png")
    with pytest.raises(DataError, match="no such folder"):
        load_images("folder", f"{root}/nowhere")
    dist.barrier()


def test_files_are_listed_by_one_process_and_errors_reach_all(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / split / name / "0.png")
    launch(2, list_images, str(tmp_path))
