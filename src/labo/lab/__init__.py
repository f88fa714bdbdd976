"""The lab: prepare data, train, evaluate, compare, analyse, report.

Data flows through files. Every arrow below is a folder or a file, so each stage can be rerun,
tested and replaced alone::

    recipe.yaml --train--> RUN/ --evaluate--> RUN/records/ --analyze--> RUN/analysis.json --> report
    corpus --prepare--> folder --^              (compare and reproduce: many runs, one table)
    RUN/ --calibrate--> RUN/best/calibration.json

What is where, lowest layer first. A module imports only from its own line and from lines above it.
A task is named in ``tasks.TASKS`` and nowhere else outside of its own package:

==================  ===============================================================================
errors              the two ways a command ends early, and wrong data
config              sections of a recipe, YAML, messages for wrong keys
command_options     options of a command from the fields of a section
run/                a run on disk and in memory: directory, state, checkpoint, lock; processes
compressed          compressed files and archives, with a limit on what they inflate to
pretrained          a model folder to start from: loading, freezing, LoRA
custom              functions of your own that a recipe names
tables              a table as Markdown, LaTeX, CSV and JSON
tasks               the protocol of a task, and the dict ``TASKS``
teachers            where a second distribution comes from
methods             ``METHODS``: a loss, perhaps a teacher, for every method
recipes             a recipe file with overrides -> a checked recipe
schedule            the steps of a run, their batches, what is due after each
selection           which models are selected and kept; the selected one again, from a checkpoint
optim, train        the optimizer, the learning rate, the one training loop
average             the mean of models that a run kept -> a model folder
calibrate           a temperature for the selected model of a run
evaluate            the selected model of a run -> scores and records
analysis/           records -> analysis.json; which runs belong together; differences and p-values
report/             analysis -> one HTML page
text/               what tasks on text share: lines, subwords, prepared folders, token records
images/             a task: data sources, augmentation, networks, scores, its analysis
translation/        a task: prepare, subwords, model, beam search, BLEU, its analysis
language_modeling/  a task: documents, packing, causal models, generation, its analysis
compare/            one recipe, several methods and seeds: plan, engines, launch, table
reproduce/          the paper's tables and figures
demo                ``labo demo``
==================  ===============================================================================

From Python, the names of ``__all__`` are what the ``labo`` command is made of; they are imported
when they are first used. ``docs/library.md`` shows them at work.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis.run import analyze_run as analyze_run
    from .analysis.run import analyze_runs as analyze_runs
    from .calibrate import calibrate_run
    from .compare.execute import compare as compare
    from .config import Recipe as Recipe
    from .custom import trust_code as trust_code
    from .errors import LabError as LabError
    from .errors import RequestError as RequestError
    from .evaluate import evaluate_run
    from .images.image_files import FolderImages as FolderImages
    from .images.predict import Predictor as Predictor
    from .images.splits import ImageSource as ImageSource
    from .language_modeling.generate import Generator as Generator
    from .language_modeling.score import Scorer as Scorer
    from .methods import METHODS as METHODS
    from .recipes import build_recipe as build_recipe
    from .recipes import load_recipe as load_recipe
    from .report import write_report as write_report
    from .run.directory import RunDirectory as RunDirectory
    from .tasks import load_model as load_model
    from .train import train as train
    from .translation.translate import Translator as Translator

    calibrate, evaluate = calibrate_run, evaluate_run

# Name -> module, and the name there if it is another one.
_HOMES = {
    "METHODS": "methods",
    "FolderImages": "images.image_files",
    "Generator": "language_modeling.generate",
    "ImageSource": "images.splits",
    "LabError": "errors",
    "Predictor": "images.predict",
    "Recipe": "config",
    "RequestError": "errors",
    "RunDirectory": "run.directory",
    "Scorer": "language_modeling.score",
    "Translator": "translation.translate",
    "analyze_run": "analysis.run",
    "analyze_runs": "analysis.run",
    "build_recipe": "recipes",
    "calibrate": "calibrate:calibrate_run",
    "compare": "compare.execute",
    "evaluate": "evaluate:evaluate_run",
    "load_model": "tasks",
    "load_recipe": "recipes",
    "train": "train",
    "trust_code": "custom",
    "write_report": "report",
}
__all__ = [*_HOMES]


class _Lab(ModuleType):
    """This package. Some functions have the name of the module they are in.

    Importing a module binds its name in the package. For ``train`` and the like that is not done:
    ``from labo.lab import train`` is the function, whatever was imported before.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home, _, alias = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(f".{home}", __name__), alias or name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *_HOMES})


sys.modules[__name__].__class__ = _Lab
