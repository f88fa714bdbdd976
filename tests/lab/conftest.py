"""Shared by the tests of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab_runs import BASE, log_of, train


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the digits, of ``BASE``. Who changes it takes a copy."""
    out = tmp_path_factory.mktemp("base") / "run"
    assert train(out, BASE) == {0}, log_of(out).read_text()
    return out
