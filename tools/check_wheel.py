"""Install a wheel into fresh environments, one for each Python, and see that it works there.

    python tools/check_wheel.py dist/torch_labo-*.whl python3.10 python3.13
    python tools/check_wheel.py --here      # in an environment that has the wheel

CI runs it on each wheel. ``--here`` checks what is installed for the Python that runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def check_here() -> None:
    """The installed package computes a worked number, with its gradient, in the C kernel."""
    import torch

    import labo

    package = Path(labo.__file__).parent
    assert Path(__file__).parents[1] / "src" not in package.parents, f"{package} is a checkout"
    found = labo.backends()["native (CPU)"]
    assert found.startswith("available"), f"the C kernel: {found}"
    assert (package / "py.typed").is_file()
    assert (package / "recipes" / "digits.yaml").is_file()
    logits = torch.tensor([[2.0, 1.0, 0.1, -1.0]], requires_grad=True)
    values, grads = [], []
    for impl in ("reference", "native"):
        loss = labo.LABOLoss(impl=impl)(logits, torch.tensor([0]))
        values.append(round(loss.item(), 4))
        grads.append(torch.autograd.grad(loss, logits)[0])
    assert values == [1.1205, 1.1205], values
    torch.testing.assert_close(*grads)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}, torch {torch.__version__}: labo {labo.__version__} works")


def check(wheel: Path, python: str) -> None:
    """:func:`check_here` in a new environment of ``python`` with the wheel and torch."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        inside = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        install = [str(inside), "-m", "pip", "install", "--quiet", str(wheel.resolve()), "numpy"]
        subprocess.run(install, check=True)
        # Isolated and elsewhere, so that no checkout is imported.
        command = [str(inside), "-I", str(Path(__file__).resolve()), "--here"]
        subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that a wheel works.")
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("python", nargs="*", default=[sys.executable])
    parser.add_argument("--here", action="store_true", help="check the installed package")
    options = parser.parse_args()
    if options.here:
        check_here()
    elif options.wheel is None:
        parser.error("name a wheel, or give --here")
    else:
        for python in options.python:
            check(options.wheel, python)


if __name__ == "__main__":
    main()
