"""constraints.txt resolves for every build of torch, on every Python, without a network.

constraints.json has what each pinned wheel requires. ``python tools/resolve.py --fixture`` writes
it, and ``make resolve`` asks pip and uv the same question with a network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = json.loads(Path(__file__).with_name("constraints.json").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = PROJECT["project"]["name"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
# 3.11.0 and 3.11.5: some pins change in between.
PYTHONS = ("3.10.0", "3.11.0", "3.11.5", "3.12.0", "3.13.0", "3.14.0")
BUILDS = {"CUDA": "Linux", "CPU": "Linux", "macOS": "Darwin"}
# Each build of torch names the CUDA libraries that it needs, exactly.
OF_TORCH = ("nvidia-", "cuda-")


def environment(build: str, python: str) -> dict[str, str]:
    system = BUILDS[build]
    return default_environment() | {
        "platform_machine": "x86_64" if system == "Linux" else "arm64",
        "platform_system": system,
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "sys_platform": system.lower(),
    }


def of_project(extra: str) -> Iterator[str]:
    """What ``make`` asks pip for."""
    yield from PROJECT["build-system"]["requires"]
    yield from PROJECT["project"]["dependencies"]
    if extra:
        yield f"{NAME}[{extra}]"


class Resolution:
    """The packages that an extra of the project brings, and what is wrong with their pins."""

    def __init__(self, pins: list[Requirement], build: str, python: str, extra: str) -> None:
        self.environment, self.python = environment(build, python), Version(python)
        applied = [p for p in pins if not p.marker or p.marker.evaluate(self.environment)]
        self.pinned = {canonicalize_name(pin.name): pin for pin in applied}
        self.ambiguous = len(self.pinned) < len(applied)
        self.known = KNOWN["wheels"] | KNOWN["torch"][build]
        self.found: set[tuple[str, str]] = set()  # packages with extras
        self.problems: list[str] = ["a package has two pins"] if self.ambiguous else []
        for text in of_project(extra):
            self.add(text, "the project", "")

    def add(self, text: str, parent: str, extra: str) -> None:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        environment = self.environment | {"extra": extra}
        if requirement.marker and not requirement.marker.evaluate(environment):
            return
        if name.startswith(OF_TORCH):
            return
        for wanted in requirement.extras:
            if name == NAME:
                for more in EXTRAS[wanted]:
                    self.add(more, f"[{wanted}]", "")
            else:
                self.enter(name, wanted)
        if name != NAME:
            self.enter(name, "")
            version = self.version(name)
            if version and not requirement.specifier.contains(version, prereleases=True):
                self.problems.append(f"{parent} requires {requirement}; the pin is {version}")

    def version(self, name: str) -> str | None:
        return next(iter(self.pinned[name].specifier)).version if name in self.pinned else None

    def enter(self, name: str, extra: str) -> None:
        """Follow what a pinned package requires, once."""
        if (name, extra) in self.found:
            return
        self.found.add((name, extra))
        wheel = self.known.get(f"{name}=={self.version(name)}")
        if name not in self.pinned:
            self.problems.append(f"{name} is not pinned")
        elif wheel is None:
            self.problems.append(f"constraints.json does not have {self.pinned[name]}")
        else:
            if self.python not in SpecifierSet(wheel["requires_python"]):
                self.problems.append(f"{self.pinned[name]} is not for Python {self.python}")
            for text in wheel["requires_dist"]:
                self.add(text, f"{name} {self.version(name)}", extra)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.found}


def cases(pins: list[Requirement], extra: str) -> dict[str, Resolution]:
    return {
        f"{build}, Python {python}": Resolution(pins, build, python, extra)
        for build in BUILDS
        for python in PYTHONS
    }


def problems(pins: list[Requirement], extra: str = "dev") -> dict[str, list[str]]:
    return {case: found.problems for case, found in cases(pins, extra).items() if found.problems}


@pytest.mark.parametrize("extra", ["", "lab", "dev"])
def test_the_constraints_resolve(extra):
    assert problems(PINS, extra) == {}


def test_every_pin_is_used():
    used = {
        str(found.pinned[name])
        for found in cases(PINS, "dev").values()
        for name in found.names & found.pinned.keys()
    }
    assert {str(pin) for pin in PINS} == used


def replaced(name: str, *pins: str) -> list[Requirement]:
    return [pin for pin in PINS if pin.name != name] + [Requirement(pin) for pin in pins]


@pytest.mark.parametrize(
    ("pins", "case", "problem"),
    [
        (
            replaced("triton", "triton==3.9.0"),
            "CUDA, Python 3.12.0",
            "torch 2.13.0 requires triton",
        ),
        (replaced("triton"), "CUDA, Python 3.12.0", "triton is not pinned"),
        (replaced("numpy", "numpy==2.4.6"), "macOS, Python 3.10.0", "numpy==2.4.6 is not for"),
        (replaced("numpy", "numpy==9"), "CPU, Python 3.13.0", "constraints.json does not have"),
        ([*PINS, Requirement("tqdm==4.70.0")], "CPU, Python 3.13.0", "a package has two pins"),
    ],
)
def test_a_wrong_pin_is_found(pins: list[Requirement], case: str, problem: str):
    assert any(line.startswith(problem) for line in problems(pins)[case])


def test_the_pin_of_triton_that_did_not_install():
    found = problems(replaced("triton", "triton==3.9.0"), "")
    assert {case.partition(",")[0] for case in found} == {"CUDA"}  # hidden where there is no CUDA


def test_the_lab_leaves_out_what_few_need():
    for found in cases(PINS, "lab").values():
        assert not {"peft", "tensorboard", "scikit-learn", "scipy", "pytest"} & found.names


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_installs_the_lab_alone(tmp_path):
    command = ["make", "--dry-run", f"VENV={tmp_path}/new"]
    demo, test = (
        subprocess.run([*command, goal], cwd=ROOT, capture_output=True, text=True, check=True)
        for goal in ("demo", "test")
    )
    assert ".[lab]" in demo.stdout
    assert ".[dev]" not in demo.stdout
    assert ".[dev]" in test.stdout
