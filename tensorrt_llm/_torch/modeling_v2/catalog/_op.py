"""What an operator record is. This docstring is the guide for writing one.

An op is one record in one file, a subclass of `OpWrapper` under `@define_op`. Everything known
about the op stands there, and tests, benchmarks, `explain` and receipts read it from there:

    @define_op
    class RouterGemm(OpWrapper):
        \"\"\"The contract: what it computes, shapes, dtypes, units, which state it reads and who
        sets that, what is written, what is left alone, source of the formula.\"\"\"

        schema = "glm_router_gemm(Tensor x, Tensor weight) -> Tensor"
        SOURCES = ("cpp/tensorrt_llm/kernels/glmMoeDsa/routerGemm.cu",)  # once there is a kernel
        CELLS = (Cell("one verify row", {"rows": 1}), Cell("K 7", {"rows": 8}))

        @staticmethod
        def raw_call(x: Tensor, weight: Tensor) -> Tensor:
            return torch.ops.trtllm.glm_router_gemm(x, weight)

        @staticmethod
        def reference(x: Tensor, weight: Tensor) -> Tensor:
            return x.float() @ weight.float().T

        @staticmethod
        def fake(x: Tensor, weight: Tensor) -> Tensor:
            return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        ...

    router_gemm = RouterGemm()  # for callers that bind nothing

What each member promises:

- `schema`: torch's schema without the namespace, which is `trtllm`. What the op writes into is
  `Tensor(a!)`, or `Tensor(a!)?` where the caller may pass None; such an op may return None
  ("-> ()"). A returned tensor never aliases an argument.
- `raw_call`: every argument explicit, nothing from `self`; it only calls `torch.ops.trtllm.<op>`.
- `reference`: plain torch, any device, any geometry; it rounds where the contract says that the
  kernel rounds and sums in fp32 or better, in an order that does not depend on the run. It is the
  op's CPU implementation, so it writes into `Tensor(a!)` arguments too. A collective's reference
  really communicates, over the ranks of the process group.
- `fake`: empty results of the right shape, dtype and stride; reads no values.
- `is_valid`: raises ValueError naming argument, value and what is right, for input that the kernel
  would accept and answer wrongly. It never runs in a step unless `validating()`.
- `CELLS`: the input configurations that are certified, each with the reason why it is there. Only
  `make_inputs` interprets a `spec`; the key "rows", where there is one, is the number of token rows
  (`explain` finds the cell of a decode step by it).
- `make_inputs`: the arguments of `raw_call` by name. All randomness comes from `generator`.
- `bytes_moved`: bytes that the op must read and write at least, from the same arguments.
- `compare`: raises AssertionError unless `out` is as good as `ref`; both are what `run` returns.
  Bitwise unless overridden; an override derives its band in its docstring (`assert_within_ulp`).
- `baseline`: a call without arguments to the library function to be beaten, or None.
- `produced`: overridden only where a call's effect lies outside of its arguments and results, as
  rows in a workspace; it takes the effect up, so that `run` gives it and may follow itself.

`raw_call`, `reference`, `fake` and `is_valid` have the schema's parameters, by the same names.
`helpers.op_cells` checks all of this for one record, on the CPU and, with a kernel, on a GPU.

In a target an op is an instance with bound arguments: `bind_const` what all layers share,
`bind_layered` what a layer owns, the rest at the call:

    op = RouterGemm()
    op.bind_layered(3, weight=gate_weight)
    logits = op(x, layer=3)

What is bound while a step runs (its metadata) must be bound again in every step; a target calls
`advance_step_generation` at the beginning of each forward, and under `validating()` a value left
over from an earlier step is an error. A model that is built where another one of the process has
run steps binds its weights under `lasting_binds()`.
"""

import importlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

NAMESPACE = "trtllm"
PACKAGE = "tensorrt_llm._torch.modeling_v2"
# Set to 1 it lets references stand in for missing kernels on a GPU: right, but slow (bring-up).
REFERENCE_OPS_ENV = "TRTLLM_MODELING_V2_REFERENCE_OPS"

