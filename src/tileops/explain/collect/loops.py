"""Loops that tracing unrolled, and how often."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import re
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tileops.explain.collect.events import Event
from tileops.explain.collect.graphs import is_foreign
from tileops.explain.model import Line, Loop

__all__ = ["read_loops"]

_SOURCE = re.compile(r"TRACE starts_line (?P<file>.+?):(?P<number>\d+) in (?P<function>\S+)")
_Iterating: TypeAlias = ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Loop: TypeAlias = _Iterating | ast.While
_Place = tuple[int, int]
"""Line and column."""


@dataclass
class _File:
    """What was traced of one file."""

    lines: dict[str, list[int]] = field(default_factory=dict)
    """That Dynamo came to, in each function."""
    rounds: dict[_Place, Counter[int]] = field(default_factory=dict)
    """Of the loops at a place, by the offset of their heads in the bytecode."""
    functions: dict[_Place, str] = field(default_factory=dict)


def read_loops(lines: list[Event], rounds: list[Event] | None) -> list[Loop]:
    """Each round of ``for`` and of comprehensions is told, None: by nobody; how often ``while`` ran
    follows from the lines that Dynamo came to."""
    files: dict[str, _File] = {}
    for event in lines:
        if match := _SOURCE.match(event.text):
            traced = files.setdefault(match["file"], _File()).lines
            traced.setdefault(match["function"], []).append(int(match["number"]))
    for event in rounds or ():
        made, at = files.setdefault(event.data["file"], _File()), event.data["at"]
        place = (at.lineno, at.col_offset)
        made.functions[place] = event.data["function"]
        made.rounds.setdefault(place, Counter())[event.data["offset"]] += 1
    found: list[Loop] = []
    for file, made in files.items():
        for loop in [] if is_foreign(file) else _loops_of(file):
            if rounds is None or isinstance(loop, ast.While):
                found += _by_lines(file, made, loop)
            else:
                found += _by_rounds(file, made, loop)
    return found


def _loops_of(file: str) -> list[_Loop]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    loops = [node for node in ast.walk(tree) if isinstance(node, _Loop)]
    return sorted(loops, key=lambda each: (each.lineno, each.col_offset))


# ---- for, and comprehensions ---------------------------------------------------------------------


def _by_rounds(file: str, made: _File, loop: _Iterating) -> Iterator[Loop]:
    heads: list[ast.For | ast.comprehension] = []
    heads += [loop] if isinstance(loop, ast.For) else loop.generators
    at_iterable = _marks_iterable(
        "for x in y: pass" if isinstance(loop, ast.For) else "[x for x in y]"
    )
    places = [_start(each.iter if at_iterable else loop) for each in heads]
    for number, (head, place) in enumerate(zip(heads, places, strict=True)):
        counted = made.rounds.get(place, Counter())
        if places.count(place) > 1:  # a generator in another has the later head
            times = counted[dict(enumerate(sorted(counted))).get(number, -1)]
        else:
            times = counted.total()
        if times:
            function = made.functions[place]
            at = Line(file, head.target.lineno, function, _text(file, head))
            yield Loop(at, times)


def _start(node: ast.stmt | ast.expr) -> _Place:
    return node.lineno, node.col_offset


@functools.cache
def _marks_iterable(source: str) -> bool:
    """Whether this Python gives a loop's head the place of what it iterates over, or the whole loop's."""
    waiting = [compile(source, "", "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for each in dis.get_instructions(code):
            if each.opname == "FOR_ITER" and each.positions is not None:
                return bool(each.positions.col_offset)
    return False


def _text(file: str, head: ast.For | ast.comprehension) -> str:
    if isinstance(head, ast.For):
        return linecache.getline(file, head.lineno).strip()
    return f"for {ast.unparse(head.target)} in {ast.unparse(head.iter)}"


# ---- while ---------------------------------------------------------------------------------------


def _by_lines(file: str, made: _File, loop: _Loop) -> Iterator[Loop]:
    for function, lines in made.lines.items():
        times = _times(loop, lines) if isinstance(loop, ast.While) else None
        if loop.lineno in lines and times != 0:
            text = linecache.getline(file, loop.lineno).strip()
            yield Loop(Line(file, loop.lineno, function, text), times)
            return


def _times(loop: ast.While, lines: list[int]) -> int | None:
    """How often the body's first statement began; unknown where it shares a line with the loop's head.

    A statement of several lines comes to its first one again; it begins where the head was before.
    """
    first = loop.body[0]
    last = first.end_lineno or first.lineno
    if first.lineno == loop.lineno:
        return None
    if first.lineno == last:
        return lines.count(first.lineno)
    head = range(loop.lineno, first.lineno)
    steps = itertools.pairwise(lines)
    return sum(old in head and first.lineno <= new <= last for old, new in steps)
