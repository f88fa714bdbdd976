"""Resolve constraints.txt on every Python, for Linux and macOS: ``make resolve``. Needs a network.

Prints one line for each case; the exit status is 1 if one fails. uv (``pip install uv``) resolves
for other Pythons and platforms: on Linux it finds the CUDA build of torch. pip resolves for this
machine, with its settings (where they may name a CPU build of torch) and without them.

``--fixture`` then writes tests/project/constraints.json: what each pinned wheel requires. The test
beside it does without a network what this tool does with one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "project" / "constraints.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The platforms of uv: the oldest ones that torch has wheels for.
PLATFORMS = {"Linux": "x86_64-manylinux_2_28", "macOS": "aarch64-apple-darwin"}
EXTRAS = {"torch": None, ".[lab]": "lab", ".[dev]": "dev"}
# Settings of pip that choose other packages than those of the public index.
SOURCES = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
WITHOUT_SETTINGS = {name: value for name, value in os.environ.items() if name not in SOURCES}
WITHOUT_SETTINGS |= {"PIP_CONFIG_FILE": os.devnull}


def run(
    command: Sequence[str], env: dict[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, input=text, capture_output=True, text=True)


def with_uv(python: str, platform: str, extra: str | None) -> subprocess.CompletedProcess[str]:
    """Resolve for another Python and platform; wheels are not downloaded."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--system-certs"]
    command = [sys.executable, "-m", *command, "--python-version", python]
    command += ["--python-platform", PLATFORMS[platform], "--constraint", "constraints.txt"]
    command += ["-"] if extra is None else ["--extra", extra, "pyproject.toml"]
    return run(command, env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, text="torch")


def with_pip(target: str, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Resolve as ``make`` does on this machine."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--no-build-isolation", "--constraint", "constraints.txt", target, "setuptools"]
    return run(command, env=env)


def cases() -> Iterator[tuple[str, subprocess.CompletedProcess[str]]]:
    for target, extra in EXTRAS.items():
        for platform in PLATFORMS:
            for python in PYTHONS:
                yield f"{target} {platform} {python}", with_uv(python, platform, extra)
        yield f"{target} with pip, as this machine is set up", with_pip(target, None)
        yield f"{target} with pip, without settings", with_pip(target, WITHOUT_SETTINGS)


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def metadata(
    wheels: Sequence[str], python: str, platform: str, env: dict[str, str] | None
) -> dict[str, dict[str, Any]]:
    """What wheels require, by ``name==version`` as the pins have it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
        command += ["--no-deps", "--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += ["--python-version", python, "--platform", platform, *wheels]
        # Wheels for older systems fit this one too.
        for older in ("manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5"):
            command += ["--platform", f"{older}_x86_64"] if "linux" in platform else []
        done = run(command, env=env)
    if done.returncode:
        sys.exit(done.stderr)
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {
        f"{canonicalize_name(wheel['name'])}=={wheel['version'].partition('+')[0]}": {
            "requires_python": wheel.get("requires_python", ""),
            "requires_dist": wheel.get("requires_dist", []),
        }
        for wheel in found
    }


def without_unused_extras(wheels: dict[str, dict[str, Any]]) -> None:
    """Drop what only extras require that no other package asks for."""
    kept = {
        (canonicalize_name(requirement.name), extra)
        for wheel in wheels.values()
        for requirement in map(Requirement, wheel["requires_dist"])
        for extra in requirement.extras
    } | {("mkdocstrings", "python")}  # asked for by pyproject.toml
    for name, wheel in wheels.items():
        extras = ["", *(extra for package, extra in kept if package == name.partition("==")[0])]
        wheel["requires_dist"] = [
            text
            for text in wheel["requires_dist"]
            if "extra" not in text.partition(";")[2]
            or any(f"'{extra}'" in text.replace('"', "'") for extra in extras if extra)
        ]


def fixture() -> dict[str, Any]:
    linux, macos = "manylinux_2_28_x86_64", "macosx_14_0_arm64"
    old = [pin for pin in pins() if pin.marker and "<" in str(pin.marker)]
    new = [pin for pin in pins() if pin not in old]
    wheels: dict[str, Any] = {}
    for python, chosen in (("3.10", old), ("3.12", new)):
        names = [f"{pin.name}{pin.specifier}" for pin in chosen]
        wheels |= metadata(names, python, linux, WITHOUT_SETTINGS)
    (torch,) = (name for name in wheels if name.startswith("torch=="))
    builds = {
        "CUDA": {torch: wheels.pop(torch)},
        "CPU": metadata([torch], "3.11", linux, None),
        "macOS": metadata([torch], "3.11", macos, WITHOUT_SETTINGS),
    }
    for group in (wheels, *builds.values()):
        without_unused_extras(group)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": date, "torch": builds, "wheels": dict(sorted(wheels.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Resolve constraints.txt everywhere.")
    parser.add_argument("--fixture", action="store_true", help="write the data of the offline test")
    if parser.parse_args().fixture:
        FIXTURE.write_text(json.dumps(fixture(), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {FIXTURE.relative_to(ROOT)}")
        return
    failed = False
    for case, done in cases():
        print(f"{'FAILED' if done.returncode else 'ok':8}{case}", flush=True)
        if done.returncode:
            failed = True
            print(done.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
