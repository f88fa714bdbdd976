"""The base of every loss: fields, checks, shared arguments, choice of backend, reduction, function.

A loss is one class. Its hyper-parameters are fields (:mod:`labo.fields`). Its value is either

- ``value(self, row)``, a formula of the sums over a row of logits (:mod:`labo.sums`): then every
  backend computes it, also on split columns and in :func:`labo.linear_loss`; or
- ``on_rows(self, rows, ...)``, from the rows themselves (:mod:`labo.rows`), in plain PyTorch.

The Module, the function in :mod:`labo.functional` and the recipe keys of the lab are derived.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import dataclass_transform

from . import _checks
from ._checks import TeacherError
from .fast.dispatch import FastRows, choose, fast_loss, for_few_classes
from .fast.kernel import Kernel
from .fields import (
    KEYWORD,
    NOT_NEGATIVE,
    POSITIONAL,
    Field,
    collect,
    hyper,
    register,
    state,
    with_signature,
)
from .rows import Rows, log_sum, teacher_rows
from .sums import PlainSums, RowSums, value_of

__all__ = ["Loss", "hyper", "state"]

Self = TypeVar("Self", bound="Loss")


@dataclass_transform(kw_only_default=True, field_specifiers=(hyper, state))
class _WithFields(nn.Module):
    """Tells type checkers that the fields of a subclass are the arguments of its constructor."""


class Loss(_WithFields):
    """A loss on logits and targets, called as ``loss(logits, target)``.

    The hyper-parameters are attributes, tensors among them buffers. They may be changed.
    """

    weight: Tensor | None = hyper(
        default=None,
        doc="(K,) class weights, as in ``F.cross_entropy``: the term of class j in the cross "
        "entropy of a label is multiplied by w_j, a term that is not a sum over the label by the "
        "weight of the label",
    )
    ignore_index: int = hyper(default=-100, doc="rows with this target do not count")
    reduction: str = hyper(
        default="mean",
        choices=("none", "mean", "sum"),
        doc='"none", "mean" (over the rows that count, weighted by ``weight``) or "sum". The mean '
        "is 0 if no row counts or if all labels have weight 0",
    )
    dim: int = hyper(default=-1, doc="the dimension of the classes")
    z_loss: float = hyper(
        default=0.0, within=NOT_NEGATIVE, doc="lambda of a z-loss that is added to each row"
    )
    impl: str = hyper(
        default="auto",
        choices=("auto", "reference", "blocked", "native"),
        doc="the backend; all give the same results. ``reference`` is the plain formula, "
        "differentiable any number of times, ``auto`` the fastest one that supports the call",
    )
    inplace: bool = hyper(
        default=False,
        doc="write the gradient over the logits, which are not read afterwards: it then takes no "
        "memory of its own",
    )

    fields: ClassVar[dict[str, Field]]
    name: ClassVar[str | None] = None  # in labo.LOSSES
    function_name: ClassVar[str | None] = None  # in labo.functional
    # Whether the value is linear in the label, so that class probabilities are taken.
    linear: ClassVar[bool] = True
    # Whether the value of a row depends on that row alone and the loss has no parameters.
    rowwise: ClassVar[bool] = True
    # Whether ``alpha`` is the weight of a smoothing distribution in the label.
    smooths: ClassVar[bool] = False
    # The name of the function's argument for teacher logits, if it has one.
    teacher_argument: ClassVar[str | None] = None
    # The loss that computes if no teacher is given, where the teacher is optional.
    without_teacher: ClassVar[type[Loss] | None] = None
    # Whether the teacher is given as stored classes and their log-probabilities, not as logits.
    teacher_is_stored: ClassVar[bool] = False
    # Whether the sums are over the classes other than the target.
    leaves_out_target: ClassVar[bool] = False
    # Fields of a base that the loss does not have.
    without: ClassVar[tuple[str, ...]] = ()
    # What the function takes after the target, if that is not one teacher.
    inputs: ClassVar[tuple[str, ...]] = ()

    _registered: ClassVar[str]
    _own: ClassVar[tuple[str, ...]]  # the fields of the function that are not shared
    _of_function: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _declare(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.fields.get(name)
        if field is not None:
            field.check(value)
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ what a loss defines

    def value(self, row: RowSums) -> Tensor:
        """The value of each row, (N,), as a formula of sums."""
        raise NotImplementedError

    def on_rows(self, rows: Rows, *inputs: Any, **keywords: Any) -> Tensor:
        """The value of each row, (N,), for a loss that is no such formula.

        The function has its keyword-only arguments too.
        """
        raise NotImplementedError

    def reference_only(self, *inputs: Any) -> str | None:
        """What the fast backends do not support in this call, or None."""
        return None if _defines(type(self), "value") else "this loss"

    def few_classes(self) -> int:
        """Up to so many classes the reference is as fast as a fast backend: "auto" takes it."""
        return 0

    def check_together(self) -> None:
        """Refuse hyper-parameters that do not go together."""

    def make_state(self) -> None:
        """Register buffers and parameters; for the Module."""

    def current(self) -> Loss:
        """The loss with the hyper-parameters of this epoch or step."""
        return self

    def own_inputs(self) -> tuple[Any, ...]:
        """The inputs that the Module itself has, such as a table."""
        return ()

    def class_row(self, num_classes: int) -> Tensor | None:
        """The row of classes, (K,), that the masses come from, if they do."""
        return None

    def kernel(self) -> Kernel | None:
        """The loss as its own kernel knows it, if it has one."""
        return None

    @property
    def smoothing_weight(self) -> float | str:
        """The weight of the smoothing distribution: a number, "adaptive", or 0 without one."""
        weight: float | str = self.alpha if self.smooths else 0.0  # type: ignore[assignment]
        return weight

    # ------------------------------------------------------------------ the Module

    def forward(
        self, logits: Tensor, target: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        self.check_teacher(teacher_logits is not None)
        inputs = self.own_inputs() if teacher_logits is None else (teacher_logits,)
        return self.current().compute(logits, target, *inputs)

    def check_teacher(self, given: bool) -> None:
        """Refuse missing teacher logits, and teacher logits that the loss does not take."""
        name = type(self).__name__
        if given and self.teacher_argument is None:
            raise TeacherError(f"{name} takes no teacher logits")
        if not given and self.teacher_argument is not None and self.without_teacher is None:
            what = "teacher_logits: the logits of a teacher, of the shape of the logits"
            if self.teacher_is_stored:
                what = "indices and log_probabilities: the stored classes of a teacher"
            raise TeacherError(f"{name} needs {what}")

    def extra_repr(self) -> str:
        parts = []
        for name, field in self.fields.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                parts.append(f"{name}=<{len(value)} classes>")
            elif value != field.default or (name in self._own and value is not None):
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    # ------------------------------------------------------------------ without a Module

    @classmethod
    def bare(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """A loss that is no Module, for one call: hyper-parameters and no state."""
        loss = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(loss, name, value)
        return loss

    def values(self) -> dict[str, Any]:
        """The hyper-parameters that the function has, with their current values."""
        return {name: getattr(self, name) for name in self._of_function}

    def having(self: Self, **changes: Any) -> Self:
        """A bare copy with other hyper-parameters."""
        return type(self).bare(self.values() | changes)

    def untaught(self) -> Loss:
        """The loss that computes if no teacher is given, with the values of this one."""
        if self.without_teacher is None:
            return self
        fields = self.without_teacher.fields
        values = {name: getattr(self, name, field.default) for name, field in fields.items()}
        return self.without_teacher.bare(values)

    def plan_key(self) -> tuple[Any, ...]:
        """What the sums of the formula depend on; a tensor changes none."""
        values = (getattr(self, name) for name in self._own)
        return tuple(None if isinstance(value, Tensor) else value for value in values)

    # ------------------------------------------------------------------ the computation

    def compute(self, logits: Tensor, target: Tensor, *inputs: Any, **keywords: Any) -> Tensor:
        """The reduced loss.

        Args:
            logits: (..., K), or classes in ``dim``.
            target: (...) class indices, or (..., K) class probabilities.
            inputs: what the function takes after the target.
            keywords: further arguments of the function.
        """
        if not inputs and self.without_teacher is not None:
            return self.untaught().compute(logits, target)
        _checks.check_tensors(logits, target)
        reason = self.reference_only(*inputs)
        backend = choose(self, logits, target, reason)
        if backend == "parallel":
            from .heads import split

            return split.row_loss(logits, target, self, inputs)
        dim = self.dim
        _checks.check_logits(logits, dim)
        classes = logits.shape[dim]
        if self.impl == "auto" and not self.inplace and backend != "reference":
            backend, logits = for_few_classes(self, backend, logits, classes)
        if backend == "reference":
            return self._plain(logits, target, inputs, keywords, reason is not None)
        _checks.check_target(logits.shape, target, dim)
        if self.weight is not None or target.device != logits.device:
            _checks.check_weight(self.weight, classes)
            _checks.check_devices(logits, target=target, weight=self.weight)
        # Every view is a node in the graph, and at small sizes the time goes into nodes.
        flat, labels = logits, target
        if logits.dim() != 2 or dim == 0 or dim == -2:
            flat, labels = logits.movedim(dim, -1).reshape(-1, classes), target.reshape(-1)
        if labels.dtype != torch.int64:
            labels = labels.long()
        source: Tensor | None
        stored = None
        if self.teacher_is_stored:
            stored, source = self._stored(inputs, flat, target.shape, labels != self.ignore_index)
        elif self.teacher_argument is not None:
            taught = inputs[0] if inputs else None
            source = teacher_rows(self.teacher_argument, taught, flat, target.shape, dim)
        else:
            source = self.mass_source(flat, *inputs)
        value = fast_loss(FastRows(self, backend, source, stored), logits, flat, labels)
        return value.reshape(target.shape) if self.reduction == "none" else value

    def _plain(
        self,
        logits: Tensor,
        target: Tensor,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        reference_only: bool,
    ) -> Tensor:
        """The reference: sums in plain PyTorch, or the rows themselves."""
        shared = (self.weight, self.ignore_index, self.reduction, self.dim)
        rows = Rows(logits, target, *shared, linear=self.linear)
        if reference_only and _defines(type(self), "on_rows"):
            values = self.on_rows(rows, *inputs, **keywords)
            if self.z_loss:
                values = values + rows.weigh(self.z_loss * log_sum(rows.logits).square())
            return rows.reduce(values)
        stored = source = None
        if self.teacher_is_stored:
            stored = self._stored(inputs, rows.logits, rows.shape, rows.valid)
        elif self.teacher_argument is not None:
            source = rows.teacher(self.teacher_argument, inputs[0] if inputs else None)
        else:
            source = self.mass_source(rows.logits, *inputs)
        sums = PlainSums(self, rows, source, stored)
        return rows.reduce(sums.averaged(value_of(self, sums)))

    def mass_source(self, logits: Tensor, *inputs: Any) -> Tensor | None:
        """What the masses come from that are no teacher's, once it fits the logits, (N, K)."""
        row = self.class_row(logits.shape[1])
        if row is None:
            return None
        given = {name: x for name in self._own if isinstance(x := getattr(self, name), Tensor)}
        _checks.check_devices(logits, **given)
        return row.to(logits.device)

    @staticmethod
    def _stored(
        inputs: tuple[Any, ...], logits: Tensor, shape: torch.Size, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from .stored import stored_rows

        return stored_rows(inputs[0], inputs[1], logits, shape, logits.shape[1], valid)


def _defines(cls: type[Loss], method: str) -> bool:
    return getattr(cls, method) is not getattr(Loss, method)


def _declare(cls: type[Loss]) -> None:
    """Constructor, arguments in the docstring, and the name for operators, from the fields."""
    cls.fields = collect(cls)
    cls._of_function = tuple(n for n, field in cls.fields.items() if not field.module_only)
    cls._own = tuple(name for name in cls._of_function if name not in _SHARED)
    fields = sorted(cls.fields.values(), key=lambda field: field.kw_only)

    def build(self: Loss, *values: Any) -> None:
        given = {field.name: value for field, value in zip(fields, values, strict=True)}
        nn.Module.__init__(self)
        for name, field in cls.fields.items():
            field.check(given[name])
            if isinstance(given[name], Tensor):
                self.register_buffer(name, given[name])
            else:
                setattr(self, name, given[name])
        self.check_together()
        self.make_state()

    parameters = [inspect.Parameter("self", POSITIONAL), *(field.parameter() for field in fields)]
    init = with_signature("__init__", parameters, build, cls.__module__, None)
    cls.__init__ = init  # type: ignore[method-assign]
    register(cls)
    text = inspect.cleandoc(cls.__doc__ or "")
    own = [field for name, field in cls.fields.items() if name not in _SHARED]
    if own and "\nArgs:\n" not in text:
        head, mark, tail = text.partition("\nExample:")
        listed = "\n".join(f"    {field.name}: {field.doc}." for field in own)
        text = f"{head}\nArgs:\n{listed}\n{mark}{tail}"
    cls.__doc__ = text


_SHARED: tuple[str, ...] = ()  # while Loss itself is declared
_declare(Loss)
_SHARED = tuple(Loss.fields)


def function_of(cls: type[Loss]) -> Callable[..., Tensor]:
    """The loss as a function of logits, target, inputs and hyper-parameters."""
    fields = [cls.fields[name] for name in cls._of_function]
    positional = [field.parameter() for field in fields if not field.kw_only]
    own = [field.parameter() for field in fields if field.kw_only and field.name not in _SHARED]
    shared = [field.parameter() for field in fields if field.name in _SHARED]

    required = ("logits", "target", *cls.inputs)
    parameters = [inspect.Parameter(name, POSITIONAL, annotation=Tensor) for name in required]
    if cls.teacher_argument is not None and not cls.inputs:
        kind = Tensor | None
        parameters.append(
            inspect.Parameter(cls.teacher_argument, POSITIONAL, default=None, annotation=kind)
        )
    taken = len(parameters)
    of_rows = inspect.signature(cls.on_rows, eval_str=True).parameters.values()
    keyword_only = [parameter for parameter in of_rows if parameter.kind is KEYWORD]
    parameters += [*positional, *own, *keyword_only, *shared]
    names = tuple(parameter.name for parameter in parameters)

    def call(logits: Tensor, target: Tensor, *values: Any) -> Tensor:
        given = dict(zip(names[2:], values, strict=True))
        inputs = tuple(given.pop(name) for name in names[2:taken])
        keywords = {parameter.name: given.pop(parameter.name) for parameter in keyword_only}
        for name, value in given.items():
            cls.fields[name].check(value)
        loss = cls.bare(given)
        loss.check_together()
        if inputs and inputs[0] is None:
            inputs = ()
        return loss.compute(logits, target, *inputs, **keywords)

    assert cls.function_name is not None
    function = with_signature(cls.function_name, parameters, call, "labo.functional", Tensor)
    function.__doc__ = function_doc(cls)
    function.loss = cls  # type: ignore[attr-defined]
    return function


def function_doc(cls: type[Loss]) -> str:
    """The docstring of a class for its function: without the example of the Module."""
    text, _, rest = (cls.__doc__ or "").partition("\nExample:")
    head, _, own = text.rstrip().partition("\nArgs:\n")
    soft = " or (..., K) class probabilities" if cls.linear else ""
    lines = ["    logits: (..., K).", f"    target: (...) class indices{soft}."]
    lines += [own] if own else []
    lines += [f"    {', '.join(_SHARED)}: as for every loss."]
    doc = f"{head.rstrip()}\n\nArgs:\n" + "\n".join(lines)
    doc += '\n\nReturns:\n    The reduced loss, or (...) for ``reduction="none"``.'
    reference = rest.partition("\nReference:")[2]
    return doc + (f"\n\nReference:{reference}" if reference else "")
