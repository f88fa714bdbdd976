"""The analysis of language modelling: bits per byte, and calibration of the predicted tokens.

A record is a document. Every record has the summed NLL of its tokens; those of the first documents
also have each token, see ``data.recorded_tokens``. Scores are over all documents, views over the
recorded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..analysis.reading import Floats, Run, record_lines
from ..analysis.significance import example_draws
from ..errors import RequestError
from ..tables import Column
from ..text.analysis import Forced, TokenAnalysis, digest, forced_view, read_forced


@dataclass(frozen=True, eq=False)
class ScoredDocument:
    """One record.

    Attributes:
        tokens: how many were predicted; 0 if it is longer than a block and not used.
        bytes: UTF-8 bytes of the predicted text.
        nll: of its tokens in nats, summed.
        frequency: the mean count of its tokens in the training split.
        forced: the prediction of each token, if they are recorded.
    """

    name: str
    tokens: int
    bytes: int
    nll: float
    frequency: float
    forced: Forced | None


class Documents(list[ScoredDocument]):
    """The records of a split."""

    @property
    def used(self) -> list[ScoredDocument]:
        return [document for document in self if document.tokens]

    @property
    def forced(self) -> list[Forced]:
        """The recorded tokens."""
        return [document.forced for document in self if document.forced is not None]

    def fingerprint(self) -> str:
        """Equal for two runs that predicted the same documents."""
        return digest([(d.name, d.tokens, d.bytes, d.frequency) for d in self])


def read_documents(run: Run, split: str) -> Documents:
    """The records of a split, checked."""
    documents = Documents(
        ScoredDocument(
            name=line.text("name"),
            tokens=line.integer("tokens"),
            bytes=line.integer("bytes"),
            nll=line.number("nll"),
            frequency=line.number("frequency"),
            forced=read_forced(line.section("forced")) if "forced" in line.content else None,
        )
        for line in record_lines(run, split)
    )
    if not documents.used or any(document.bytes <= 0 for document in documents.used):
        raise RequestError(f"{run.records_file(split)}: no tokens, or tokens without bytes")
    return documents


def bits_per_byte(nll: Any, size: Any) -> Any:
    """From nats and bytes, summed over documents."""
    return nll / math.log(2) / size


class LanguageAnalysis(TokenAnalysis):
    """Bits per byte, over all documents; calibration, over the recorded tokens."""

    headline = Column("bits_per_byte", "bits per byte", digits=4, better=-1)
    scores = (
        Column("perplexity", "perplexity", better=-1),
        Column("nll", "NLL", digits=3, better=-1),
        Column("token_accuracy", "token accuracy %", scale=100, better=1),
        Column("ece", "ECE %", scale=100, better=-1),
    )
    measures = (
        headline,
        Column("perplexity", "perplexity"),
        Column("nll", "NLL", digits=3),
        Column("ece", "ECE", digits=3),
        Column("ece_after", "after T", digits=3),
        Column("temperature", "T", digits=3),
        Column("underconfidence", "underconfidence", digits=3, signed=True),
        Column("confidence_on_errors", "confidence on errors", digits=3),
        Column("aurc", "AURC", digits=3),
    )
    unit = "tokens"
    circumstances: ClassVar = {
        "forced": "given the text so far",
        "forced_after": "after one temperature",
    }

    def read_records(self, run: Run, split: str) -> Documents:
        return read_documents(run, split)

    def bootstrap_scores(self, run: Run, records: Documents) -> Floats:
        used = records.used
        rows = np.array([(document.nll, document.bytes) for document in used])
        every = np.ones((1, len(used)), dtype=np.int64)
        sums = np.concatenate([every, example_draws(len(used))]) @ rows
        scores: Floats = bits_per_byte(sums[:, 0], sums[:, 1])
        return scores

    def views(self, records: Documents, split: str, notes: list[str]) -> dict[str, Any]:
        recorded, used = len(records.forced), len(records.used)
        if (forced := forced_view(records.forced)) is None:
            notes.append(f"the {split} records have no tokens: data.recorded_tokens is 0 or small")
            return {}
        if recorded < used:
            notes.append(
                f"calibration of the {split} split is that of its first {recorded} "
                f"documents of {used}: data.recorded_tokens"
            )
        return {"forced": forced}

    def findings(
        self, run: Run, records: Documents, notes: list[str], **options: Any
    ) -> dict[str, Any]:
        nll, tokens, size = (
            math.fsum(getattr(document, name) for document in records.used)
            for name in ("nll", "tokens", "bytes")
        )
        return {
            "bits_per_byte": bits_per_byte(nll, size),
            "nll": nll / tokens,
            "tokens": int(tokens),
            "bytes": int(size),
        }

    def measure(self, split: Mapping[str, Any]) -> dict[str, float | None]:
        before = split["views"].get("forced", {})
        nll = split["nll"]
        return {
            "bits_per_byte": split["bits_per_byte"],
            "perplexity": math.exp(nll) if nll < 700 else None,
            "nll": nll,
            "ece": before.get("ece"),
            "ece_after": split["views"].get("forced_after", {}).get("ece"),
            "temperature": split["temperature"],
            "confidence_on_errors": before.get("confidence_on_errors"),
            "underconfidence": before.get("underconfidence"),
            "aurc": before.get("selective", {}).get("aurc"),
        }


ANALYSIS = LanguageAnalysis()
