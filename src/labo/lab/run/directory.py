"""The run directory: the only interface between the stages.

::

    recipe.yaml      the resolved recipe, the versions and the data it was made with
    metrics.jsonl    one line per logged step or evaluation
    checkpoints/     what resuming needs; the newest two
    best/            the selected model: model.safetensors, config.json, tokenizers, manifest.json
    results.json     the scores, once finished
    conditions.json  the machines it was trained on, and how
    records/         per-example records written by ``labo evaluate``, and manifest.json
    tensorboard/     the metrics again, for TensorBoard
    .lock            the process that works in the directory

Every file is written whole or not at all. What is read back is checked: ``best``, ``checkpoints``
and ``records`` against the checksums in their manifests, ``results.json`` against its own.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ... import __version__
from ..config import (
    PROVENANCE,
    Recipe,
    differing_keys,
    digest_of,
    dump_yaml,
    read_document,
    read_provenance,
)
from ..errors import RequestError
from . import checksums
from . import files as atomic
from .lock import LOCK

if TYPE_CHECKING:  # the report reads runs too, and needs no tensors
    from torch import Tensor

DATA = "data"  # the key of the provenance that names the data
TEACHER = "teacher"  # and the one that names what a teacher was read from
_CHANGED = {  # words for the message about another one
    DATA: ("data or code", "have", "them", "train, evaluate or compare"),
    TEACHER: ("teacher", "has", "it", "train or compare"),
}
MODEL = "model.safetensors"

KEPT = "models.json"  # in ``kept``: the step and the scores of each model


class Results(atomic.Document):
    """The content of ``results.json``."""

    valid: dict[str, float]
    test: dict[str, float] | None = None
    signature: str = ""
    steps: int = Field(ge=1)
    selected_step: int | None = None
    seconds: float = Field(ge=0)
    devices: list[str] = Field(default_factory=list)
    peak_memory: float | None = None
    sacrebleu: dict[str, str] = Field(default_factory=dict)
    model: str | None = None  # the checksum of the weights that were scored


class Conditions(atomic.Document):
    """The content of ``conditions.json``: an entry for each kind of launch."""

    launches: list[dict[str, Any]]


class Facts(atomic.Document):
    """What ``best/config.json`` says of the selected model. A task adds keys of its own."""

    task: str
    num_classes: int = Field(ge=1)


class RunDirectory:
    """The files of one run. Only the main process may call what writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.kept = self.path / "kept"
        self.results_file = self.path / "results.json"
        self.conditions_file = self.path / "conditions.json"
        self.records = self.path / "records"

    # ------------------------------------------------------------------ the life of a run

    def check(self, recipe: Recipe) -> None:
        """Refuse a directory that holds something else than a run of this recipe."""
        if not self.path.exists():
            return
        if not self.recipe_file.is_file():
            # A start that was killed leaves at most these.
            allowed = {atomic.temporary(self.recipe_file), self.path / LOCK}
            if self.path.is_dir() and not {*self.path.iterdir()} - allowed:
                return
            raise RequestError(f"{self.path} exists and is no run directory: choose another --out")
        keys = differing_keys(recipe.as_document(), read_document(self.recipe_file))
        if keys:
            raise RequestError(
                f"{self.path} holds a run of another recipe (it differs in {', '.join(keys)}): "
                "choose another --out"
            )

    def start(self, recipe: Recipe, data: str | None = None, teacher: str = "") -> None:
        """Make the directory and write the recipe; a run that is there already stays.

        ``data`` and ``teacher`` are the fingerprints of what is read from files.
        """
        with atomic.explained("make", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.recipe_file.exists():
                read = {DATA: data} | ({TEACHER: teacher} if teacher else {})
                self._write_recipe(recipe.as_document(), {**made_with(), **read})
            self.checkpoints.mkdir(exist_ok=True)
            self.best.mkdir(exist_ok=True)

    def _write_recipe(self, document: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        text = dump_yaml({**document, PROVENANCE: dict(provenance)})
        atomic.write_text(self.recipe_file, text)

    def begun_with(self) -> dict[str, str | None]:
        """The versions and the data at the start of the run."""
        return read_provenance(self.recipe_file)

    def changes_since_start(self) -> str:
        """The versions that are different now; empty if none is."""
        begun, now = self.begun_with(), made_with()
        return ", ".join(
            f"{key} {value}" for key, value in begun.items() if key in now and value != now[key]
        )

    @property
    def data(self) -> str | None:
        """The fingerprint of the data that the run was begun with; None if it does not say."""
        return self.begun_with().get(DATA)

    def check_data(self, now: str, key: str = DATA) -> None:
        """Refuse data that are not those of the run, or another ``TEACHER``.

        ``now`` is the fingerprint of what is there now.
        """
        begun = self.begun_with().get(key) if self.recipe_file.is_file() else None
        if begun is not None and begun.split("+")[-1] != now:
            what, have, it, commands = _CHANGED[key]
            raise RequestError(
                f"the {what} of {self.path} {have} changed: {begun} when it was begun, {now} "
                f"now; restore {it}, choose another --out, or pass --accept-data to labo {commands}"
            )

    def accept_data(self, data: str, teacher: str = "") -> None:
        """Go on with other data, or another teacher. The run then names both, joined by "+"."""
        begun = self.begun_with()
        accepted = dict(begun)
        for key, now in ((DATA, data), (TEACHER, teacher)):
            known = begun.get(key)
            if now and (known is None or known.split("+")[-1] != now):
                accepted[key] = now if known is None else f"{known}+{now}"
        if accepted != begun:
            self._write_recipe(self.document(), accepted)

    def refuse_links(self) -> None:
        """Refuse to write through a symbolic link in the directory, to a folder elsewhere.

        Files need no check: they are replaced or made anew, which follows no link.
        """
        folders = (self.best, self.checkpoints, self.kept, self.records, self.path / "tensorboard")
        for path in (*folders, *self.best.glob("*/")):
            if path.is_symlink():
                raise RequestError(
                    f"{path} is a symbolic link: labo writes only into the run directory itself; "
                    "put the folder in its place"
                )

    @property
    def finished(self) -> bool:
        return self.results_file.exists()

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write ``results.json``, with a checksum of its own content."""
        atomic.write_json(self.results_file, atomic.sealed(results))

    @property
    def model(self) -> str | None:
        """The checksum of the selected weights; None if it is not known."""
        listed = checksums.manifest_of(self.best).sha256.get(MODEL, [])
        # While the weights are replaced, the old and the new ones are listed.
        return atomic.sha256(self.best / MODEL) if len(listed) > 1 else next(iter(listed), None)

    def stale_splits(self) -> list[str]:
        """The splits with scores of another model than that in ``best``, such as before a fold."""
        results = self.results() if self.finished else {}
        other = "model" in results and results["model"] != self.model
        return [split for split in ("valid", "test") if other and split in results]

    def complete(self, scores: Mapping[str, Mapping[str, float]], temperature: float = 1.0) -> None:
        """Add to the results the scores of splits they lack; what they have of this model stays.

        ``temperature`` is what is folded into the model, or 1.
        """
        results = self.results()
        signature = results.get("signature", "")
        if (data := self.data) is not None:
            signature = re.sub(r"(?<=\|data:)[^|]*", lambda _: data, signature)
        if self.stale_splits():
            completed = {**results, **scores, "model": self.model}
            signature = re.sub(r"\|folded:[^|]*", "", signature)
            signature += "" if temperature == 1 else f"|folded:{temperature:.6g}"
        else:
            completed = {**results, **scores, **results}
        if "signature" in results:
            completed["signature"] = signature
        if completed != results:
            self.finish(completed)

    def signature(self, recipe: Recipe, *, data: str, steps: int, processes: Sequence[int]) -> str:
        """What the scores depend on, in one line. Two equal experiments have equal signatures.

        ``data`` is for runs that do not name their data. ``processes`` is how many there were at
        the start and after each change of their number.
        """
        begun = self.begun_with()
        method = dict(recipe.method)
        for name in {"teacher", "stored"} & method.keys():
            # Where a folder is on this machine is no part of the experiment.
            method[name] = begun.get(TEACHER) or (method[name] and Path(method[name]).name)
        parts = {
            "labo": begun.get("labo"),
            "git": begun.get("git"),
            "torch": begun.get("torch"),
            "task": recipe.task,
            "data": begun.get(DATA) or data,
            "method": ",".join(f"{key}={value}" for key, value in method.items()),
            "seed": recipe.seed,
            "steps": steps,
            "processes": ">".join(map(str, processes)),
            "recipe": recipe.digest(),
        }
        return "|".join(f"{name}:{value}" for name, value in parts.items())

    # ------------------------------------------------------------------ reading

    def document(self) -> dict[str, Any]:
        """The content of ``recipe.yaml``."""
        self.must_have(self.recipe_file)
        return read_document(self.recipe_file)

    def results(self) -> dict[str, Any]:
        """The content of ``results.json``, without its checksum."""
        self.must_have(self.results_file)
        atomic.read_json(self.results_file, Results)  # which would make floats of some integers
        results: dict[str, Any] = json.loads(atomic.read_bytes(self.results_file))
        self.verify_results(results)
        results.pop(atomic.CHECKSUM, None)
        return results

    def verify_results(self, results: Mapping[str, Any]) -> None:
        """Refuse results that were changed, or are of another recipe than that of the run."""
        if not atomic.seal_fits(results):
            raise RequestError(
                f"{self.results_file} was changed after it was written (its checksum does not "
                "fit): remove it, and the command that trained the run writes it again"
            )
        signed = re.search(r"\|recipe:([^|]*)", str(results.get("signature")))
        if signed is not None and signed[1] != digest_of(self.document()):
            raise RequestError(
                f"{self.recipe_file} is not the recipe of {self.results_file.name}: its digest is "
                f"{digest_of(self.document())}, the signature has {signed[1]}"
            )

    def verify_records(self) -> None:
        """Compare ``records`` with their checksums, and their model with that of the results."""
        if not checksums.verify_folder(self.records, remember=True):
            return
        manifest = checksums.manifest_of(self.records)
        for path in sorted(self.records.glob("*.json*")):
            if path.name not in {*manifest.sha256, checksums.MANIFEST}:
                raise checksums.DamagedError(f"{path}: {checksums.MANIFEST} does not list it")
        scored = self.results().get("model") if self.finished else None
        if scored is not None and manifest.model not in (None, scored):
            raise RequestError(
                f"{self.records} and {self.results_file.name} are of different models: "
                f"labo evaluate {self.path} scores both splits again"
            )

    def facts(self) -> dict[str, Any]:
        """What ``best/config.json`` says of the selected model: itself, or what is under "labo"."""
        path = self.best / "config.json"
        self.must_have(path)
        document = atomic.read_json(path, atomic.Document).model_dump()
        facts: Any = document.get("labo", document)
        prefix = "labo." if "labo" in document else ""
        return atomic.checked(facts, Facts, path, prefix).model_dump()

    def must_have(self, path: Path) -> None:
        if path.is_file():
            return
        if self.recipe_file.is_file() and not self.finished:
            raise RequestError(
                f"{self.path} is unfinished: the command that started it continues it (it has no "
                f"{path.relative_to(self.path)} yet)"
            )
        raise RequestError(f"{self.path} is no run with {path.relative_to(self.path)}")

    def verify_best(self) -> None:
        """Compare ``best`` with its checksums; a ``DamagedError`` says what does not fit."""
        for name in ("config.json", MODEL):
            if not (self.best / name).is_file():
                raise checksums.DamagedError(f"{self.path} is no run with best/{name}")
        checksums.verify_folder(self.best)

    # ------------------------------------------------------------------ writing

    def keep_model(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Put the weights of a step into ``kept``, with a checksum."""
        with atomic.explained("write", self.kept):
            self.kept.mkdir(exist_ok=True)
        path = self.kept / kept_name(step)
        atomic.write_tensors(path, weights)
        known = checksums.manifest_of(self.kept).sha256
        checksums.write_manifest(self.kept, known | {path.name: [atomic.sha256(path)]})

    def list_kept(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Write the steps and scores of the models in ``kept``, and remove all others."""
        if not self.kept.is_dir():
            return
        atomic.write_json(self.kept / KEPT, atomic.sealed({"models": list(models)}))
        names = {kept_name(model["step"]) for model in models}
        known = checksums.manifest_of(self.kept).sha256
        checksums.write_manifest(self.kept, {n: c for n, c in known.items() if n in names})
        for path in self.kept.glob("step-*.safetensors"):
            if path.name not in names:
                path.unlink()

    def write_records(self, name: str, lines: Iterable[str]) -> None:
        """Write a file of ``records``. Those of another model are removed."""
        with atomic.explained("make", self.records):
            self.records.mkdir(exist_ok=True)
        manifest, model = checksums.manifest_of(self.records), self.model
        kept = manifest.sha256 if manifest.model == model else {}
        content = {name: "".join(lines).encode()}
        checksums.write_listed(self.records, content, kept=kept, model=model)

    def log(self, line: Mapping[str, Any]) -> None:
        with atomic.explained("write", self.metrics_file), atomic.append(self.metrics_file) as file:
            file.write((json.dumps(line) + "\n").encode())

    def forget_after(self, step: int, report: Callable[[str], None]) -> None:
        """Drop the metrics after a step, which a resumed run writes again, and damaged lines.

        ``report`` is called with a sentence for each line that cannot be read, but the last, which
        was being written when the run was killed.
        """
        if not self.metrics_file.exists():
            return
        lines = atomic.read_bytes(self.metrics_file).split(b"\n")
        kept = []
        for number, line in enumerate(lines, 1):
            logged = _logged_step(line)
            if logged is None:
                if number < len(lines):
                    report(f"{self.metrics_file}, line {number}: no logged step; left out")
            elif logged <= step:
                kept.append(line.decode() + "\n")
        atomic.write_text(self.metrics_file, "".join(kept))


def kept_name(step: int) -> str:
    """The file of a step in ``kept``."""
    return f"step-{step:08d}.safetensors"


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    files: Mapping[str, str | bytes],
    further: Callable[[str], Mapping[str, str]] = lambda checksum: {},
) -> None:
    """Write a model folder, or put another model into one.

    ``further`` makes files that name the checksum of the weights.
    """
    model = folder / MODEL
    with atomic.explained("write", model, atomic.temporary(model)):
        folder.mkdir(exist_ok=True)
        atomic.write_temporary_tensors(model, weights)
        checksum = atomic.sha256(atomic.temporary(model))
        texts = {**files, **further(checksum)}
        contents = {
            n: text.encode() if isinstance(text, str) else text for n, text in texts.items()
        }
        checksums.write_listed(folder, contents, {MODEL: checksum})


def _logged_step(line: bytes) -> int | None:
    """The step of a line of metrics; None if it is no such line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def made_with() -> dict[str, str | None]:
    """Versions, and the commit of a checkout."""
    import torch

    return {
        "labo": __version__,
        "git": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _commit() -> str | None:
    """The commit of the checkout that holds this package; ends in -dirty if files were changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
