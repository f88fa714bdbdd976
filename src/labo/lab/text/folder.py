"""Folders of prepared text: made whole or not at all, and read back.

A folder has Arrow files, one per split, a tokenizer and a manifest with the checksum of each file.
The manifest is written last, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..errors import DataError, RequestError
from ..run.files import flush, sha256, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
MANIFEST = "prepared.json"
SPLITS = ("train", "valid", "test")


# ------------------------------------------------------------------ writing


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    # transformers 5 writes the name of a class that earlier ones do not have.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    write_json(path, config)


def check_free(out: Path, force: bool) -> Path:
    """The absolute path of a folder that may be made."""
    out = out.expanduser().absolute()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    if not (out / MANIFEST).is_file():
        raise RequestError(f"{out} exists, and is no prepared data")
    if not force:
        raise RequestError(f"{out} exists; --force replaces it")
    return out


@contextmanager
def building(out: Path, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``out`` if all goes well.

    Whoever wants to build the same waits here; what a killed process left is cleared away.
    """
    folder, old = (out.with_name(f".{out.name}.{name}") for name in ("preparing", "replaced"))
    lock = out.with_name(f".{out.name}.lock")
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        try:
            check_free(out, force)
            for leftover in (folder, old):
                shutil.rmtree(leftover, ignore_errors=True)
            folder.mkdir()
            yield folder
            if out.exists():
                os.replace(out, old)
            os.replace(folder, out)
            flush(out.parent)
        finally:
            for leftover in (folder, old):
                shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                lock.unlink()


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, with the format, the digests of all files and the fingerprint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    listing = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    for path in (*files, *{path.parent for path in files}):
        flush(path)
    fingerprint = hashlib.sha256(listing.encode()).hexdigest()
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, **manifest, "sha256": digests, "fingerprint": fingerprint},
    )


def cache_folder() -> Path:
    if place := os.environ.get("LABO_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labo"


# ------------------------------------------------------------------ reading


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{folder}: no prepared data here; `labo prepare` makes it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not of format {FORMAT}, which this version reads")
    return manifest


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be read ({error})") from error
