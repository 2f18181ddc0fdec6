"""An op class against its entry: constructor, forward, decomposition, operators, kernels."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tileops.engine.boundary.naming import operator_base_name
from tileops.engine.boundary.schema import call_signature
from tileops.engine.errors import CheckError
from tileops.engine.kernel import Kernel
from tileops.engine.manifest.entry import Branch, Entry
from tileops.engine.op import Op, constructor_signature
from tileops.engine.select import load_kernel
from tileops.engine.signature.params import normalise
from tileops.engine.validate.find import Home
from tileops.engine.validate.patterns import check_pattern
from tileops.engine.validate.report import Report

__all__ = ["check_class"]

Fault = Callable[..., None]


def check_class(op_cls: Any, home: Home, report: Report) -> bool:
    """Report where the class does not do what its entry says.

    Whether its constructor does, so that an op can be made.
    """

    def fault(problem: str, method: str = "") -> None:
        line = home.methods.get(method, home.line)
        report.add(home.file, line, home.name, problem)

    if not (isinstance(op_cls, type) and issubclass(op_cls, Op)):
        fault("it is not an Op")
        return False
    before = len(report.faults)
    _constructor(op_cls, fault)
    made = len(report.faults) == before
    _forward(op_cls, home, fault)
    _decomposition(op_cls, fault)
    _operators(op_cls, fault)
    _kernels(op_cls, fault, report)
    if op_cls.entry.pattern is not None:
        check_pattern(op_cls.entry, op_cls.kernel_package, fault)
    return made


# ---- Python signatures ---------------------------------------------------------------------------


def _words(signature: inspect.Signature) -> str:
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))


def _agree(
    label: str, wanted: inspect.Signature, given: inspect.Signature, same: Callable[..., bool]
) -> list[str]:
    """Where ``given`` differs from ``wanted``: one sentence when names or their order do, else one
    for each parameter."""
    ours, theirs = list(wanted.parameters.values())[1:], list(given.parameters.values())[1:]
    if [p.name for p in ours] != [p.name for p in theirs]:
        return [f"{label} takes {_words(given)}; the entry says {_words(wanted)}"]
    problems = []
    for our, their in zip(ours, theirs, strict=True):
        if our.kind != their.kind:
            problems.append(
                f"{label}: '{our.name}' is {their.kind.description}; "
                f"the entry says {our.kind.description}"
            )
        if not same(our, their):
            problems.append(
                f"{label}: '{our.name}' {_default(their)}; the entry says it {_default(our)}"
            )
    return problems


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "is required"
    return f"defaults to {parameter.default!r}"


def _constructor(op_cls: Any, fault: Fault) -> None:
    entry: Entry = op_cls.entry
    params = {param.name: param for param in entry.params}

    def normal(parameter: inspect.Parameter) -> Any:
        if parameter.default is inspect.Parameter.empty or parameter.name not in params:
            return parameter.default
        return normalise(entry.name, params[parameter.name], parameter.default)

    def same(our: inspect.Parameter, their: inspect.Parameter) -> bool:
        try:
            one, other = normal(our), normal(their)
        except CheckError:
            return our.default is their.default
        return one is other or bool(one == other) or (one != one and other != other)

    given = inspect.signature(op_cls.__init__)
    for problem in _agree("__init__", constructor_signature(entry), given, same):
        fault(problem, "__init__")


def _same_default(our: inspect.Parameter, their: inspect.Parameter) -> bool:
    return our.default is their.default


def _forward(op_cls: Any, home: Home, fault: Fault) -> None:
    entry: Entry = op_cls.entry
    if "__call__" in home.methods:
        fault("__call__ is generated; what the class writes is not used", "__call__")
    given = inspect.signature(op_cls.__call__)
    for problem in _agree("__call__", call_signature(entry), given, _same_default):
        fault(problem)
    written = op_cls.forward is not Op.forward
    if entry.has_boundary and written:
        fault("forward never runs: an op with a boundary is served by kernels", "forward")
    elif entry.composition and not written:
        fault("forward is missing: a composition writes its own")
    elif written:
        given = inspect.signature(op_cls.forward)
        for problem in _agree("forward", call_signature(entry), given, _same_default):
            fault(problem, "forward")


def _decomposition(op_cls: Any, fault: Fault) -> None:
    entry: Entry = op_cls.entry
    function = op_cls.decomposition
    if entry.composition or (not entry.inputs and op_cls.forward is not Op.forward):
        return
    if function is None:
        fault("decomposition is missing: it is what serves any device")
        return
    given = list(inspect.signature(function).parameters.values())
    names = [p.name for p in given]
    wanted = [*(i.name for i in entry.inputs), *(p.name for p in entry.params)]
    count = len(entry.inputs)
    if names[:count] != wanted[:count] or set(names) != set(wanted):
        fault(f"decomposition takes ({', '.join(names)}); the entry says ({', '.join(wanted)})",
              "decomposition")  # fmt: skip


# ---- torch operators -----------------------------------------------------------------------------


def _operators(op_cls: Any, fault: Fault) -> None:
    entry: Entry = op_cls.entry
    branches = entry.branches if entry.inputs and not entry.composition else ()
    base = f"tileops::{operator_base_name(entry.family, entry.name)}"
    wanted = tuple(base + branch.suffix for branch in branches)
    if op_cls.compile_op_names != wanted:
        fault(f"compile_op_names is {op_cls.compile_op_names}; the entry says {wanted}")
        return
    for name, branch in zip(wanted, branches, strict=True):
        packet = getattr(torch.ops.tileops, name.removeprefix("tileops::"), None)
        if packet is None:
            fault(f"torch has no operator {name}")
            continue
        given, expected = packet.default._schema, _expected_schema(entry, branch)
        if _facts(given) != expected:
            fault(f"the schema of {name} is {given}; the entry says {_shown(*expected)}")


def _expected_schema(entry: Entry, branch: Branch) -> tuple[Any, ...]:
    """(name, type, written) of each argument, then the number of returned tensors: restated here
    from the rule, not taken from the generator."""
    arguments = []
    for item in entry.inputs:
        written = item.name in branch.writes
        kind = "Optional[Tensor]" if item.optional and not written else "Tensor"
        arguments.append((item.name, kind, written))
    if branch.out:
        arguments.append(("out", "Tensor", True))
    arguments.append(("instance_key", "str", False))
    returned = [
        output
        for output in entry.outputs
        if output.name not in branch.without
        and not (branch.out and output.buffer)
        and output.is_input not in branch.writes
    ]
    return (*arguments, ("returns", ("Tensor",) * len(returned)))


def _facts(schema: Any) -> tuple[Any, ...]:
    arguments = [
        (a.name, str(a.type), bool(a.alias_info and a.alias_info.is_write))
        for a in schema.arguments
    ]
    return (*arguments, ("returns", tuple(str(r.type) for r in schema.returns)))


def _shown(*facts: Any) -> str:
    *arguments, (_, returns) = facts
    words = [f"{kind}{' (written)' if written else ''} {name}" for name, kind, written in arguments]
    return f"({', '.join(words)}) -> {len(returns)} tensors"


# ---- kernels -------------------------------------------------------------------------------------


def _kernels(op_cls: Any, fault: Fault, report: Report) -> None:
    interface = op_cls.kernel
    if interface is None:
        return
    slots = {f.name: getattr(interface, f.name) for f in dataclasses.fields(interface)}
    for device, paths in slots.items():
        if not isinstance(paths, tuple):
            continue  # no list of kernels
        general: list[str] = []
        names: dict[str, str] = {}
        for path in paths:
            kernel = _kernel(op_cls, path, fault, report)
            if kernel is None:
                continue
            name = getattr(kernel, "name", None)
            if not isinstance(name, str) or not name:
                fault(f"kernel {path} has no name")
            elif names.setdefault(name, path) != path:
                fault(f"kernels {names[name]} and {path} have one name, {name!r}")
            if device not in kernel.devices and kernel.devices != ("*",):
                fault(f"kernel {path} stands under {device} and is for {', '.join(kernel.devices)}")
            if not kernel.serves():
                fault(f"kernel {path} defines neither entry_for nor candidates")
            if kernel.general:
                general.append(path)
        if len(general) > 1:
            fault(f"{device}: at most one kernel is general, and {' and '.join(general)} are")


def _kernel(op_cls: Any, path: str, fault: Fault, report: Report) -> type[Kernel] | None:
    """The named class, or None with the fault or note reported."""
    module, _, name = path.partition(":")
    try:
        return load_kernel(op_cls.kernel_package, path)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "triton"
        if missing and importlib.util.find_spec("triton") is None:
            report.note("triton is not installed: its kernels were looked up as text only")
            if _defines(op_cls, module, name):
                return None
            problem = f"kernels/{module}.py has no class {name}"
        else:
            problem = str(error)
    except Exception as error:  # noqa: BLE001  (whatever a module raises is its fault)
        problem = f"{type(error).__name__}: {error}"
    fault(f"kernel {path}: {problem}")
    return None


def _defines(op_cls: Any, module: str, name: str) -> bool:
    """Whether a kernel module binds ``name``, by its text."""
    file = Path(inspect.getfile(op_cls)).parent / "kernels" / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        return False
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and name in [a.asname or a.name for a in node.names]:
            return True
    return False
