"""What ``labo prepare-text`` is asked for: files, splits, tokenizer."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..config import Names, Section
from ..text.folder import check_splits
from .documents import Unit

__all__ = ["DEFAULT_VOCABULARY", "DocumentOptions", "Tokenization"]

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


class DocumentOptions(Tokenization):
    """Files of documents, and what becomes of them."""

    train: Names = Field(
        description="A text file, a table (.jsonl, .csv, .parquet, .arrow), a folder of such "
        "files, or a folder saved by datasets. Repeat for several."
    )
    valid: Names = Field((), description="The same, for validation.")
    test: Names = Field((), description="The same, for the test.")
    documents: Unit = Field(
        "file", description="A document of a text file: file, paragraph or line. Default: file."
    )
    column: str = Field("text", description="Column of a table that holds text. Default: text.")

    @model_validator(mode="after")
    def _has_splits(self) -> DocumentOptions:
        check_splits(self)
        return self
