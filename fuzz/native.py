"""The C kernel under AddressSanitizer and UndefinedBehaviorSanitizer, on random tensors.

A copy of the package gets the kernel compiled with sanitizers, and a child process calls it through
the public losses (``impl="native"``, ``labo.parallel``) and through the functions that backends
have for shards. Nothing here knows the C interface: what changes there is tested as it is. Tensors
are allocated through the sanitizer, so an access beside one is seen.

A case takes random shapes, views, types, targets, weights and logits, which may be infinite, NaN or
near the limits of the type. Besides the sanitizers three promises are checked: the bits of a row do
not depend on its neighbours, the input stays as it was, and ordinary logits give the values and
gradients of the reference in float64.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

_ROOT = Path(__file__).parents[1]
_KERNEL = _ROOT / "src" / "labo" / "fast" / "native.c"
_BESIDE = _ROOT / "fuzz" / "beside.c"
_LIBRARY = Path("labo", "fast", "_native.abi3.so")
_FLAGS = ("-O1", "-std=c11", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-shared")
SANITIZERS = "address,undefined,float-cast-overflow"
_ISAS = ("avx512", "avx2", "portable")


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if found is None or not Path(_find(found, "libasan.so")).is_absolute():
        raise RuntimeError("no C compiler with AddressSanitizer was found")
    return found


def _find(cc: str, library: str) -> str:
    command = [cc, f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def fuzz_kernel(
    cases: int, seed: int = 0, *, sanitizers: str = SANITIZERS, beside: bool = False
) -> str | None:
    """Call the kernel on so many random tensors, in a child process.

    Args:
        cases: how many.
        seed: with the number of a case, determines it.
        sanitizers: those to compile with; all of them take half a minute.
        beside: read beside a tensor at the end, which must be noticed.

    Returns:
        None if all cases held, else the report of the child.

    Raises:
        RuntimeError: there is no compiler with sanitizers.
    """
    cc = _compiler()
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "lab", "integrations")
        shutil.copytree(_ROOT / "src" / "labo", Path(folder, "labo"), ignore=ignored)
        sources = [str(_KERNEL), str(_BESIDE)]
        library = str(folder / _LIBRARY)
        flags = [*_FLAGS, "-fPIC", f"-fsanitize={sanitizers}"]
        subprocess.run([cc, *flags, *sources, "-o", library, "-lm"], check=True)
        environment = {
            # The sanitizer looks for the exceptions of C++ when it is loaded.
            "LD_PRELOAD": f"{_find(cc, 'libasan.so')} {_find(cc, 'libstdc++.so.6')}",
            "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2",
            "PYTHONPATH": os.pathsep.join([folder, str(_ROOT)]),
            "OMP_NUM_THREADS": "2",
        }
        arguments = [str(cases), str(seed), *["beside"] * beside]
        command = [sys.executable, "-m", "fuzz.native", *arguments]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"status {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[:4000]}"


# ------------------------------------------------------------------ in the child


def _main(cases: int, seed: int, beside: bool) -> None:
    from labo.fast import native

    assert native.unavailable() is None, native.unavailable()
    isas = [name for name in _ISAS if native.select_instruction_set(name)]
    for number in range(cases):
        chance = Random(f"native {seed} {number}")
        torch.manual_seed(chance.randrange(2**31))
        native.select_instruction_set(chance.choice(isas))
        print(f"case {number}, seed {seed}: ", end="", flush=True)
        chance.choice((_losses, _losses, _shards))(Case(chance))
        print("ok", flush=True)
    print(f"{cases} cases held", flush=True)
    if beside:
        library = ctypes.CDLL(str(Path(native.__file__).with_name(_LIBRARY.name)))
        values = torch.zeros(4)
        library.labo_read_beside(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(4))


class Case:
    """Random arguments of a loss.

    Attributes:
        logits: (N, K), any view.
        target: (N,).
        weight: (K,) or None.
        ignore_index: may be a class.
        wild: whether logits may be infinite, NaN or huge.
        scale: how large they are if not.
    """

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.wild = chance.random() < 0.3
        self.scale = chance.choice((0.1, 1.0, 1.0, 30.0, 1e4))
        rows = chance.choice((0, 1, 2, 3, 5, 17, 33))
        classes = chance.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 999, 4097))
        dtype = chance.choice((torch.float32, torch.float32, torch.bfloat16))
        store = torch.randn(2 * rows + 2, 2 * classes + 3) * self.scale
        if self.wild:
            odd = torch.tensor(
                [-math.inf, math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, 0.0, -88.0, 89.0, 1e10]
            )
            chosen = torch.rand(store.shape) < chance.choice((0.01, 0.2))
            store = torch.where(chosen, odd[torch.randint(len(odd), store.shape)], store)
        self.logits = _view(store, rows, classes, dtype, chance)
        self.ignore_index = chance.choice((-100, -100, 0, classes - 1))
        self.target = _target(rows, classes, self.ignore_index, chance)
        self.weight: Tensor | None = None
        if chance.random() < 0.4:
            weight = torch.rand(2 * classes)[:: chance.choice((1, 2))][:classes]
            self.weight = weight.masked_fill(weight < 0.1, 0.0)
        print(f"{dtype} {tuple(self.logits.shape)} {self.logits.stride()} ", end="", flush=True)
        print(f"{self.target.dtype} {self.target.stride()} {self.ignore_index} ", end="")

    @property
    def tolerance(self) -> dict[str, Any]:
        rtol, atol = (2e-2, 2e-2) if self.logits.dtype == torch.bfloat16 else (1e-3, 1e-4)
        return {"rtol": rtol, "atol": atol * max(self.scale, 1.0), "equal_nan": True}


def _view(store: Tensor, rows: int, classes: int, dtype: torch.dtype, chance: Random) -> Tensor:
    """A (rows, classes) view of a larger tensor, or a tensor of its own that ends exactly there."""
    store = store.to(dtype)
    views = (
        store[:rows, :classes].clone(),
        store[:rows, :classes].clone(),
        store[1 : rows + 1, 3 : classes + 3],
        store[: 2 * rows : 2, :classes],
        store[:rows, : 2 * classes : 2],
        store[:rows, :classes].t().clone().t(),
        store[:1, :classes].expand(rows, classes),
        store[-rows - 1 : -1, -classes:],
    )
    return chance.choice(views)


def _target(rows: int, classes: int, ignore_index: int, chance: Random) -> Tensor:
    wide = torch.randint(classes, (2 * rows + 1, 3))
    if chance.random() < 0.3:
        wide[torch.rand(wide.shape) < 0.3] = ignore_index
    views = (wide[:rows, 0].clone(), wide[:rows, 1], wide[1 : 2 * rows : 2, 2])
    target = chance.choice((*views, wide[0, :1].expand(rows)))
    return target.to(torch.int32) if chance.random() < 0.2 else target


@dataclass(frozen=True)
class _Loss:
    """A loss of the kernel, by its class in :mod:`labo`."""

    name: str
    options: dict[str, Any]

    def build(self, case: Case, weight: Tensor | None, reduction: str, **how: Any) -> Any:
        import labo

        return getattr(labo, self.name)(
            **self.options,
            weight=weight,
            ignore_index=case.ignore_index,
            reduction=reduction,
            **how,
        )


def _random_loss(chance: Random, *, formulas: bool = False) -> _Loss:
    """One of the losses with kernels of their own; with ``formulas``, any without a teacher."""
    alpha, tau = chance.choice((0.0, 0.1, 0.7, 1.0)), chance.choice((0.05, 1.0, 1.25, 40.0))
    losses = [
        _Loss("CrossEntropyLoss", {}),
        _Loss("LabelSmoothingLoss", {"alpha": alpha}),
        _Loss("LABOLoss", {"alpha": alpha, "tau": tau}),
        _Loss("LABOLoss", {"tau": tau, "rho": chance.choice((0.0, 0.5, 1.0))}),
    ]
    if formulas and chance.random() < 0.5:
        losses = [
            _Loss("FocalLoss", {"gamma": chance.choice((0.5, 2.0))}),
            _Loss("ConfidencePenaltyLoss", {"beta": alpha}),
            _Loss("MaxSuppressionLoss", {"lam": alpha}),
            _Loss("LogitNormLoss", {"tau": tau}),
            _Loss("MarginSmoothingLoss", {"lam": alpha, "margin": tau}),
            _Loss("TFRegLoss", {"alpha": alpha}),
            _Loss("LabelSmoothingLoss", {"alpha": alpha, "convention": "fairseq"}),
        ]
    loss = chance.choice(losses)
    print(f"{loss.name} {loss.options} ", end="", flush=True)
    return loss


# ------------------------------------------------------------------ the losses


def _losses(case: Case) -> None:
    from labo import parallel

    chance, target = case.chance, case.target
    reduction = chance.choice(("none", "none", "mean", "sum"))
    inplace = chance.random() < 0.2
    as_shard = chance.random() < 0.2
    loss = _random_loss(chance, formulas=not as_shard)
    print(f"{reduction} {inplace} {as_shard} ", end="", flush=True)
    before = case.logits.clone()
    leaf = case.logits.detach().requires_grad_()
    # The gradient is written over the logits of a graph, not over those of the user.
    logits = leaf.clone(memory_format=torch.contiguous_format) if inplace else leaf
    if as_shard:
        module = loss.build(case, case.weight, reduction)
        value = parallel.logits_loss(leaf, target.long(), module)
    else:
        module = loss.build(case, case.weight, reduction, impl="native", inplace=inplace)
        value = module(logits, target)
    grad = torch.zeros_like(leaf)
    if value.numel() and value.requires_grad:
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert torch.equal(_bits(before), _bits(case.logits)), "the logits were changed"
    if reduction == "none" and len(leaf) and not as_shard:
        row = chance.randrange(len(leaf))
        alone = module(case.logits[row : row + 1].clone(), target[row : row + 1])
        assert torch.equal(_bits(alone), _bits(value[row : row + 1])), f"row {row} alone differs"
    if case.wild:
        return
    exact = before.double().requires_grad_()
    weight = None if case.weight is None else case.weight.double()
    wanted = loss.build(case, weight, reduction, impl="reference")(exact, target.long())
    torch.testing.assert_close(value.double(), wanted.detach(), **case.tolerance)
    if value.numel() and value.requires_grad:
        (expected,) = torch.autograd.grad(wanted.sum(), exact)
        torch.testing.assert_close(grad.double(), expected, **case.tolerance)


def _bits(x: Tensor) -> Tensor:
    x = x.detach().contiguous()
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


# ------------------------------------------------------------------ the functions for shards


def _shards(case: Case) -> None:
    """Columns of a shard; targets may be columns of another one."""
    from labo.fast import native
    from labo.fast.columns import COEFFICIENTS, SUMS, RowInputs
    from labo.fast.formula import plan_of
    from labo.linear import computing
    from labo.sums import OTHERS

    chance, logits = case.chance, case.logits
    loss = computing(_random_loss(chance).build(case, None, "none"), False, divided=True)
    away = torch.randint(-5, logits.shape[1] + 5, case.target.shape)
    target = torch.where(torch.rand(away.shape) < 0.3, away, case.target.long())
    plan = plan_of(loss, case.weight is not None)
    if chance.random() < 0.5:
        plan = plan._replace(asked=plan.asked | OTHERS)
    given = RowInputs(target, plan, case.weight, case.ignore_index)
    before = logits.clone()
    sums = native.sums(logits, given)
    if len(logits):
        row = chance.randrange(len(logits))
        alone = slice(row, row + 1)
        one = native.sums(logits[alone].clone(), given._replace(target=target[alone]))
        assert torch.equal(one.view(torch.int64), sums[alone].view(torch.int64)), f"row {row}"
    coefficients = torch.rand(len(logits), len(COEFFICIENTS), dtype=torch.float64)
    coefficients[:, COEFFICIENTS.index("top")] = sums[:, SUMS.index("top")].nan_to_num(0.0)
    out = torch.empty(len(logits), logits.shape[1] + chance.randrange(3), dtype=logits.dtype)
    out = out[:, : logits.shape[1]]
    grad = native.gradient(logits, given, coefficients, out)
    assert grad.shape == logits.shape
    assert torch.equal(_bits(before), _bits(logits)), "the logits were changed"


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["beside"])
