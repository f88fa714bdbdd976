"""Shared by the whole suite: the environment, seeds, processes, a small corpus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and fault on its instructions (docs/troubleshooting.md). oneDNN
# reads this at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Workers of pytest-xdist, and the processes they start, share the cores: with more threads than
# cores PyTorch's operations wait for each other. PyTorch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Where torch has no device the Triton kernels run in the interpreter, which must be chosen before
# Triton is imported. A subprocess that is to compile kernels takes the variable out.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from loss_cases import DEVICE, compute_on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help='where the losses compute, such as "cuda"')


@pytest.fixture(autouse=True)
def _computed_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``pytest tests/core --device cuda`` every loss of a test computes there."""
    if request.config.getoption("--device") != "cpu":
        compute_on(request.config.getoption("--device"), monkeypatch)


@pytest.fixture(params=["cpu"] if DEVICE == "cpu" else ["cpu", DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that is here."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three processes joined by gloo: ``processes.run(2, f, *arguments)``."""
    from gloo import Processes

    started = Processes(3, tmp_path_factory.mktemp("gloo"))
    yield started
    started.stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a small corpus of sentence pairs."""
    from tiny_corpus import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def plain(corpus: Path) -> Any:
    """That corpus, prepared with the defaults."""
    from tiny_corpus import run

    return run(corpus, "plain")
