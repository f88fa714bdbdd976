"""Image files of a data set, decoded when they are used."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..run import checksums
from .windows import Chooser, image_size, read_image

_MEASURED = 64  # images that are looked at for the size of all


@dataclass(frozen=True)
class FolderImages:
    """Image files, decoded when they are indexed: (3, H, W) uint8, each of its own size."""

    root: Path  # the folder of the split
    names: tuple[str, ...]  # of the files, relative to it
    known_sizes: tuple[int, ...] | None = None  # of the files in bytes, if they are known

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        return read_image(self.root / self.names[index])

    def window(self, index: int, choose: Chooser) -> Tensor:
        """A window of an image, (3, rows, columns) uint8."""
        return read_image(self.root / self.names[index], choose)

    def select(self, index: Tensor) -> FolderImages:
        """The images with these indices, (M,) int64."""
        return FolderImages(self.root, tuple(self.names[i] for i in index.tolist()))

    def sizes(self) -> list[int]:
        """The sizes of the files in bytes."""
        if self.known_sizes is not None:
            return list(self.known_sizes)
        return [os.stat(self.root / name).st_size for name in self.names]

    def digests(self) -> dict[str, str]:
        """name -> SHA-256 of the file; computed once per file and remembered."""
        return checksums.digests(self.root, self.names)

    def shorter_side(self) -> int:
        """The median of the shorter sides of some of the images, in pixels."""
        chosen = self.names[:: -(-len(self.names) // _MEASURED)]
        return int(statistics.median(min(image_size(self.root / name)) for name in chosen))