# Spacing of numbers just above 1: the unit in which `assert_within_ulp` measures.
ULP: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).eps
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
    )
}

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_RECORDS: dict[str, type["OpWrapper"]] = {}


class Arch(StrEnum):
    """GPU architectures that an op can be certified for."""

    SM_90 = "sm_90"
    SM_100 = "sm_100"
    SM_103 = "sm_103"
    SM_107 = "sm_107"

    @classmethod
    def of(cls, capability: tuple[int, int]) -> "Arch":
        """The architecture of a compute capability (major, minor).

        Raises:
            ValueError: one that is not listed.
        """
        major, minor = capability
        return cls(f"sm_{major}{minor}")


@dataclass(frozen=True)
class Cell:
    """One certified input configuration.

    Args:
        why: what this cell covers that no other does; also its name in tests.
        spec: what `make_inputs` needs to build it.
    """

    why: str
    spec: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.why:
            raise ValueError(f"the cell {dict(self.spec)} does not say why it is there")


@dataclass(frozen=True)
class _Bound:
    value: Any
    generation: int  # 0: bound outside of any step, so it stays


class _Steps:
    """Counts forwards, and says whether calls are being checked and whether binds are to stay."""

    generation = 0
    validating = False
    binds_stay = False


def advance_step_generation() -> None:
    """Begin a step: what earlier steps have bound is stale from here on."""
    _Steps.generation += 1


@contextmanager
def lasting_binds() -> Iterator[None]:
    """What is bound within it stays valid, also where models of this process have run steps
    before."""
    before, _Steps.binds_stay = _Steps.binds_stay, True
    try:
        yield
    finally:
        _Steps.binds_stay = before


@contextmanager
def validating() -> Iterator[None]:
    """Within it every bound call checks its arguments (`is_valid`) and that none is a leftover of
    an earlier step."""
    before, _Steps.validating = _Steps.validating, True
    try:
        yield
    finally:
        _Steps.validating = before


