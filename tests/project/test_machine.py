"""``make gpu`` says in one line what a machine has, and in one more what is wrong."""

from __future__ import annotations

import pytest
import torch
from benchmarks import gpu
from benchmarks import machine as module


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU and all that it needs; a function that changes what it has."""
    places = {"cuda": torch.version, "is_available": torch.cuda}

    def has(**changes):
        for name, value in changes.items():
            value = value if name == "cuda" else lambda value=value: value
            monkeypatch.setattr(places.get(name, module), name, value)

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    has(cuda="13.0", is_available=True, driver_cuda=(13, 1), _triton="3.7.1")
    return has


def test_versions(machine):
    torch_version = f"torch {torch.__version__} (CUDA 13.0)"
    assert module.describe() == f"NVIDIA H100, driver for CUDA 13.1, {torch_version}, Triton 3.7.1"
    assert module.problem() is None


TOO_OLD = (
    "the driver is too old: it supports CUDA 12.4, and this torch is built for CUDA 13.0. "
    "Update the driver, or install another build of torch (README, Two commands)"
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"driver_cuda": (12, 4), "is_available": False}, TOO_OLD),
        ({"driver_cuda": None, "is_available": False}, "there is no NVIDIA driver"),
        ({"is_available": False}, "torch finds no device"),
        ({"_triton": None}, "Triton is not installed"),
        ({"cuda": None}, "this torch is a build for the CPU"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_what_is_wrong(machine, changes, problem):
    machine(**changes)
    found = module.problem()
    assert found.startswith(problem)
    assert "\n" not in found


def test_the_command_ends_with_that_line(machine, capsys):
    machine(is_available=False)
    with pytest.raises(SystemExit, match="no benchmark on a GPU: torch finds no device"):
        gpu.main(["--versions"])
    assert capsys.readouterr().out.startswith("no GPU, driver for CUDA 13.1, torch")


def test_without_a_driver_there_is_no_version(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert module.driver_cuda() is None
