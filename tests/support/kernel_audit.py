"""What can be known of the Triton kernels without a GPU; run as a script, prints JSON.

``compile TARGET [--all]`` compiles them ahead of time, as the host code would launch them:
registers and spills. ``instructions TARGET`` counts those in the machine code, per logit. ``bytes``
runs them in the interpreter: bytes read and written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["bytes"]:  # must be chosen before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns without

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import labo
from defaults import with_defaults
from labo.fast import kernels
from labo.fast.columns import COEFFICIENTS, RowInputs
from labo.fast.formula import plan_of
from labo.fast.kernel import Kernel
from labo.loss import Loss
from labo.losses.divergences import DIVERGENCES
from labo.sums import (
    COUNT,
    EMIX,
    FROM_ROW,
    FROM_TABLE,
    FROM_TEACHER,
    OTHERS,
    QD,
    QMIX,
    QU,
    TOP,
    UE,
    UR,
    WQU,
    Passes,
    R,
    RowMixture,
    RowTau,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LOSSES = (
    labo.CrossEntropyLoss(),
    labo.LabelSmoothingLoss(),
    labo.LABOLoss(alpha=0.1),
    labo.LABOLoss(),
)
MODES = range(4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The largest block in rows that are aligned and in rows that are not, and a small block.
CLASSES = (32768, 50257, 1000)

Variant = tuple[int, str, bool, int]  # mode, dtype, whether there are class weights, classes


def every_variant() -> list[Variant]:
    return list(itertools.product(MODES, DTYPES, (False, True), CLASSES))


def some_variants(target: str) -> list[Variant]:
    """Every value of every option, in other combinations for each target; what spills first."""
    turn = list(TARGETS).index(target)
    dtypes = list(DTYPES)
    return [
        (3, "float32", True, 50257),
        (1, "bfloat16", True, 50257),
        *(
            (mode, dtypes[(mode + turn) % 3], bool((mode + turn) % 2), CLASSES[(mode + turn) % 3])
            for mode in MODES
        ),
    ]


def launches(variant: Variant, rows: int = 2) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every function of the host code that launches a kernel."""
    mode, dtype, weighted, classes = variant
    logits = torch.zeros(rows, classes, dtype=DTYPES[dtype])
    target = torch.zeros(rows, dtype=torch.int64)
    weight = torch.ones(classes) if weighted else None
    fixed = (Kernel(mode, 0.1, 1.25, 0.5), weight, -100)
    sums, ones = torch.ones(rows, 5), torch.ones(rows)
    yield "statistics", lambda: kernels.row_statistics(logits, target, *fixed)
    yield "gradient", lambda: kernels.row_gradient(logits, target, sums, ones, *fixed)
    plan = plan_of(LOSSES[mode], weighted)
    mixture = RowMixture(*torch.ones(3, rows, dtype=torch.float64))
    if mode == 2:  # more than a formula with a mixture asks for
        plan = plan._replace(asked=plan.asked | COUNT | UE | EMIX)
    if mode == 3:  # as much as any other formula can ask for
        every = COUNT | UE | R | UR | QU | QD | WQU | TOP | OTHERS
        row_tau = RowTau(*torch.ones(4, rows, dtype=torch.float64))
        plan = Passes(every if weighted else every ^ WQU, FROM_TEACHER, 4.0, 0.0, row_tau)
    given = RowInputs(target, plan, weight, -100, logits.clone() if mode == 3 else None)
    yield "formula sums", lambda: kernels.sums(logits, given)
    mixed = given._replace(plan=plan._replace(mixture=mixture))
    yield "mixture sums", lambda: kernels.sums(logits, mixed)
    one = mixed if mode == 2 else given
    coefficients = torch.ones(rows, len(COEFFICIENTS), dtype=torch.float64)
    out = torch.empty_like(logits)
    yield "formula gradient", lambda: kernels.gradient(logits, one, coefficients, out)
    if mode < 2:
        student = logits.clone() if mode else None
        yield "moments", lambda: kernels.masked_moments(logits, mode == 1, student)
        yield "targets", lambda: kernels.count_targets(target, classes, -100, weight)


# ------------------------------------------------------------------ ahead of time