class OpWrapper(ABC):
    """One operator: its record (class) and a caller with bound arguments (instance).

    The module's docstring says what each member promises.
    """

    schema: ClassVar[str]
    CELLS: ClassVar[tuple[Cell, ...]] = ()
    SOURCES: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._const: dict[str, _Bound] = {}
        self._layered: dict[int, dict[str, _Bound]] = {}

    @staticmethod
    @abstractmethod
    def raw_call(*args: Any, **kwargs: Any) -> Any: ...

    @staticmethod
    @abstractmethod
    def reference(*args: Any, **kwargs: Any) -> Any: ...

    @staticmethod
    @abstractmethod
    def fake(*args: Any, **kwargs: Any) -> Any: ...

    @staticmethod
    @abstractmethod
    def is_valid(*args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    @abstractmethod
    def make_inputs(
        cell: Cell, device: torch.device, generator: torch.Generator
    ) -> dict[str, Any]: ...

    @staticmethod
    @abstractmethod
    def bytes_moved(inputs: dict[str, Any]) -> int: ...

    @staticmethod
    def compare(out: Sequence[torch.Tensor], ref: Sequence[torch.Tensor]) -> None:
        assert_bitwise(out, ref)

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        return None

    @classmethod
    def name(cls) -> str:
        """The op's name in `torch.ops.trtllm`."""
        return cls.schema.partition("(")[0].strip()

    @classmethod
    @cache
    def arguments(cls) -> tuple[str, ...]:
        return tuple(argument.name for argument in _parsed(cls).arguments)

    @classmethod
    def written_arguments(cls) -> tuple[str, ...]:
        """The arguments that the op writes into, `Tensor(a!)`."""
        return tuple(a.name for a in _parsed(cls).arguments if a.alias_info and a.is_write)

    @classmethod
    def has_kernel(cls) -> bool:
        """Whether a compiled library has brought a CUDA implementation into this process."""
        qualified = f"{NAMESPACE}::{cls.name()}"
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA")

    @classmethod
    def run(cls, call: Callable[..., Any], inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Everything that `call` (`raw_call` or `reference`) produces: what it returns, then what
        it wrote. It works on copies, so `inputs` stay as they are."""
        written = {name: inputs[name] for name in cls.written_arguments()}
        copies = {name: value.clone() for name, value in written.items() if value is not None}
        arguments = {**inputs, **copies}
        return cls.produced(call(**arguments), arguments)

    @classmethod
    def produced(cls, returned: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """What a call with `arguments` returned, then what it wrote."""
        if returned is None:
            returned = ()
        elif isinstance(returned, torch.Tensor):
            returned = (returned,)
        written = (arguments[name] for name in cls.written_arguments())
        return (*returned, *(value for value in written if value is not None))

    def bind_const(self, **values: Any) -> None:
        """Fix arguments for all layers; later calls add or replace.

        Raises:
            ValueError: a name that is no argument of the op.
        """
        self._const.update(self._bound(values))

    def bind_layered(self, layer: int, /, **values: Any) -> None:
        """Fix arguments of one layer, which the call picks with `layer=`; they win over constants.

        Raises:
            ValueError: a name that is no argument of the op.
        """
        bound = self._bound(values)
        self._layered.setdefault(layer, {}).update(bound)

    def __call__(self, *args: Any, layer: int | None = None, **kwargs: Any) -> Any:
        """Run the op with the bound arguments and these, which win.

        Raises:
            ValueError: a layer that nothing was bound for.
            RuntimeError: a stale argument, only under `validating()`.
        """
        bound = {**self._const, **self._row(layer)}
        merged = {**{name: value.value for name, value in bound.items()}, **kwargs}
        if _Steps.validating:
            self._refuse_stale({name: bound[name] for name in bound if name not in kwargs})
            self.is_valid(*args, **merged)
        return self.raw_call(*args, **merged)

    def _bound(self, values: dict[str, Any]) -> dict[str, _Bound]:
        unknown = sorted(values.keys() - set(self.arguments()))
        if unknown:
            raise ValueError(
                f"{self.name()} has no arguments {unknown}; it has {list(self.arguments())}"
            )
        generation = 0 if _Steps.binds_stay else _Steps.generation
        return {name: _Bound(value, generation) for name, value in values.items()}

    def _row(self, layer: int | None) -> dict[str, _Bound]:
        if layer is None:
            return {}
        if layer not in self._layered:
            raise ValueError(
                f"{self.name()}: nothing is bound for layer {layer}, only for layers "
                f"{sorted(self._layered)}"
            )
        return self._layered[layer]

    def _refuse_stale(self, bound: dict[str, _Bound]) -> None:
        for name, value in bound.items():
            if value.generation not in (0, _Steps.generation):
                raise RuntimeError(
                    f"{self.name()}: {name!r} is a previous step's (bound in step "
                    f"{value.generation}, this is step {_Steps.generation}); bind it in every step"
                )


Record = TypeVar("Record", bound=type[OpWrapper])


def define_op(record: Record) -> Record:
    """Make `torch.ops.trtllm.<op>` from a record, and list it for `all_ops`.

    The CPU runs the reference, fake tensors `fake`, CUDA the kernel of a compiled library. On CUDA
    without one a call is a RuntimeError, unless TRTLLM_MODELING_V2_REFERENCE_OPS=1 lets the
    reference stand in.

    Raises:
        TypeError: an incomplete record.
    """
    _check_record(record)
    name = record.name()
    _LIBRARY.define(record.schema)
    _LIBRARY.impl(name, record.reference, "CPU")
    # A device's own kernel wins over this key, whenever its library is loaded.
    _LIBRARY.impl(name, _stand_in(record), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", record.fake, lib=_LIBRARY)
    _RECORDS[name] = record
    return record


def all_ops() -> dict[str, type[OpWrapper]]:
    """Every record of this package by op name, sorted: the shared catalog and all targets' ops."""
    root = Path(__file__).parents[1]
    files = [*root.glob("catalog/**/*.py"), *root.glob("models/*/*/ops/**/*.py")]
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if parts[-1] != "__init__":
            importlib.import_module(".".join((PACKAGE, *parts)))
    ours = (name for name, op in _RECORDS.items() if op.__module__.startswith(f"{PACKAGE}."))
    return {name: _RECORDS[name] for name in sorted(ours)}


@contextmanager
def true_fp32_matmul() -> Iterator[None]:
    """fp32 matrix products in fp32 on every device: no TF32 and no bf16 passes within it."""
    backends: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    )
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def assert_bitwise(out: Sequence[torch.Tensor], ref: Sequence[torch.Tensor]) -> None:
    """Equal dtypes, shapes and bits, tensor by tensor; NaNs with equal bits are equal.

    Raises:
        AssertionError: the first tensor that differs, with the number of differing bytes.
    """
    assert len(out) == len(ref), f"{len(out)} tensors instead of {len(ref)}"
    for i, (a, b) in enumerate(zip(out, ref, strict=True)):
        assert a.dtype == b.dtype, f"tensor {i}: dtype {a.dtype} instead of {b.dtype}"
        assert a.shape == b.shape, f"tensor {i}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        bits_a, bits_b = as_bytes(a), as_bytes(b)
        differing = int((bits_a != bits_b).sum())
        assert not differing, f"tensor {i}: {differing} of {bits_a.numel()} bytes differ"


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: a copy of the tensor's memory in the order of its elements."""
    # clone and not contiguous(), which may keep a stride that a view as bytes cannot have.
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_within_ulp(
    out: torch.Tensor,
    ref: torch.Tensor,
    element_ulp: float,
    rms_ulp: float,
    ulp: float | None = None,
) -> None:
    """Two gates: each element against its row's largest magnitude, and the rms of all errors.

    |out - ref| <= element_ulp * ulp * max|ref of the row|, rms(out - ref) <= rms_ulp * ulp *
    rms(ref).

    Args:
        out: any shape; rows are along the last dimension.
        ref: out's shape, any floating dtype; better precision than out's is welcome.
        ulp: the unit; None takes `ULP` of out's dtype.

    Raises:
        AssertionError: a gate that does not hold (NaN never does), with both numbers.
    """
    assert out.shape == ref.shape, f"shape {tuple(out.shape)} instead of {tuple(ref.shape)}"
    unit = ULP[out.dtype] if ulp is None else ulp
    out64, ref64 = out.double(), ref.double()
    error = (out64 - ref64).abs()
    bound = element_ulp * unit * ref64.abs().amax(-1, keepdim=True)
    outside = ~(error <= bound)  # also NaN
    assert not outside.any(), (
        f"{int(outside.sum())} of {out.numel()} elements are off by more than {element_ulp} ulp "
        f"of their row's largest magnitude; worst {float(error.max()):.3e}"
    )
    rms, allowed = error.square().mean().sqrt(), rms_ulp * unit * ref64.square().mean().sqrt()
    assert rms <= allowed, f"rms of the errors is {float(rms):.3e}, allowed {float(allowed):.3e}"


@cache
def _parsed(record: type[OpWrapper]) -> Any:
    return torch._C.parse_schema(f"{NAMESPACE}::{record.schema}")


def _check_record(record: type[OpWrapper]) -> None:
    missing = sorted(record.__abstractmethods__)
    if missing or not record.CELLS or not record.__doc__:
        raise TypeError(
            f"{record.__name__} is no complete record: missing members {missing}, "
            f"{len(record.CELLS)} cells, contract docstring: {bool(record.__doc__)}"
        )
    for function in (record.raw_call, record.reference, record.fake, record.is_valid):
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != record.arguments():
            raise TypeError(
                f"{function.__qualname__} has the parameters {parameters}; the schema has "
                f"{record.arguments()}"
            )


def _stand_in(record: type[OpWrapper]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(REFERENCE_OPS_ENV) != "1":
            raise RuntimeError(
                f"{NAMESPACE}::{record.name()} has no kernel for this device in this process; "
                "build the kernels of cpp/ with CMake (docs/modeling_v2.md), or set "
                f"{REFERENCE_OPS_ENV}=1 to run its slow reference instead"
            )
        with true_fp32_matmul():
            return record.reference(*args, **kwargs)

    return stand_in
