"""Scripts and snippets of the project, for the tests that run them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_example(name: str) -> ModuleType:
    return load_script(EXAMPLES / f"{name}.py")


def snippet(page: str, library: str) -> str:
    """The code for another library on a page of the documentation, in at most 30 lines."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (code,) = re.findall(rf"<!-- needs {library} -->\n```py\n(.*?)```", text, re.DOTALL)
    assert code.count("\n") <= 30
    return code


def execute(patch: pytest.MonkeyPatch, library: str, **modules: dict) -> dict:
    """The names of a snippet, run with the modules it imports replaced by stubs."""
    for name, content in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            package.__path__ = []
            patch.setitem(sys.modules, package.__name__, package)
        module = ModuleType(".".join(parts))
        vars(module).update(content)
        patch.setitem(sys.modules, module.__name__, module)
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    scope: dict = {"__name__": __name__}
    exec(compile(snippet("other_libraries", library), library, "exec"), scope)
    return scope
