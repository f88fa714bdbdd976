"""The lab as a library: light to import, and functions under the names of their modules."""

from __future__ import annotations

import inspect
import subprocess
import sys

import labo.lab

LIGHT = """
import sys, labo.lab
assert not {"torch", "accelerate", "pydantic"} & set(sys.modules)
from labo.lab.train import Trainer
from labo.lab import train
assert callable(train) and train.__module__ == "labo.lab.train"
assert "train" in dir(labo.lab)
try: labo.lab.nothing
except AttributeError as error: assert "nothing" in str(error)
else: raise AssertionError
"""


def test_importing_it_is_light_and_its_functions_are_not_hidden_by_modules():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_is_there_and_documented():
    for name in labo.lab.__all__:
        assert inspect.getdoc(getattr(labo.lab, name)), name
