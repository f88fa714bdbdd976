"""What ``labo prepare-text`` is asked for: files, splits, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from ..config import Names, Section, explain
from ..errors import RequestError
from .documents import Unit

__all__ = ["DEFAULT_VOCABULARY", "DocumentOptions", "Tokenization", "checked"]

DEFAULT_VOCABULARY = 10_000


class Tokenization(Section):
    """What becomes of documents."""

    vocabulary: int | None = Field(None, ge=1)
    """Size of the learned byte-level vocabulary; 10,000 if neither it nor a tokenizer is given."""
    tokenizer: str | None = None
    """A Hugging Face folder whose tokenizer is used instead."""
    holdout: int = Field(0, ge=0)
    """Every so many-th document of the training inputs goes to the validation split."""
    holdout_test: int = Field(0, ge=0)
    """Every so many-th of the rest goes to the test split."""

    @model_validator(mode="after")
    def _consistent(self) -> Tokenization:
        if self.vocabulary is not None and self.tokenizer is not None:
            raise ValueError("vocabulary and tokenizer exclude each other")
        if 1 in (self.holdout, self.holdout_test):
            raise ValueError("holdout: every document held out leaves none to train on")
        return self


class DocumentOptions(Tokenization):
    """Files of documents, and what becomes of them."""

    train: Names
    """Files, tables and folders; see :mod:`labo.lab.language_modeling.documents`."""
    valid: Names = ()
    test: Names = ()
    documents: Unit = "file"
    """What a document of a text file is: file, paragraph or line."""
    column: str = "text"
    """The column of a table that holds text."""

    @model_validator(mode="after")
    def _has_splits(self) -> DocumentOptions:
        if not self.train:
            raise ValueError("train: no training data")
        for split, holdout in (("valid", "holdout"), ("test", "holdout_test")):
            if getattr(self, split) and getattr(self, holdout):
                raise ValueError(f"{split} and {holdout} exclude each other")
            if not getattr(self, split) and not getattr(self, holdout):
                raise ValueError(f"{split}: no such data; give {split} or {holdout}")
        return self


def checked(settings: Mapping[str, Any]) -> DocumentOptions:
    """Options from a dict; None leaves one as it is.

    Raises:
        RequestError: one line for each thing that is wrong.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return DocumentOptions.model_validate(given)
    except ValidationError as error:
        raise RequestError("\n".join(explain(error, DocumentOptions))) from error
