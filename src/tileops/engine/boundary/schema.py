"""Schemas of operators, and the signature of a call."""

from __future__ import annotations

import inspect

from tileops.engine.manifest.entry import Branch, Entry

__all__ = ["call_signature", "returned_of", "schema_of"]


def schema_of(entry: Entry, branch: Branch) -> str:
    """Tensors in input order, written ones ``Tensor(x!)``, then ``str instance_key``."""
    letters = iter("abcdefghijklmnop")
    arguments = []
    for item in entry.inputs:
        if item.name in branch.writes:
            arguments.append(f"Tensor({next(letters)}!) {item.name}")
        else:
            arguments.append(f"Tensor{'?' if item.optional else ''} {item.name}")
    if branch.out:
        arguments.append(f"Tensor({next(letters)}!) out")
    arguments.append("str instance_key")
    count = len(returned_of(entry, branch))
    result = (
        "()" if count == 0 else "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    )
    return f"({', '.join(arguments)}) -> {result}"


def returned_of(entry: Entry, branch: Branch) -> list[int]:
    """Positions of the outputs an operator of this branch returns: what is written is not."""
    return [
        index
        for index, output in enumerate(entry.outputs)
        if not (
            output.name in branch.without
            or (branch.out and output.buffer)
            or (output.is_input is not None and output.is_input in branch.writes)
        )
    ]


def call_signature(entry: Entry) -> inspect.Signature:
    """The signature a reader of ``help(op)`` sees."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", positional)]
    for item in (*entry.positional_inputs, *(i for i in entry.inputs if i.kw_only)):
        default = None if item.optional else inspect.Parameter.empty
        kind = keyword if item.kw_only else positional
        parameters.append(inspect.Parameter(item.name, kind, default=default))
    if entry.has_out:
        parameters.append(inspect.Parameter("out", keyword, default=None))
    return inspect.Signature(parameters)
