"""The source that takes the side-effect branch of a call."""

from __future__ import annotations

from tileops.engine.boundary.schema import returned_of
from tileops.engine.manifest.entry import Branch, Entry

__all__ = ["branching"]


def branching(entry: Entry, names: list[str], called: str) -> list[str]:
    """Calling the operator of the call's branch, or its kernel, and giving what the user gets."""
    lines = []
    for index, branch in enumerate(entry.branches):
        arguments = ", ".join([*names, *(["out"] if branch.out else []), "self._instance_key"])
        take = "r = " if returned_of(entry, branch) else ""
        lines += [
            f"    if {_branch_test(entry, branch)}:",
            f"        {take}{called}_{index}({arguments})",
            f"        return {_result(entry, branch)}",
        ]
    if entry.outputs and all(output.nullable is not None for output in entry.outputs):
        given = ", ".join([*names, "out" if entry.has_out else "None"])
        lines.append(f"    _signature(self, {given})  # refuses a call that would have no effect")
    return [*lines, "    raise AssertionError('no side-effect branch holds')"]


def _branch_test(entry: Entry, branch: Branch) -> str:
    """The condition under which a call takes ``branch``, over ``self`` and presence."""

    def rename(name: str) -> str:
        return f"self.{name}"

    tests = []
    for item in entry.inputs:
        if item.mutated is not None and item.mutated.text != "True":
            text = item.mutated.source(rename, lambda name: f"({name} is not None)")
            tests.append(f"({text})" if item.name in branch.writes else f"not ({text})")
    for output in entry.outputs:
        if output.nullable is not None:
            text = output.nullable.source(rename, lambda name: f"({name} is not None)")
            tests.append(f"({text})" if output.name in branch.without else f"not ({text})")
    if entry.has_out:
        tests.append(f"out is {'not ' if branch.out else ''}None")
    return " and ".join(dict.fromkeys(tests)) or "True"


def _result(entry: Entry, branch: Branch) -> str:
    """What a call of this branch gives its user, from the operator's result ``r``."""
    returned = returned_of(entry, branch)
    values = []
    for index, output in enumerate(entry.outputs):
        if index in returned:
            values.append("r" if len(returned) == 1 else f"r[{returned.index(index)}]")
        elif output.name in branch.without:
            values.append("None")
        else:
            values.append("out" if output.buffer else str(output.is_input))
    if not values:
        return "None"
    return values[0] if len(values) == 1 else f"({', '.join(values)})"
