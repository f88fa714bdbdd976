"""The analysis of an image classifier: that of any classifier."""

from __future__ import annotations

from ..analysis.classification import ClassifierAnalysis

ANALYSIS = ClassifierAnalysis("images", locations=("data.root",))
