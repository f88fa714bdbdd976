"""The options of ``labo prepare-text`` and ``labo generate``."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..config import Names, Section
from ..text.folder import check_splits
from ..text.options import Units

DEFAULT_VOCABULARY = 10_000


class Tokenization(Section):
    """What becomes of documents."""

    vocabulary: int | None = Field(
        None, ge=1, description="Learn a vocabulary of this size. Default: 10000."
    )
    tokenizer: str | None = Field(
        None, description="Use the tokenizer of this Hugging Face folder."
    )
    holdout: int = Field(
        0, ge=0, description="Hold out every N-th training document for validation."
    )
    holdout_test: int = Field(0, ge=0, description="Hold out every N-th of the rest for the test.")

    @model_validator(mode="after")
    def _consistent(self) -> Tokenization:
        if self.vocabulary is not None and self.tokenizer is not None:
            raise ValueError("--vocabulary and --tokenizer exclude each other")
        if 1 in (self.holdout, self.holdout_test):
            raise ValueError("--holdout: every document held out leaves none to train on")
        return self


class DocumentOptions(Tokenization, Units):
    """Files of documents, and what becomes of them."""

    train: Names = Field(
        description="A text file, a table (.jsonl, .csv, .parquet, .arrow), a folder of such "
        "files, or a folder saved by datasets. Repeat for several."
    )
    valid: Names = Field((), description="The same, for validation.")
    test: Names = Field((), description="The same, for the test.")

    @model_validator(mode="after")
    def _has_splits(self) -> DocumentOptions:
        check_splits(self)
        return self


class Sampling(Section):
    """How tokens are chosen."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest number of tokens of a continuation. Default: 100, or half the "
        "positions.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="Temperature: 0 takes the most probable token, 1 draws from the prediction. "
        "Default: 0.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Draw only from the most probable tokens with this share of the mass.",
    )
    seed: int = Field(0, ge=0, description="Seed of the random numbers. Default: 0.")
    batch_tokens: int = Field(
        4096, ge=1, description="Prompts times the longest prompt and continuation of a batch."
    )


class GenerateOptions(Sampling):
    """The options of ``labo generate``."""

    scores: bool = Field(
        False, description="Write JSON lines, with each token and its probability."
    )
