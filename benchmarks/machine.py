"""What a machine has of what the Triton kernels need, and in one line what is wrong."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util

import torch

_CHOOSE = "install another build of torch (README, Two commands)"


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int()
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            found = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        if found == 0:
            return version.value // 1000, version.value % 1000 // 10
    return None


def _triton() -> str | None:
    """The version of Triton, whose distribution has another name for Windows and for ROCm."""
    if importlib.util.find_spec("triton") is None:
        return None
    names = importlib.metadata.packages_distributions().get("triton", ["triton"])
    return importlib.metadata.version(names[0])


def _text(version: tuple[int, int] | None) -> str:
    return "no NVIDIA driver" if version is None else f"driver for CUDA {version[0]}.{version[1]}"


def describe() -> str:
    """The device and the versions, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    build = torch.version.cuda and f"CUDA {torch.version.cuda}"
    build = build or (torch.version.hip and f"ROCm {torch.version.hip}") or "CPU"
    driver = "" if torch.version.hip else f", {_text(driver_cuda())}"
    kernels = _triton()
    kernels = f"Triton {kernels}" if kernels else "no Triton"
    return f"{device}{driver}, torch {torch.__version__} ({build}), {kernels}"


def problem() -> str | None:
    """What is wrong, and what would be right; None if the kernels can run."""
    if not torch.version.cuda and not torch.version.hip:
        return f"this torch is a build for the CPU: {_CHOOSE}"
    if not torch.cuda.is_available():
        return _no_device()
    if _triton() is None:
        return "Triton is not installed: pip install triton"
    return None


def _no_device() -> str:
    driver = driver_cuda()
    if torch.version.cuda and driver is None:
        return "there is no NVIDIA driver here, or a container does not show it (--gpus all)"
    if torch.version.cuda and driver is not None:
        wanted = int(torch.version.cuda.partition(".")[0])
        if driver[0] < wanted:
            return (
                f"the driver is too old: it supports CUDA {driver[0]}.{driver[1]}, and this torch "
                f"is built for CUDA {torch.version.cuda}. Update the driver, or {_CHOOSE}"
            )
    return "torch finds no device: CUDA_VISIBLE_DEVICES may hide it, or a container its files"
