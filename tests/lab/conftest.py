"""Shared by the tests of the lab: runs that are trained once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lab_runs import BASE, log_of, train


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``run_of(*settings, world=1)``: a finished run on the digits, trained when first asked for.

    Who changes it takes a copy.
    """

    @cache
    def trained(settings: tuple[str, ...], world: int) -> Path:
        out = tmp_path_factory.mktemp("run_of") / "run"
        assert train(out, [*settings], world) == {0}, log_of(out).read_text()
        return out

    return lambda *settings, world=1: trained(settings, world)


@pytest.fixture(scope="session")
def base_run(run_of: Callable[..., Path]) -> Path:
    return run_of(*BASE)
