"""Install a wheel into fresh environments, one for each Python, and see that it works there.

    python tools/check_wheel.py dist/torch_labo-*.whl python3.10 python3.13
    python tools/check_wheel.py --here      # in an environment that has the wheel

CI runs it on each wheel. ``--here`` checks what is installed for the Python that runs it.
``--without-kernel`` is for a wheel that was built without a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def check_readme() -> None:
    """The first lines of Python in the README print what it shows."""
    example = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert example, f"{README} has no example with its output"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example[1], {})
    assert printed.getvalue() == example[2], printed.getvalue()


def check_here(*, kernel: bool) -> None:
    """The installed package computes a worked number, with its gradient, in the C kernel.

    Without the kernel it works too, and says what is missing.
    """
    import torch

    import labo
    from labo.lab.images.digits import read_digits

    package = Path(labo.__file__).parent
    assert Path(__file__).parents[1] / "src" not in package.parents, f"{package} is a checkout"
    found = labo.backends()["native (CPU)"]
    if kernel:
        assert found.startswith("available"), f"the C kernel: {found}"
    else:
        assert found.startswith("unavailable: the C kernel was not built"), found
    assert (package / "py.typed").is_file()
    assert (package / "recipes" / "digits.yaml").is_file()
    assert (package / "lab" / "images" / "data" / "LICENSE.txt").is_file()
    assert len(read_digits()[0]) == 1797
    check_readme()
    logits = torch.tensor([[2.0, 1.0, 0.1, -1.0]], requires_grad=True)
    values, grads = [], []
    for impl in ("reference", "native" if kernel else "blocked"):
        loss = labo.LABOLoss(impl=impl)(logits, torch.tensor([0]))
        values.append(round(loss.item(), 4))
        grads.append(torch.autograd.grad(loss, logits)[0])
    assert values == [1.1205, 1.1205], values
    torch.testing.assert_close(*grads)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}, torch {torch.__version__}: labo {labo.__version__} works")
    print(f"native (CPU): {found}")


def check(wheel: Path, python: str, *options: str) -> None:
    """:func:`check_here` in a new environment of ``python`` with the wheel and what it requires."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        inside = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        install = [str(inside), "-m", "pip", "install", "--quiet", str(wheel.resolve())]
        subprocess.run(install, check=True)
        # Isolated and elsewhere, so that no checkout is imported.
        command = [str(inside), "-I", str(Path(__file__).resolve()), "--here", *options]
        subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that a wheel works.")
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("python", nargs="*", default=[sys.executable])
    parser.add_argument("--here", action="store_true", help="check the installed package")
    parser.add_argument(
        "--without-kernel", action="store_true", help="it was built without a C compiler"
    )
    options = parser.parse_args()
    if options.here:
        check_here(kernel=not options.without_kernel)
    elif options.wheel is None:
        parser.error("name a wheel, or give --here")
    else:
        for python in options.python:
            check(options.wheel, python, *["--without-kernel"] * options.without_kernel)


if __name__ == "__main__":
    main()
