"""linear_loss with a low-rank adapted weight (LoRA, DoRA) against the materialised weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import labo
from eighths import Eighths
from labo.heads import quantized
from probes import LargestTensor

ROWS, WIDTH, CLASSES, RANK, SCALE = 11, 6, 23, 3, 1.5
CHUNKS = labo.LinearLossOptions(batch_chunk_size=4)


each_kind = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])


def problem(dora: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shapes = {
        "input": (ROWS, WIDTH),
        "base": (CLASSES, WIDTH),
        "bias": (CLASSES,),
        "a": (RANK, WIDTH),
        "b": (CLASSES, RANK),
    }
    shapes |= {"magnitude": (CLASSES,)} if dora else {}
    return {
        name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def labels() -> Tensor:
    target = torch.randint(CLASSES, (ROWS,))
    target[2] = -100
    return target


def dense(loss: nn.Module, x: dict[str, Tensor], target: Tensor, softcap: float | None):
    weight = x["base"] + SCALE * x["b"] @ x["a"]
    if "magnitude" in x:
        weight = weight * (x["magnitude"] / weight.detach().norm(dim=1)).unsqueeze(1)
    logits = x["input"] @ weight.T + x["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return loss(logits, target)


def adapted(loss: nn.Module, x: dict[str, Tensor], target: Tensor, softcap: float | None):
    weight = labo.LowRankWeight(x["base"], x["a"], x["b"], SCALE, x.get("magnitude"))
    return labo.linear_loss(
        x["input"], weight, target, loss, linear_bias=x["bias"], softcap=softcap, options=CHUNKS
    )


def value_and_gradients(compute, loss, x, target, softcap=None, frozen=()):
    leaves = {name: t.clone().requires_grad_(name not in frozen) for name, t in x.items()}
    value = compute(loss, leaves, target, softcap)
    value.backward(torch.full_like(value, 0.7))
    return value.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def same(found, wanted, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, check_dtype=False)


@each_kind
@pytest.mark.parametrize("frozen", [(), ("base", "bias", "input")], ids=["whole", "frozen"])
@pytest.mark.parametrize(
    ("loss", "reduction", "softcap"),
    [
        (labo.LABOLoss, "mean", None),
        (labo.LABOLoss, "none", 2.0),
        (labo.FocalLoss, "mean", 2.0),
        (labo.FocalLoss, "none", None),
    ],
)
def test_equals_the_materialised_weight(dora, frozen, reduction, loss, softcap):
    module, x, target = loss(reduction=reduction), problem(dora), labels()
    wanted = value_and_gradients(dense, module, x, target, softcap, frozen)
    same(value_and_gradients(adapted, module, x, target, softcap, frozen), wanted)


@each_kind
def test_class_weights_soft_targets_and_no_targets(dora):
    x = problem(dora)
    weighted = labo.LABOLoss(weight=(torch.rand(CLASSES) + 0.5).double())
    soft = torch.rand(ROWS, CLASSES).double().softmax(-1)
    nothing = torch.full((ROWS,), -100)
    cases = ((weighted, labels()), (labo.LABOLoss(), soft), (labo.LABOLoss(), nothing))
    for module, target in cases:
        wanted = value_and_gradients(dense, module, x, target)
        same(value_and_gradients(adapted, module, x, target), wanted)


def test_a_teacher():
    x, target = problem(dora=False), labels()
    teacher = torch.randn(ROWS, CLASSES).double()
    loss = labo.DistillationLoss()
    weight = labo.LowRankWeight(x["base"], x["a"], x["b"], SCALE)
    logits = x["input"] @ (x["base"] + SCALE * x["b"] @ x["a"]).T
    found = labo.linear_loss(
        x["input"], weight, target, loss, teacher_logits=teacher, options=CHUNKS
    )
    torch.testing.assert_close(found, loss(logits, target, teacher))


def eighths(classes: int = CLASSES, width: int = WIDTH) -> tuple[Eighths, labo.QuantizedWeight]:
    """The same base twice: as a tensor like those of torchao, and as a function."""
    base = Eighths(torch.randint(-20, 20, (classes, width), dtype=torch.int8))
    codes = base.codes
    return base, labo.QuantizedWeight(lambda a, b: codes[a:b].double() / 8, (classes, width))


@each_kind
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_quantized_base(monkeypatch, dora, reduction, softcap):
    """QLoRA: the adapter is trained as on the dequantized base, which is frozen."""
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 5 * WIDTH * 8)  # five classes
    x, target, module = problem(dora), labels(), labo.LABOLoss(reduction=reduction)
    tensor, function = eighths()
    x["base"] = tensor.dequantize().double()
    wanted = value_and_gradients(dense, module, x, target, softcap, ("base",))
    for base in (tensor, function):

        def on_quantized(loss, leaves, *rest, base=base):
            return adapted(loss, leaves | {"base": base}, *rest)

        found = value_and_gradients(on_quantized, module, x, target, softcap, ("base",))
        assert found[1]["a"].abs().sum() > 0
        same(found, wanted)


@pytest.mark.parametrize("kind", ["dense", "quantized", "quantized, dora"])
def test_neither_logits_nor_effective_weight_exist(monkeypatch, kind):
    """400 classes of width 300: the largest tensor is the hidden states. Nor a whole base."""
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 50 * 300 * 4)
    rows, width, classes = 64, 300, 400
    dtype = torch.bfloat16 if kind == "dense" else torch.float32
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    base = torch.randn(classes, width, dtype=dtype)
    a, b = torch.randn(2, width, requires_grad=True), torch.ones(classes, 2, requires_grad=True)
    magnitude = torch.ones(classes, requires_grad=True) if kind == "quantized, dora" else None
    base = base if kind == "dense" else eighths(classes, width)[0]
    weight = labo.LowRankWeight(base, a, b, 2.0, magnitude)
    options = labo.LinearLossOptions(batch_chunk_size=8)
    with LargestTensor() as probe:
        target = torch.randint(classes, (rows,))
        labo.linear_loss(hidden, weight, target, labo.LABOLoss(), options=options).backward()
    assert probe.largest <= rows * width < rows * classes
    assert a.grad.dtype == b.grad.dtype == torch.float32


@each_kind
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
@pytest.mark.parametrize("frozen", [(), ("base",)], ids=["dense", "quantized"])
def test_half_types(mode, frozen, dora):
    """Hidden states in bfloat16, adapter in float32, as in QLoRA."""
    x, target, (base, _) = problem(dora, torch.float32), labels(), eighths()
    if frozen:
        x["base"] = base.dequantize().float()
    narrow = ("input", "bias", "base") if mode == "bfloat16" else ()
    given = {name: t.bfloat16() if name in narrow else t for name, t in x.items()}
    wide = {name: t.double() for name, t in given.items()}
    wanted = value_and_gradients(dense, labo.LABOLoss(), wide, target, frozen=frozen)

    def compute(loss, leaves, *rest):
        return adapted(loss, leaves | ({"base": base} if frozen else {}), *rest)

    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        found = value_and_gradients(compute, labo.LABOLoss(), given, target, frozen=frozen)
    assert all(found[1][name].dtype == torch.float32 for name in ("a", "b"))
    assert frozen or found[1]["base"].dtype == given["base"].dtype
    same(found, wanted, tolerance=0.05)


def test_dropout_is_that_of_the_adapter():
    x, target, loss = problem(dora=True), labels(), labo.LABOLoss()
    mask = (torch.rand(ROWS, WIDTH) > 0.4).double() / 0.6
    weight = labo.LowRankWeight(x["base"], x["a"], x["b"], SCALE, dropout=lambda h: h * mask)
    logits = x["input"] @ x["base"].T + SCALE * ((x["input"] * mask) @ x["a"].T) @ x["b"].T
    found = labo.linear_loss(x["input"], weight, target, loss, options=CHUNKS)
    torch.testing.assert_close(found, loss(logits, target))


def test_warmup_and_compile():
    x, target = problem(dora=False), labels()
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=5)
    wanted = value_and_gradients(dense, loss, x, target)
    same(value_and_gradients(adapted, loss, x, target), wanted)
    compiled = torch.compile(adapted, backend="eager")
    same(value_and_gradients(compiled, loss, x, target), wanted)


@pytest.mark.parametrize("dropout", [nn.Identity(), nn.Dropout(0.0)])
def test_dora_with_a_dropout_that_drops_nothing(dropout):
    x, target, loss = problem(dora=True), labels(), labo.LABOLoss()
    low = x["base"], x["a"], x["b"], SCALE, x["magnitude"]
    found, wanted = (
        labo.linear_loss(x["input"], labo.LowRankWeight(*low, dropout=given), target, loss)
        for given in (dropout, None)
    )
    assert torch.equal(found, wanted)


def test_what_is_refused():
    x, target, loss = problem(dora=True), labels(), labo.LABOLoss()
    good = labo.LowRankWeight(x["base"], x["a"], x["b"], SCALE)
    with pytest.raises(ValueError, match=r"a and b must have shapes \(r, 6\) and \(23, r\)"):
        labo.LowRankWeight(x["base"], x["a"].T, x["b"], SCALE)
    for changed, error, sentence in (
        ({"base": x["base"][0]}, ValueError, r"base must have shape \(V, D\), got \(6,\)"),
        ({"base": nn.Linear(6, 23)}, TypeError, "base must be a tensor, got Linear: pass the wei"),
        ({"base": eighths()[0].requires_grad_()}, ValueError, r"base is quantized.*freeze it"),
        ({"b": torch.tensor(1.0)}, ValueError, r"a and b must have shapes .* and \(\)$"),
        ({"a": nn.Linear(6, 3)}, TypeError, "a must be a tensor, got Linear: pass the weight"),
        ({"magnitude": nn.Linear(1, 1)}, TypeError, "magnitude must be a tensor, got Linear"),
        ({"scale": {"default": 2.0}}, TypeError, r"got dict: PEFT has it in layer.scaling\["),
    ):
        arguments = {"base": x["base"], "a": x["a"], "b": x["b"], "scale": SCALE} | changed
        with pytest.raises(error, match=sentence):
            labo.LowRankWeight(**arguments)
    with pytest.raises(ValueError, match="dtype, unless autocast is on"):
        labo.linear_loss(x["input"].float(), good, target, loss)
    with pytest.raises(ValueError, match=r"takes no LowRankWeight: gather"):
        labo.parallel.linear_loss(x["input"], good, target, loss)
    with pytest.raises(ValueError, match="does not go with dropout"):
        labo.LowRankWeight(x["base"], x["a"], x["b"], SCALE, x["magnitude"], nn.Dropout(0.1))
