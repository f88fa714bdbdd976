"""The parts of the fuzzer, each run in a process of its own, with a line for each."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path

# Every part in a process of its own: it may be ended by a signal.
_MEMORY = 12 << 30  # bytes of addresses
_CONTEXT = multiprocessing.get_context("forkserver")


def _part(
    function: Callable[..., list[str]], arguments: Sequence[object], found: SimpleQueue[list[str]]
) -> None:
    import torch

    torch.set_num_threads(1)
    if function is not _native:  # a case that takes all memory must not take the machine's
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    found.put(function(*arguments))


def _reader(name: str, cases: int, folder: Path, seed: int) -> list[str]:
    from .readers import fuzz_reader

    return fuzz_reader(name, cases, folder, seed)


def _commands(name: str, cases: int, folder: Path, seed: int) -> list[str]:
    from .commands import fuzz_commands

    return fuzz_commands(name, cases, folder, seed)


def _native(name: str, cases: int, folder: Path, seed: int) -> list[str]:
    from .native import fuzz_kernel

    problem = fuzz_kernel(cases, seed)
    return [] if problem is None else [problem]


def run_part(function: Callable[..., list[str]], name: str, cases: int, seed: int = 0) -> list[str]:
    """Run a part in a process of its own; a process that dies is a failure."""
    found = _CONTEXT.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, cases, Path(folder), seed)
        child = _CONTEXT.Process(target=_part, args=(function, arguments, found))
        child.start()
        child.join()
        if child.exitcode == 0:
            return found.get()
        case = Path(folder) / ".case"
        where = case.read_text() if case.is_file() else name
        return [f"{where}: the process ended with status {child.exitcode}"]


def main() -> int:
    from .commands import SUBJECTS
    from .readers import READERS

    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("parts", nargs="*", help="names of parts; all if none is given")
    parser.add_argument("--cases", type=int, default=1000, help="damaged files for each reader")
    parser.add_argument("--commands", type=int, default=300, help="damaged values per subject")
    parser.add_argument("--kernel", type=int, default=10_000, help="random calls of the kernel")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts: dict[str, tuple[Callable[..., list[str]], int]] = {
        "C kernel": (_native, options.kernel),
        **dict.fromkeys(READERS, (_reader, options.cases)),
        **dict.fromkeys(SUBJECTS, (_commands, options.commands)),
    }
    if unknown := [name for name in options.parts if name not in parts]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts)}")
    failed = False
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LABO_CACHE"] = cache
        for name in options.parts or parts:
            began = time.perf_counter()
            function, cases = parts[name]
            failures = run_part(function, name, cases, options.seed)
            seconds = time.perf_counter() - began
            print(f"{name}: {cases} cases, {len(failures)} failures, {seconds:.0f} s", flush=True)
            for failure in failures:
                print(f"  {failure}", flush=True)
            failed = failed or bool(failures)
    return int(failed)
