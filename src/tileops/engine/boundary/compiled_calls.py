"""What Inductor writes for a call of an operator of ours: the op's own function, not the operator.

The operator costs a node of compiled code 4 µs more on the host, and twice that where the caches are cold:
it is looked up by its names, the dispatcher goes through its keys and back into Python, the op is found by
its key. The function asks what an eager call asks, target and plan included; it goes through the dispatcher
where that does not hold: a mode or transform, a profiler, a call that no guard knows.

Only the name of what is called differs from Inductor's own text; what it knows of the node, such as what
the node writes, stays. Graphs, exported programs and code in C++ keep the operator, and so does all code
where a release of torch lacks the table that is written to here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any

import torch

from tileops.engine.boundary.gate import QUIET_IN_CODE
from tileops.engine.manifest.entry import Branch, Entry

__all__ = ["dispatched", "give_call", "node", "node_lines", "with_operators", "write_calls"]

Make = Callable[[Callable[[], Any]], Callable[..., Any]]

_TABLE = "torch._inductor.codegen.custom_extern_kernel_codegen"
_makers: dict[str, Make] = {}


def node_lines(
    entry: Entry, branch: Branch, index: int, names: list[str], hot: list[str]
) -> list[str]:
    """Source of the function that compiled code calls for one branch, with the operator's arguments;
    ``hot`` runs a plan whose guard takes the call."""
    arguments = ", ".join([*names, *(["out"] if branch.out else []), "instance_key"])
    no_out = ["out = None"] if entry.has_out and not branch.out else []
    return [
        f"def _node_{index}(_ref):",
        f"    def node({arguments}):",
        "        nonlocal _ref",
        "        _shared = _ref()",
        "        if _shared is None:",
        "            _ref = _live(instance_key, _ref)",
        f"        elif {QUIET_IN_CODE} and _owner.generation == _generation:",
        *(f"            {line}" for line in (*no_out, *hot)),
        f"        return _dispatched_{index}({arguments})",
        "    return node",
    ]


def dispatched(name: str) -> Callable[..., Any]:
    """The operator ``tileops::<name>``, looked up at each call: its class may be defined again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.ops.tileops, name).default(*args, **kwargs)

    return call


# ---- called by compiled code ---------------------------------------------------------------------


def give_call(name: str, make: Make) -> None:
    """``make``: the generated function for ``tileops::<name>``, from a weak reference to an op's state."""
    _makers[name] = make


def node(name: str, key: str) -> Callable[..., Any]:
    """What stands in compiled code for ``tileops::<name>`` with the op of ``key``."""
    make = _makers.get(name)
    return dispatched(name) if make is None else make(_nothing)


def _nothing() -> None:
    """A reference that is dead."""


# ---- written by Inductor -------------------------------------------------------------------------

_IMPORT = f"from {__name__} import node as tileops_node"
_NAMED = "{called} = tileops_node({name!r}, {key!r})"
_NAMES = re.compile(r"^(\w+) = tileops_node\('(\w+)', ", re.MULTILINE)

WRITTEN = (_IMPORT, _NAMED)
"""What compiled code kept on disk holds of this module: in the stamp, so that other text is not found."""


def with_operators(code: str) -> str:
    """Compiled code with the operators in the place of what it calls for them."""
    for called, name in _NAMES.findall(code):
        code = code.replace(f" {called}(", f" torch.ops.tileops.{name}.default(")
    return code


def write_calls(overload: Any) -> None:
    """Let Inductor write calls of ``overload`` so, where it is loaded. Asked by the operator's fake, which
    Inductor calls before it writes."""
    table = sys.modules.get(_TABLE)
    known = getattr(table, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)
    name = f"torch.ops.{overload}"
    if table is not None and known is not None and name not in known:
        known[name] = table.CustomCodegen(python=_write)


def _write(given: Any, writeline: Callable[[Any], None]) -> None:
    from torch._inductor.codegen import wrapper
    from torch._inductor.virtualized import V

    code = V.graph.wrapper_code
    # Code in C++, and graphs for other runtimes, are subclasses.
    python = type(code) in (wrapper.PythonWrapperCodegen, wrapper.SubgraphPythonWrapperCodegen)
    writeline((_line() if python else wrapper.ExternKernelAllocLine)(code, given))


@cache
def _line() -> Any:
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine

    class Line(ExternKernelAllocLine):
        """Inductor's line of a call, with a name for what is called."""

        def codegen(self, code: Any) -> None:
            called_for: Any = self.node
            args, kwargs = called_for.unflatten_args(called_for.inputs, called_for.constant_args)
            key = kwargs.get("instance_key") or args[-1]
            name = called_for.op_overload.name().removeprefix("tileops::")
            called = f"{name}_{sha256(key.encode()).hexdigest()[:8]}"
            self.wrapper.add_import_once(_IMPORT)
            self.wrapper.add_import_once(_NAMED.format(called=called, name=name, key=key))
            operator, called_for.python_kernel_name = called_for.python_kernel_name, called
            try:
                super().codegen(code)
            finally:
                called_for.python_kernel_name = operator

    return Line
