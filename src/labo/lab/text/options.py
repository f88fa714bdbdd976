"""Options of commands for several tasks on text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..config import Section

Unit = Literal["file", "paragraph", "line"]
Precision = Literal["float16", "float32"]
Sampling = Literal["top", "random"]


class Units(Section):
    """What a document is."""

    documents: Unit = Field(
        "file", description="A document of a text file: file, paragraph or line. Default: file."
    )
    column: str = Field("text", description="Column of a table that holds text. Default: text.")


class ScoreOptions(Units):
    """The options of ``labo score``."""

    pair: str | None = Field(None, description="Language pair of a translation model with several.")
    tokens: bool = Field(False, description="Also write each token and its log-probability.")


class TeacherOptions(Section):
    """The options of ``labo teacher``."""

    top_k: int = Field(64, ge=1, description="Tokens to store for each target. Default: 64.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Store no more of them than reach this probability together. Default: 1.",
    )
    sampling: Sampling = Field(
        "top",
        description="Which tokens: top, or random for draws, each with its share of the draws. "
        "Default: top.",
    )
    seed: int = Field(0, ge=0, description="Of the draws. Default: 0.")
    block: int | None = Field(
        None,
        ge=1,
        description="For documents: tokens the model sees at once. Default: all its positions.",
    )
    precision: Precision = Field(
        "float16",
        description="Of the log-probabilities: float16 or float32. Default: float16.",
    )
