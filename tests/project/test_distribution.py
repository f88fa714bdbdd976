"""The source distribution holds everything that is under version control."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import ROOT


def under_version_control() -> set[str]:
    """The files of the repository; in an unpacked source distribution those that it lists."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names = listed.stdout.split("\0")
    else:
        (sources,) = ROOT.glob("src/*.egg-info/SOURCES.txt")
        names = sources.read_text(encoding="utf-8").splitlines()
    return {name for name in names if name and ".egg-info/" not in name and name != "setup.cfg"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += ["sdist", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_source_distribution_is_whole(sdist):
    with tarfile.open(sdist) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
    # A link to the recipes in the package becomes a copy of them.
    wanted = under_version_control()
    if "recipes" in wanted:
        recipes = {f"recipes/{path.name}" for path in (ROOT / "recipes").iterdir()}
        wanted = wanted - {"recipes"} | recipes
    missing = {name for name in wanted if (ROOT / name).exists()} - names
    assert missing == set()
    added = {name for name in names - wanted if ".egg-info/" not in name}
    assert added <= {"PKG-INFO", "setup.cfg"}
