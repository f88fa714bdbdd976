"""Where the data of the experiments comes from: one file per source.

:func:`labo.lab.data.images.load_images` is the way in for images.
"""

from __future__ import annotations

from ..errors import RequestError

__all__ = ["DataError"]


class DataError(RequestError):
    """Data that cannot be used: what is wrong, where, and what would be right, in one line."""

    def __init__(self, message: str) -> None:
        # A library below may have had several lines to say.
        super().__init__(" ".join(message.splitlines()))