class _NoDevice:
    """A driver that knows which device it would have, and has none."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def _compiled_kernels(name: str) -> Iterator[list[Any]]:
    """Launches compile for a target, and nothing else; the list gets what they compiled."""
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoDevice(TARGETS[name]))
    kernels.HIP = TARGETS[name].backend == "hip"
    run = JITFunction.run
    compiled: list[Any] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    yield compiled


def compile_variants(name: str, variants: list[Variant]) -> list[dict[str, Any]]:
    """Registers and spilled bytes of every kernel, for one target."""
    usage = _amd_usage if name.startswith("gfx") else _nvidia_usage
    records = []
    with _compiled_kernels(name) as compiled:
        of_variants = ((key, v, launch) for v in variants for key, launch in launches(v))
        for kernel, variant, launch in itertools.chain(of_variants, formula_launches()):
            launch()
            registers, spilled = usage(compiled.pop())
            record = {"kernel": kernel, "variant": variant}
            records.append(record | {"registers": registers, "spilled": spilled})
    return records


def formula_launches() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Both passes of every plan that a loss with its defaults or a divergence has."""
    rows, classes = 2, 32768
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16)
    target = torch.zeros(rows, dtype=torch.int64)
    plans = {plan_of(loss, w): type(loss).__name__ for loss in _formulas() for w in (False, True)}
    for plan, name in plans.items():
        if plan.spread is not None:
            plan = plan._replace(row_tau=RowTau(*torch.ones(4, rows, dtype=torch.float64)))
        weight = torch.ones(classes) if plan.asked & WQU else None
        row = torch.ones(classes)
        source = {FROM_ROW: row, FROM_TABLE: row.expand(classes, -1), FROM_TEACHER: logits}
        given = RowInputs(target, plan, weight, -100, source.get(plan.masses))
        coefficients = torch.ones(rows, len(COEFFICIENTS), dtype=torch.float64)
        yield "formula sums", name, partial(kernels.sums, logits, given)
        if plan.asked & (EMIX | QMIX):
            plan = plan._replace(mixture=RowMixture(*torch.ones(3, rows, dtype=torch.float64)))
            given = given._replace(plan=plan)
            yield "mixture sums", name, partial(kernels.sums, logits, given)
        rest = (coefficients, torch.empty_like(logits))
        yield "formula gradient", name, partial(kernels.gradient, logits, given, *rest)


def _formulas() -> Iterator[Any]:
    for kind in labo.LOSSES.values():
        loss = with_defaults(kind, classes=8).current()
        if type(loss).value is not Loss.value and loss.name not in ("held-labo", "topk-kd"):
            yield loss
    for divergence in DIVERGENCES:
        yield labo.DistillationLoss(divergence=divergence)


# ------------------------------------------------------------------ instructions


def count_instructions(name: str, classes: int = 128256) -> list[dict[str, Any]]:
    """Instructions of the kernels of CE, LS and LABO per bfloat16 logit, in NVIDIA's machine code.

    Those of the statistics are in the loop over whole blocks; those of the gradient are the whole
    code, which is more than is executed.
    """
    records = []
    with _compiled_kernels(name) as compiled:
        for mode in MODES:
            for kernel, launch in launches((mode, "bfloat16", False, classes)):
                if kernel not in ("statistics", "gradient"):
                    continue
                launch()
                code = _machine_code(compiled.pop())
                if kernel == "statistics":
                    code = _main_loop(code)
                per_logit = len(code) / kernels.LOGITS_PER_THREAD
                barriers = sum("BAR.SYNC" in text for _, text in code)
                record = {"kernel": kernel, "mode": mode, "instructions": per_logit}
                records.append(record | {"barriers": barriers})
    return records


Code = list[tuple[int, str]]  # addresses and instructions


def _machine_code(compiled: Any) -> Code:
    text = _nvidia_tool("nvdisasm", compiled, "--print-code", "--no-dataflow")
    labels: dict[str, int] = {}
    code: Code = []
    for line in text.splitlines():
        label = re.match(r"(\.L_x_\d+):", line)
        instruction = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = 16 * len(code)
        elif instruction:
            code.append((int(instruction[1], 16), instruction[2]))
    while code and code[-1][1].strip() == "NOP":  # fills the last line of the cache
        code.pop()
    return [(at, re.sub(r"`\((\S+)\)", lambda m: str(labels.get(m[1], m[1])), i)) for at, i in code]


def _main_loop(code: Code) -> Code:
    """The first loop that computes exponentials."""
    for i, (at, text) in enumerate(code):
        jump = re.search(r"BRA\S* (?:!?U?P\d, )?(\d+)", text)
        if jump and int(jump[1]) < at:
            body = code[int(jump[1]) // 16 : i + 1]
            if any("MUFU.EX2" in text for _, text in body):
                return body
    raise ValueError("the code has no such loop")


def _nvidia_tool(tool: str, compiled: Any, *options: str) -> str:
    """What a tool of the Triton wheel says of a kernel."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    text = _nvidia_tool("cuobjdump", compiled, "--dump-resource-usage")
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _amd_usage(compiled: Any) -> tuple[int, int]:
    text = compiled.asm["amdgcn"]
    numbers = {key: int(value) for key, value in re.findall(r"\.(\w+_count): +(\d+)", text)}
    return numbers["vgpr_count"], numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]


# ------------------------------------------------------------------ bytes


def count_bytes(rows: int = 1) -> list[dict[str, Any]]:
    """Bytes that each kernel reads and writes, per logit."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    moved = {"read": 0, "written": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def bytes_of(pointers: Any, mask: Any) -> int:
        return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        moved["read"] += bytes_of(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved["written"] += bytes_of(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    found = []
    for variant in itertools.product(MODES, ("float32", "bfloat16"), (False, True), (8192,)):
        for kernel, launch in launches(variant, rows):
            moved.update(read=0, written=0)
            launch()
            per_logit = {key: value / (rows * variant[3]) for key, value in moved.items()}
            found.append({"kernel": kernel, "variant": variant} | per_logit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["compile", "instructions", "bytes"])
    parser.add_argument("target", choices=TARGETS, nargs="?")
    parser.add_argument("--all", action="store_true", help="the whole product of options")
    options = parser.parse_args()
    if options.what == "bytes":
        found = count_bytes()
    elif options.what == "instructions":
        found = count_instructions(options.target)
    else:
        variants = every_variant() if options.all else some_variants(options.target)
        found = compile_variants(options.target, variants)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
