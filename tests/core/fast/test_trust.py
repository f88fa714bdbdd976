"""The first use of a Triton kernel is compared with the plain formula; here kernels are broken."""

from __future__ import annotations

import warnings

import pytest
import torch

import labo
from labo.fast import dispatch, kernels, trust
from loss_cases import MODULES, triton_for_native

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
K = 70


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are served as on a GPU: by the Triton kernels, which are checked first."""
    triton_for_native(monkeypatch)
    monkeypatch.setattr(trust, "_known", {})
    monkeypatch.delenv("LABO_CHECK_KERNELS", raising=False)
    monkeypatch.setattr(
        dispatch,
        "_native_refuses",
        lambda logits, loss=None: None if loss is None else trust.refuses(loss, logits),
    )
    return monkeypatch


def problem():
    return torch.randn(5, K, requires_grad=True), torch.randint(K, (5,))


def broken(function, change):
    def run(*arguments):
        return change(function(*arguments))

    return run


def tried(loss, *arguments):
    """The value, or the message of the error."""
    try:
        return loss(*arguments)
    except ValueError as error:
        return str(error)


NAMES = ["base", "ls", "labo", "ps-kd", "fl", "cp", "kd", "dkd", "mls", "logitnorm", "ger"]
HALF = [(name, dtype) for name in ("labo", "kd") for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in NAMES), *HALF])
def test_good_kernels_are_used_and_listed(gpu, name, dtype):
    loss, (logits, target) = MODULES[name](K), problem()
    logits = logits.detach().to(dtype)
    extra = (torch.randn(5, K).to(dtype),) if loss.teacher_argument else ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss(logits, target, *extra)
    assert trust.checked() == (
        f"compared with the plain formula: {type(loss).__name__} {str(dtype)[6:]}"
    )


@pytest.mark.parametrize("impl", ["auto", "native"])
def test_a_wrong_value(gpu, impl):
    wrong = broken(kernels.row_statistics, lambda found: (1.01 * found[0], found[1]))
    gpu.setattr(kernels, "row_statistics", wrong)
    logits, target = problem()
    wanted = labo.LABOLoss(impl="reference")(logits, target)
    loss = labo.LABOLoss(impl=impl)
    with pytest.warns(UserWarning, match=r"LABOLoss in float32 .* the value is off by 1.0e-02"):
        value = tried(loss, logits, target)
    if impl == "auto":
        torch.testing.assert_close(value, wanted)
    else:
        assert 'impl="native" does not support the kernels of LABOLoss' in value
    assert trust.checked() == "not used: LABOLoss float32"
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(labo.LABOLoss()(logits, target), wanted)


@pytest.mark.parametrize("name", ["fl", "kd"])
def test_a_wrong_gradient(gpu, name):
    wrong = broken(kernels.gradient, lambda grad: grad.mul_(0.9))
    gpu.setattr(dispatch.native, "gradient", wrong)
    loss, (logits, target) = MODULES[name](K), problem()
    extra = (torch.randn(5, K),) if name == "kd" else ()
    with pytest.warns(UserWarning, match="the gradient is off by 1.0e-01"):
        value = loss(logits, target, *extra)
    (slope,) = torch.autograd.grad(value, logits)
    loss.impl = "reference"
    (wanted,) = torch.autograd.grad(loss(logits, target, *extra), logits)
    torch.testing.assert_close(slope, wanted)


def test_a_kernel_that_does_not_run(gpu):
    def failing(*arguments):
        raise RuntimeError("no kernel image is available for execution on the device")

    gpu.setattr(kernels, "row_statistics", failing)
    logits, target = problem()
    with pytest.warns(UserWarning, match="they raise RuntimeError: no kernel image is available"):
        value = labo.CrossEntropyLoss()(logits, target)
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(logits, target))


def test_linear_loss_is_checked_too(gpu):
    wrong = broken(kernels.row_statistics, lambda found: (found[0] + 1, found[1]))
    gpu.setattr(kernels, "row_statistics", wrong)
    hidden, weight, target = torch.randn(5, 8), torch.randn(K, 8), torch.randint(K, (5,))
    with pytest.warns(UserWarning, match="LabelSmoothingLoss in float32"):
        value = labo.linear_loss(hidden, weight, target, labo.LabelSmoothingLoss())
    wanted = labo.LabelSmoothingLoss(impl="reference")(hidden @ weight.T, target)
    torch.testing.assert_close(value, wanted)


def test_the_variable_turns_it_off(gpu):
    gpu.setenv("LABO_CHECK_KERNELS", "0")
    wrong = broken(kernels.row_statistics, lambda found: (found[0] + 1, found[1]))
    gpu.setattr(kernels, "row_statistics", wrong)
    logits, target = problem()
    value = labo.CrossEntropyLoss()(logits, target)
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(logits, target) + 1)
    assert trust.checked() == ""


def test_a_mistake_of_the_caller_is_no_difference(gpu):
    """The mask has another number of classes: the call says so, and the next one is checked."""
    loss = labo.MaskedLabelSmoothingLoss(torch.ones(K + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask"):
        loss(*problem())
    assert trust.checked() == ""


def test_backends_tells_what_was_checked(gpu):
    gpu.setattr(dispatch, "_triton_unavailable", lambda: None)
    assert labo.backends()["native (CUDA)"] == "available (triton)"
    labo.LABOLoss()(*problem())
    told = labo.backends()["native (CUDA)"]
    assert told == "available (triton; compared with the plain formula: LABOLoss float32)"


def test_what_was_found_holds_under_torch_compile(gpu):
    wrong = broken(kernels.row_statistics, lambda found: (found[0] + 1, found[1]))
    gpu.setattr(kernels, "row_statistics", wrong)
    logits, target = problem()
    loss = labo.LABOLoss()
    values = []
    for _ in range(2):
        torch._dynamo.reset()
        values.append(torch.compile(loss, fullgraph=True, backend="aot_eager")(logits, target))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            wanted = loss(logits, target)
    torch.testing.assert_close(values, [wanted + 1, wanted])
