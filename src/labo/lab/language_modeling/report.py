"""The part of the report that is about language modelling."""

from __future__ import annotations

from ..text.report import TokenReport

REPORT = TokenReport()
