"""Output layer and loss in one: equal to the two apart, without the logits."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import labo
from eighths import Eighths
from labo import chunks, linear
from labo.heads import quantized
from layers import SMALL, D, N, V, gradients, problem
from loss_cases import MODULES, gradient
from probes import LargestTensor, Products

WITH_TEACHER = {"kd", "dkd", "cs-kd", "ps-kd", "als-past"}
# Stored classes are tested in test_stored.py.
ROWWISE = [n for n, loss in labo.LOSSES.items() if loss.rowwise and not loss.teacher_is_stored]
each_loss = pytest.mark.parametrize("name", ROWWISE)
# A kernel of one call, a formula, and a formula with a teacher.
each_kind = pytest.mark.parametrize("name", ["labo", "cp", "kd"])


def build(name: str, **settings):
    loss = MODULES[name](V)
    for key, value in settings.items():
        setattr(loss, key, value)
    return loss


def teacher(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    if name not in WITH_TEACHER:
        return None
    generator = torch.Generator().manual_seed(9)
    return torch.randn(N, V, generator=generator, dtype=torch.float64).to(dtype)


def apart(loss, target, teacher_logits=None, softcap=None):
    """The output layer, its cap as in Gemma 2, then the loss."""
    extra = () if teacher_logits is None else (teacher_logits,)

    def step(x, weight, bias):
        logits = nn.functional.linear(x, weight, bias)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return loss(logits, target, *extra)

    return step


def fused(loss, target, **arguments):
    arguments = {"options": SMALL} | arguments
    return lambda x, w, b: labo.linear_loss(x, w, target, loss, linear_bias=b, **arguments)


def close(ours, theirs, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_layer_then_loss(name, reduction):
    """In float64 to its last digits: a detour through float32 would change them."""
    *tensors, target = problem()
    loss, teacher_logits = build(name, reduction=reduction), teacher(name)
    for softcap, options in (
        (None, None),
        (None, SMALL),
        (1.5, SMALL),
        (None, labo.LinearLossOptions(batch_chunk_size=1)),
    ):
        expected = gradients(apart(loss, target, teacher_logits, softcap), *tensors)
        given = {"teacher_logits": teacher_logits, "softcap": softcap, "options": options}
        close(gradients(fused(loss, target, **given), *tensors), expected)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_the_naive_computation(name, dtype):
    *tensors, target = problem(dtype)
    loss, given = build(name), teacher(name, dtype)
    exact = gradients(apart(loss, target, given), *(t.double() for t in tensors))
    naive = gradients(apart(loss, target, given), *tensors)
    result = gradients(fused(loss, target, teacher_logits=given), *tensors)
    for ours, theirs, truth in zip(result, naive, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, usual = ((r.double() - truth).abs().max() for r in (ours, theirs))
        assert error <= 1.5 * usual + 2 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("name", ["labo", "ls", "base"])
def test_softcap_class_weights_and_ignore_index_on_the_fast_backends(name):
    *tensors, target = problem(torch.float32)
    target[N // 3] = 2
    loss = build(name, weight=torch.rand(V), ignore_index=2)
    expected = gradients(apart(loss, target, softcap=1.5), *tensors)
    for impl in ("native", "blocked"):
        result = gradients(fused(loss, target, softcap=1.5, impl=impl), *tensors)
        close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["labo", "cp"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradients_under_a_loss_scale(name, compiled):
    """The error is that of the layer and the loss apart, which autograd scales before rounding."""
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=random).half() for s in ((8192, 8), (500, 8), (500,))]
    target = torch.randint(500, (8192,), generator=random)
    loss = MODULES[name](500)
    torch._dynamo.reset()
    step = fused(loss, target, options=None)
    upstream = torch.tensor(65536.0)
    ours = gradients(
        torch.compile(step, backend="aot_eager") if compiled else step, *tensors, upstream=upstream
    )
    naive = gradients(apart(loss, target), *tensors, upstream=upstream)
    wide = [t.double() for t in tensors]
    exact = gradients(apart(loss, target), *wide, upstream=upstream.double())
    for mine, usual, truth in list(zip(ours, naive, exact, strict=True))[1:]:
        assert mine.dtype == torch.float16
        error, expected = ((g.double() - truth).norm() / truth.norm() for g in (mine, usual))
        assert error <= 1.2 * expected + 2e-4
        assert error < 2e-3


def test_true_class_entry_is_exact_in_bfloat16():
    """p_y - 1 cancels when the model is sure: in bfloat16 arithmetic nothing would be left."""
    hidden = torch.eye(2, dtype=torch.bfloat16)
    weight = torch.tensor([[9.0, 0.0], [0.0, 9.0]]).bfloat16()
    target = torch.tensor([0, 1])
    slope = gradient(lambda w: labo.linear_loss(hidden, w, target, labo.CrossEntropyLoss()), weight)
    exact = gradient(
        lambda w: torch.nn.functional.cross_entropy(hidden.double() @ w.T, target), weight.double()
    )
    torch.testing.assert_close(slope.double(), exact, rtol=1e-2, atol=0)


@each_kind
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_the_gradients_that_are_needed_are_computed(name, wanted):
    *tensors, target = problem()
    loss, given = build(name), teacher(name)
    expected = gradients(apart(loss, target, given), *tensors)[1:]
    leaves = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with Products() as products:
        result = fused(loss, target, teacher_logits=given, options=None)(*leaves)
        if any(wanted):
            result.backward()
    assert len(products.shapes) == 1 + wanted[0] + wanted[1]
    for leaf, w, truth in zip(leaves, wanted, expected, strict=True):
        assert (leaf.grad is not None) == w
        if w:
            torch.testing.assert_close(leaf.grad, truth)


@each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_gradient_is_computed_without_grad_mode(name, mode, reduction):
    """Although the weight requires one, as in every evaluation."""
    x, weight, bias, target = problem()
    loss, given = build(name, reduction=reduction), teacher(name)
    weight.requires_grad_()
    expected = apart(loss, target, given)(x, weight, bias)
    with mode(), Products() as products, LargestTensor() as seen:
        value = fused(loss, target, teacher_logits=given)(x, weight, bias)
    assert len(products.shapes) == 3  # the ignored row is in no chunk
    assert seen.largest < weight.numel()  # nothing of the size of its gradient
    torch.testing.assert_close(value, expected)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_the_size_of_the_logits(name, reduction):
    """In forward and backward, and with a teacher given as an output layer."""
    rows, width, classes = 256, 8, 64
    torch.manual_seed(0)
    x = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))
    loss = MODULES[name](classes)
    loss.reduction = reduction
    teacher_logits = (x.detach().sin(), weight.detach().cos()) if name in WITH_TEACHER else None
    with LargestTensor() as seen:
        value = labo.linear_loss(
            x,
            weight,
            target,
            loss,
            teacher_logits=teacher_logits,
            options=labo.LinearLossOptions(batch_chunk_size=16),
        )
        value.sum().backward()
    # the hidden states, the weight, or a chunk of logits (three such are one buffer for a chunk)
    assert seen.largest <= max(rows * width, classes * width, 3 * 16 * classes)
    assert seen.largest < rows * classes / 4


@each_kind
def test_nothing_to_count(name):
    x, weight, bias, _ = problem()
    loss, given = build(name), teacher(name)
    for rows in (0, N):
        part = None if given is None else given[:rows]
        step = fused(loss, torch.full((rows,), -100), teacher_logits=part)
        for result in gradients(step, x[:rows], weight, bias):
            assert result.count_nonzero() == 0


def test_leading_dimensions():
    x, weight, bias, target = problem(torch.float32)
    loss = build("labo", reduction="none")
    flat = labo.linear_loss(x, weight, target, loss, linear_bias=bias)
    shaped = labo.linear_loss(
        x.reshape(1, 13, D), weight, target.reshape(1, 13), loss, linear_bias=bias
    )
    assert shaped.shape == (1, 13)
    assert torch.equal(shaped[0], flat)


@pytest.mark.parametrize("name", ["labo", "cp"])
def test_class_probabilities(name):
    *tensors, _ = problem()
    soft = torch.rand(N, V, dtype=torch.float64).softmax(-1)
    loss = build(name)
    close(fused(loss, soft)(*tensors), apart(loss, soft)(*tensors))


@pytest.mark.parametrize("name", ["labo", "kd"])
def test_autocast_is_that_of_the_layers(name):
    """The output layer of a teacher is cast as that of the student is."""
    *tensors, target = problem(torch.float32)
    hidden, matrix = torch.randn(N, 5), torch.randn(V, 5)
    loss, taught = build(name), name in WITH_TEACHER
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = nn.functional.linear(hidden, matrix) if taught else None
        expected = gradients(apart(loss, target, logits), *tensors)
        layer = (hidden.bfloat16(), matrix) if taught else None
        result = gradients(fused(loss, target, teacher_logits=layer), *tensors)
    assert all(t.dtype == torch.float32 for t in (*expected, *result))
    close(result, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["labo", "cp"])
def test_bits_do_not_depend_on_threads(name):
    """With matrix products that are exact: those of PyTorch may depend on the threads.

    Each entry of a product, of the gradients too, is a sum with at most one term other than 0, and
    powers of two in the weight make that term exact before the bias is added.
    """
    torch.manual_seed(0)
    bias, target = torch.randn(4000), torch.randint(4000, (300,))
    x, weight = torch.zeros(300, 64), torch.zeros(4000, 64)
    column = torch.arange(64)
    x[torch.randperm(300)[:64], column] = torch.randn(64)
    weight[torch.randperm(4000)[:64], column] = 2.0 ** torch.randint(-1, 3, (64,))
    loss = MODULES[name](4000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(gradients(fused(loss, target, options=None), x, weight, bias))
    finally:
        torch.set_num_threads(threads)
    close(*results, rtol=0, atol=0)


def test_second_backward():
    x, weight, _, target = problem(torch.float32)
    x.requires_grad_()
    loss = labo.linear_loss(x, weight, target, labo.LABOLoss())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through linear_loss"):
        loss.backward()
    rows = labo.linear_loss(x, weight, target, labo.LABOLoss(reduction="none"))
    (first,) = torch.autograd.grad(rows.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(first, again)


# ------------------------------------------------------------------ torch.compile


@each_kind
@pytest.mark.parametrize(("reduction", "softcap"), [("mean", None), ("none", 1.5)])
def test_compiles_whole(name, reduction, softcap):
    *tensors, target = problem(torch.float32)
    given = {"teacher_logits": teacher(name, torch.float32), "softcap": softcap}
    step = fused(build(name, reduction=reduction), target, **given)
    expected = gradients(step, *tensors)
    torch._dynamo.reset()
    result = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), *tensors)
    close(result, expected, rtol=1e-5, atol=1e-6)


PLAIN_KD = build("kd").having(reduction="none", impl="reference")


@pytest.mark.parametrize(
    ("rows", "dtype", "softcap"),
    [
        (chunks.LossRows(labo.CrossEntropyLoss(z_loss=0.1), "native"), torch.float32, None),
        (chunks.LossRows(labo.LABOLoss(), "native"), torch.bfloat16, 2.0),
        (chunks.LossRows(PLAIN_KD, "reference", None, (teacher("kd"),)), torch.float32, None),
    ],
    ids=["z-loss", "capped", "teacher"],
)
def test_operator_check(rows, dtype, softcap):
    *tensors, target = problem(dtype)
    weighted = softcap is not None
    fixed = (softcap, target, 4, weighted, weighted, *rows.pack())
    for grad in (False, True):
        leaves = [t.clone().requires_grad_(grad) for t in tensors]
        nothing = (None, None, None, [False] * 3)
        torch.library.opcheck(linear.linear_op, (*leaves, *fixed, *nothing))
        if rows.backend != "reference":
            mean = (torch.tensor(12.0), torch.rand(N) if weighted else None, None, [grad] * 3)
            torch.library.opcheck(linear.linear_op, (*leaves, *fixed, *mean))
    late = (None, None, torch.rand(N), [True, False, True])
    torch.library.opcheck(linear.linear_op, (*tensors, *fixed, *late))


# ------------------------------------------------------------------ the Module, and wrong use


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_module_is_the_function(softcap):
    head = labo.LinearLoss(D, V, labo.LABOLoss(), bias=True, softcap=softcap)
    x, target = 9 * torch.randn(2, 5, D), torch.randint(V, (2, 5))
    assert softcap is None or head.logits(x).abs().max() <= softcap
    expected = head.loss(head.logits(x), target)
    torch.testing.assert_close(head(x, target), expected)
    head(x, target).backward()
    assert head.linear.weight.grad is not None
    twin = copy.deepcopy(head)
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin(x, target), head(x, target))
    assert "LABOLoss(tau=1.25" in repr(head)


# Arguments, and what is said of them: those that a Module has too, and those of a call.
OF_THE_MODULE = [
    ({"loss": nn.CrossEntropyLoss()}, "takes a row-wise loss of labo, not CrossEntropyLoss"),
    ({"loss": labo.LABOLoss}, r"loss must be a Module, got the class: write LABOLoss\("),
    ({"loss": labo.BetaSmoothingLoss()}, "not BetaSmoothingLoss"),
    ({"softcap": 0.0}, "softcap must be a number above 0"),
    ({"softcap": "30"}, "softcap must be a number above 0 or None, got '30'"),
    ({"z_loss": "1e-4"}, "z_loss must be a finite number of 0 or more, got '1e-4'"),
    ({"z_loss": math.nan}, "z_loss must be"),
    ({"options": 64}, r"options must be a LinearLossOptions, got 64.*batch_chunk_size=64\)"),
]
OF_A_CALL = [
    ({"loss": labo.LABOLoss(dim=1)}, "must have dim=-1"),
    ({"loss": labo.LABOLoss(weight=torch.ones(3))}, "weight must have shape"),
    ({"loss": labo.LABOLoss(weight=torch.ones(V).requires_grad_())}, "no gradient for class wei"),
    ({"input": torch.randn(N, D + 1)}, r"linear_weight must have shape \(V, D\)"),
    ({"input": torch.randn(N, D).double()}, "must have the same dtype"),
    ({"input": {"logits": 1}}, "input must be a tensor, got dict: pass the hidden states"),
    ({"linear_bias": torch.randn(3)}, "linear_bias must have shape"),
    ({"linear_weight": nn.Linear(D, V)}, "must be a tensor, got Linear: pass linear.weight, and"),
    ({"target": torch.zeros(3, dtype=torch.long)}, r"got \(3,\)"),
    ({"target": torch.full((N,), V)}, "target 11 at position 0 is outside"),
    ({"target": [0, 1]}, "target must be a tensor, got list: pass class indices"),
    ({"token_weight": torch.ones(N - 1)}, r"token_weight must have shape \(13,\)"),
    ({"token_weight": torch.ones(N).requires_grad_()}, "no gradient for token_weight"),
    ({"token_weight": [1.0] * N}, "token_weight must be a tensor .*got .*list"),
    ({"token_weight": torch.ones(N).cfloat()}, "token_weight must be a tensor .*got .*complex64"),
    ({"return_metrics": "row"}, 'return_metrics must be False, True or "rows"'),
]


@pytest.mark.parametrize("function", [labo.linear_loss, labo.parallel.linear_loss])
@pytest.mark.parametrize(("change", "sentence"), OF_THE_MODULE + OF_A_CALL)
def test_refuses(function, change, sentence):
    x, weight, bias, target = problem(torch.float32)
    call = {"input": x, "linear_weight": weight, "target": target, "linear_bias": bias}
    with pytest.raises((TypeError, ValueError, IndexError), match=sentence):
        function(**call | {"loss": labo.LABOLoss()} | change)


@pytest.mark.parametrize(("change", "sentence"), OF_THE_MODULE)
def test_module_refuses_at_construction(change, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        labo.LinearLoss(D, V, **{"loss": labo.LABOLoss()} | change)


def test_refuses_backends():
    x, weight, _, target = problem(torch.float32)
    with pytest.raises(ValueError, match="did you mean 'native'"):
        labo.linear_loss(x, weight, target, labo.LABOLoss(), impl="nativ")
    with pytest.raises(ValueError, match="did you mean 'native'"):
        labo.LinearLoss(D, V, labo.LABOLoss(), impl="nativ")
    with pytest.raises(ValueError, match="does not support"):
        labo.linear_loss(x, weight, target, labo.LABOLoss(alpha_grad=True), impl="native")


def test_options_refuse():
    for name in ("batch_chunk_size", "memory_budget"):
        with pytest.raises(ValueError, match=f"{name} must be 1 or more"):
            labo.LinearLossOptions(**{name: 0})


# ------------------------------------------------------------------ teachers


@pytest.mark.parametrize(
    ("tail", "dtype", "compiled"),
    [
        *itertools.product(("bucket", "labo"), (torch.float64, torch.float32), (False,)),
        ("labo", torch.float32, True),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_stored_teacher(tail, dtype, compiled, reduction):
    *tensors, target = problem(dtype)
    values, indices = teacher("kd").log_softmax(-1).topk(3)
    loss = labo.TopKDistillationLoss(tail=tail, reduction=reduction)
    expected = gradients(
        lambda x, w, b: loss(nn.functional.linear(x, w, b), target, indices, values), *tensors
    )
    step = fused(loss, target, teacher_logits=(indices, values))
    torch._dynamo.reset()
    step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    torch.testing.assert_close(gradients(step, *tensors), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_teacher_with_every_option(dtype):
    """Token weights, class weights, a cap, a z-loss and metrics, in every dtype, fused."""
    *tensors, target = problem(dtype)
    values, indices = teacher("kd").log_softmax(-1).topk(3)

    def call(x, w, b):
        loss = labo.TopKDistillationLoss(weight=torch.linspace(0.5, 2, V).to(x.dtype))
        return fused(
            loss,
            target,
            softcap=3.0,
            teacher_logits=(indices, values),
            token_weight=torch.linspace(0, 2, N),
            z_loss=1e-2,
            return_metrics=True,
        )(x, w, b)

    scale = torch.tensor(1024.0)  # with which float16 does not underflow
    wide = [t.double() for t in tensors]
    exact = gradients(lambda *t: call(*t)[0], *wide, upstream=scale.double())
    result = gradients(lambda *t: call(*t)[0], *tensors, upstream=scale)
    for ours, truth in zip(result, exact, strict=True):
        error = (ours.double() - truth).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * truth.abs().max()
    metrics, expected = call(*tensors)[1], call(*wide)[1]
    assert metrics.targets == N - 1
    close(metrics, expected, rtol=8 * torch.finfo(dtype).eps, atol=1e-6)


def test_stored_teacher_refused():
    x, weight, _, target = problem()
    loss, stored = labo.TopKDistillationLoss(), torch.zeros(N, 2)
    for given, sentence in (
        (None, "needs indices and log_probabilities"),
        (stored, "must be the pair"),
        ((stored, stored), "indices must be integers"),
        ((stored[1:].long(), stored[1:]), r"must have shape \(13, 'k'\)"),
        ((stored.long(), stored - 1), "has a class twice"),
    ):
        with pytest.raises(ValueError, match=sentence):
            labo.linear_loss(x, weight, target, loss, teacher_logits=given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", sorted(WITH_TEACHER))
def test_teacher_as_an_output_layer(name, reduction, dtype):
    *tensors, target = problem(dtype)
    hidden, other, bias, _ = problem(dtype, seed=5)
    loss, plain = build(name, reduction=reduction), hidden @ other.T
    for layer, logits in (
        ((hidden, other, bias), plain + bias),
        (labo.TeacherHead(hidden, other, softcap=1.5), 1.5 * torch.tanh(plain / 1.5)),
    ):
        torch.testing.assert_close(
            *(gradients(fused(loss, target, teacher_logits=t), *tensors) for t in (layer, logits))
        )


def shaped_problem():
    x, weight, _, _ = problem()
    x = torch.randn(3, 4, D, dtype=torch.float64)
    return x, weight, torch.randint(V, (3, 4)), torch.randn(3, 4, V, dtype=torch.float64)


def test_refuses_wrong_teachers():
    """The same number of rows is not enough: it may be unshifted, transposed or flat."""
    x, weight, target, logits = shaped_problem()
    hidden, matrix = torch.randn(3, 4, 5).double(), torch.randn(V, 5).double()
    module = nn.Linear(5, V)
    low = labo.LowRankWeight(matrix, torch.ones(1, 5).double(), torch.ones(V, 1).double(), 1.0)

    def distilled(teacher_logits):
        return labo.linear_loss(
            x, weight, target, labo.DistillationLoss(), teacher_logits=teacher_logits
        )

    assert distilled(logits).isfinite()
    assert distilled((hidden, matrix)).isfinite()
    shape = r"teacher_logits must have shape \(3, 4, 11\)"
    of_states = r"hidden states must have shape \(3, 4, 'E'\)"
    for wrong, sentence in (
        (logits.transpose(0, 1), shape),
        (logits.reshape(12, V), shape),
        (torch.cat([logits, logits[:, :1]], 1), shape),  # before the shift by one
        ((hidden.transpose(0, 1), matrix), of_states),
        ((hidden.reshape(12, 5), matrix), of_states),
        ((hidden, matrix[:-1]), of_states),
        ((hidden, matrix[:, :-1]), r"weight must have shape \(V, D\) for the teacher's"),
        ((hidden, matrix, matrix[0]), r"bias must have shape \(11,\)"),
        ((hidden.float(), matrix), "must have the same dtype"),
        ((hidden,), "got 1 tensors"),
        ((hidden, module), "teacher_weight must be a tensor, got Linear: pass linear.weight"),
        ((hidden, matrix, module), "teacher_bias must be a tensor, got Linear"),
        ((module, matrix), "teacher_hidden must be a tensor, got Linear"),
        ((hidden, low), "teacher_weight cannot be a LowRankWeight: merge the adapter"),
        (module, "teacher_logits must be logits, or hidden states.*got Linear"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            distilled(wrong)


def test_missing_and_unused_teachers_are_refused():
    x, weight, target, logits = shaped_problem()
    with pytest.raises(TypeError, match="needs teacher_logits: the logits of a teacher"):
        labo.linear_loss(x, weight, target, build("kd"))
    for name in ("labo", "cp"):
        with pytest.raises(TypeError, match="takes no teacher logits"):
            labo.linear_loss(x, weight, target, build(name), teacher_logits=logits)
    past = build("ps-kd")
    torch.testing.assert_close(
        labo.linear_loss(x, weight, target, past), past(x @ weight.T, target)
    )


def test_warmup_uses_the_loss_of_the_step_and_its_teacher():
    x, weight, target, logits = shaped_problem()
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    for expected in (
        lambda: loss.before(x @ weight.T, target),
        lambda: loss.after(x @ weight.T, target, logits),
    ):
        value = labo.linear_loss(x, weight, target, loss, teacher_logits=logits)
        torch.testing.assert_close(value, expected())
        loss.step()


@pytest.mark.parametrize("impl", ["auto", "reference", "compiled"])
@pytest.mark.parametrize(("name", "reduction"), [("kd", "mean"), ("ps-kd", "none")])
def test_a_quantized_teacher(monkeypatch, name, reduction, impl):
    """By blocks of classes, and equal to the dequantized one; whole nowhere."""
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 3 * 5 * 4)  # three classes
    x, weight, target, _ = shaped_problem()
    x, weight, hidden = x.float(), weight.float(), torch.randn(3, 4, 5)
    tensor = Eighths(torch.randint(-20, 20, (V, 5), dtype=torch.int8))
    dense, codes = tensor.dequantize(), tensor.codes
    function = labo.QuantizedWeight(lambda a, b: codes[a:b] / 8, (V, 5))
    loss, bias = build(name, reduction=reduction), torch.randn(V)
    backend = "auto" if impl == "compiled" else impl

    def step(x, given):
        head = labo.TeacherHead(hidden, given, bias, 3.0)
        return labo.linear_loss(
            x, weight, target, loss, teacher_logits=head, impl=backend, options=SMALL
        )

    compiled = torch.compile(step, backend="aot_eager") if impl == "compiled" else step
    results = []
    for call, given in ((step, dense), (compiled, function), (step, tensor.requires_grad_())):
        leaf = x.clone().requires_grad_()
        value = call(leaf, given)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)
