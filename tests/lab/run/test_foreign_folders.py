"""A run directory from someone else: what is done in it stays in it."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from lab_runs import log_of, run
from labo.lab.errors import LabError, RequestError
from labo.lab.run import checksums, files
from labo.lab.run.checkpoint import Checkpoints, RunState
from labo.lab.run.directory import RunDirectory, write_model
from labo.lab.run.distributed import make_accelerator
from labo.lab.run.lock import held
from labo.lab.text.folder import Maker, building


@pytest.fixture
def copy(base_run, tmp_path):
    return shutil.copytree(base_run, tmp_path / "run")


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    return path


def list_in_manifest(folder, name):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sha256"][name] = ["0" * 64]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("form", ["relative", "absolute", "through a link"])
def test_names_in_a_manifest_delete_nothing_elsewhere(form, copy, victim):
    names = {
        "relative": "../../victim.txt",
        "absolute": str(victim),
        "through a link": "away/victim.txt",
    }
    if form == "through a link":
        (copy / "best" / "away").symlink_to(victim.parent)
    list_in_manifest(copy / "best", names[form])
    log = log_of(copy)
    run(["evaluate", str(copy)], log)
    assert victim.read_text() == "precious", log.read_text()
    write_model(copy / "best", {}, {"config.json": "{}"})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["/etc/x", "a/../../x", "", "a\0"])
def test_manifests_with_names_elsewhere_are_damaged(name, copy):
    for folder in (copy / "best", next((copy / "checkpoints").iterdir())):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["sha256"][name] = next(iter(manifest["sha256"].values()))
        path.write_text(json.dumps(manifest))
    with pytest.raises(checksums.DamagedError, match="names a file elsewhere"):
        checksums.verify_folder(copy / "best")
    assert checksums.manifest_of(copy / "best").sha256 == {}
    said = []
    assert not list(Checkpoints(copy / "checkpoints", "").usable(said.append))
    assert "names a file elsewhere" in said[0]


def test_no_writer_follows_a_link(tmp_path, victim):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("recipe.yaml", "results.json", "metrics.jsonl", "model.safetensors"):
        files.temporary(folder / name).symlink_to(victim)
        (folder / name).symlink_to(victim)
    files.write_text(folder / "recipe.yaml", "new")
    files.write_json(folder / "results.json", {})
    files.write_tensors(folder / "model.safetensors", {})
    with pytest.raises(LabError, match=r"cannot write .*metrics\.jsonl"):
        RunDirectory(folder).log({"step": 1})
    RunDirectory(folder).forget_after(0, print)
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(LabError, match=r"cannot write .*\.lock"), held(folder):
        pass
    assert victim.read_text() == "precious"
    assert not any(path.is_symlink() for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("name", ["best", "checkpoints", "best/tokenizer"])
def test_a_run_is_not_written_through_linked_folders(name, copy, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    if (copy / name).exists():
        (copy / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (copy / name).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    log = log_of(copy)
    assert run(["evaluate", str(copy)], log) == {2}
    assert f"{name} is a symbolic link" in log.read_text()
    assert sorted(elsewhere.rglob("*")) == before


def test_folders_under_construction_are_not_links(tmp_path, victim):
    out = tmp_path / "data" / "prepared"
    out.parent.mkdir()
    out.with_name(".prepared.preparing").symlink_to(tmp_path)
    with building(out, Maker("test", None), force=False) as folder:
        (folder / "file").touch()
    assert victim.read_text() == "precious"
    assert os.listdir(out) == ["file"]
    with pytest.raises(RequestError, match="exists"), building(out, Maker("t", None), force=True):
        pass


def test_checkpoints_are_not_saved_or_removed_through_links(tmp_path, victim):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".step-00000003.tmp", "step-00000001", "step-00000003"):
        (folder / name).symlink_to(tmp_path)
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    state = RunState(module, optimizer, module, module, make_accelerator("no"))
    state.counters.step = 3
    Checkpoints(folder, "recipe").save(state)
    assert victim.read_text() == "precious"
    assert not (folder / "step-00000003").is_symlink()
