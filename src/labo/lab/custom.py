"""Models and data of your own: a function that a recipe names as ``package.module:function``.

The module is imported from the installed packages or from the current folder. What a function gets
and what it must return is up to the task; what is wrong is said in one line before training starts.

Only calls that the user asked for are made: those of a recipe that was given to a command, with the
arguments in it, or all after :func:`trust_code`. A run or model folder that is read may name
functions too, and may be someone else's.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import RequestError
from .run.files import sha256
from .run.progress import notice

# In the environment, for the processes that a command starts: a line for each call that may be
# made, or _ALL.
_TRUSTED = "LABO_TRUSTED_CODE"
_ALL = "*"

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_reference(name: str) -> bool:
    """Whether a name has the form ``package.module:function``.

    Example:
        >>> is_reference("mynets.small:build"), is_reference("resnet18"), is_reference("a b:c")
        (True, False, False)
    """
    return _REFERENCE.fullmatch(name) is not None


def trust(reference: str, arguments: Mapping[str, Any]) -> None:
    """Let a function be imported, and be called with these arguments."""
    _trust(_call(reference, arguments))


def trust_code() -> None:
    """Let every function that a run or model folder names be imported and called."""
    _trust(_ALL)


def _trust(line: str) -> None:
    os.environ[_TRUSTED] = "\n".join(dict.fromkeys([*_trusted(), line]))


def _trusted() -> list[str]:
    return os.environ.get(_TRUSTED, "").splitlines()


def _call(reference: str, arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, sort_keys=True)
    return f"{reference} {hashlib.sha256(text.encode()).hexdigest()}"


def _must_be_trusted(key: str, reference: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Refuse a function that the user did not name; by default with any arguments."""
    trusted = _trusted()
    if arguments is None:
        known = reference in {line.partition(" ")[0] for line in trusted}
    else:
        known = _call(reference, arguments) in trusted
    if known:
        return
    if _ALL not in trusted:
        raise RequestError(
            f"{key}: {reference} is code that the folder names, not you: it is imported and run "
            "only with --trust-code (in Python, after labo.lab.trust_code())"
        )
    if arguments is not None:
        notice(f"{key}: {reference} is imported and run, as --trust-code allows")


def find_function(key: str, reference: str) -> Callable[..., Any]:
    """The function that a recipe names under a key, as ``package.module:function``."""
    _must_be_trusted(key, reference)
    module_name, _, path = reference.partition(":")
    if os.getcwd() not in sys.path:  # the labo command does not look there, python -m labo does
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the module is not ours
        reason = f"importing it failed: {in_a_line(error)}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            reason = f"there is no module {missing}, neither installed nor in {os.getcwd()}"
        raise RequestError(f"{key}: {reference}: {reason}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            where = getattr(found, "__name__", module_name)
            raise RequestError(f"{key}: {reference}: {where} has no {name}")
        found = getattr(found, name)
    if not callable(found):
        raise RequestError(f"{key}: {reference} is no function but a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def call_function(
    key: str, reference: str, given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Any:
    """Call the function that a recipe names under a key, with what the task has given for it.

    ``arguments`` are further ones, from the recipe.
    """
    _must_be_trusted(key, reference, arguments)
    function = find_function(key, reference)
    if twice := sorted(given.keys() & arguments.keys()):
        raise RequestError(f"{key}: {reference} gets {twice[0]} from the task, not from arguments")
    settings = {**given, **arguments}
    try:
        inspect.signature(function).bind(**settings)
    except TypeError as error:
        raise RequestError(
            f"{key}: {reference} is called with {', '.join(settings)}: {error}"
        ) from error
    except ValueError:
        pass  # some functions of extension modules have no signature
    try:
        return function(**settings)
    except RequestError:
        raise
    except Exception as error:  # the function is not ours
        raise RequestError(f"{key}: {reference} failed: {in_a_line(error)}") from error


def function_version(key: str, reference: str) -> str:
    """What changes when the code of a function does.

    The version of the installed package that it is from, or 12 digits of the SHA-256 of its source
    file, or "unknown".
    """
    function = inspect.unwrap(find_function(key, reference))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or not getattr(module, "__file__", None):
        return "unknown"
    file = Path(str(module.__file__)).resolve()
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    if installed & {*file.parents}:
        package = module.__name__.partition(".")[0]
        names = importlib.metadata.packages_distributions().get(package)
        if names:
            version = importlib.metadata.version(names[0])
            return version.replace("+", ".")  # a + joins the data of a run
    return sha256(file)[:12]


def in_a_line(error: Exception) -> str:
    """The kind of an error that is not ours, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
