"""``make gpu`` says in one line what a machine has, and in one more what is wrong."""

from __future__ import annotations

import importlib

import pytest
import torch

from scripts import ROOT


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU and all that it needs."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.machine")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(module, "driver_cuda", lambda: (13, 1))
    monkeypatch.setattr(module, "_triton", lambda: "3.7.1")
    return module


def test_versions(machine):
    torch_version = f"torch {torch.__version__} (CUDA 13.0)"
    assert machine.describe() == f"NVIDIA H100, driver for CUDA 13.1, {torch_version}, Triton 3.7.1"
    assert machine.problem() is None


def test_a_driver_that_is_too_old(machine, monkeypatch):
    monkeypatch.setattr(machine, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.problem() == (
        "the driver is too old: it supports CUDA 12.4, and this torch is built for CUDA 13.0. "
        "Update the driver, or install another build of torch (README, Two commands)"
    )
    assert "no GPU, driver for CUDA 12.4" in machine.describe()


@pytest.mark.parametrize(
    ("patches", "problem"),
    [
        ({"driver_cuda": None, "is_available": False}, "there is no NVIDIA driver"),
        ({"is_available": False}, "torch finds no device"),
        ({"_triton": None}, "Triton is not installed"),
        ({"cuda": None}, "this torch is a build for the CPU"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_wrong(machine, monkeypatch, patches, problem):
    for name, value in patches.items():
        if name == "cuda":
            monkeypatch.setattr(torch.version, name, value)
        else:
            place = torch.cuda if name == "is_available" else machine
            monkeypatch.setattr(place, name, lambda value=value: value)
    found = machine.problem()
    assert found.startswith(problem)
    assert "\n" not in found


def test_the_command_ends_with_that_line(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = importlib.import_module("benchmarks.gpu").main
    with pytest.raises(SystemExit, match="no benchmark on a GPU: torch finds no device"):
        main(["--versions"])
    assert capsys.readouterr().out.startswith("no GPU, driver for CUDA 13.1, torch")


def test_without_a_driver_there_is_no_version(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.machine")

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert module.driver_cuda() is None
