"""Graph breaks, and what was inlined."""

from __future__ import annotations

import linecache
import re
from collections import Counter

from tileops.explain.collect.events import Event
from tileops.explain.collect.graphs import is_foreign
from tileops.explain.model import Break, Graph, Inlined, Line

_STACK_LINE = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<number>\d+), in (?P<function>.+)$')
_AT = re.compile(r"Graph break in user code at (?P<file>.+?):(?P<number>\d+)\n")
_CALL = re.compile(
    r"TRACE inlined call (?P<what>\S+) from (?P<file>.+?):(?P<number>\d+) in (?P<function>\S+)"
)

# Which words of torch's reason tell the kind: the first that fits.
_KINDS = {
    "print": r"builtin `?print|builtin operator `print`|logging (function|method)|logging\.Logger method",
    "shape": r"Dynamic shape operator|DynamicOutputShape|output shape depends on",
    "item": r"\.item\(\)|\.tolist\(\)|[Dd]ata[- ]dependent (?!branch|jump|control)|DataDependentOutput",
    "branch": r"[Dd]ata-dependent (branching|jump|control)|generic_jump",
    "asked": r"graph_break\(\)|User-inserted graph break",
    "raise": r"Observed exception",
    "backward": r"Tensor\.backward\(\)|requires_grad_\(\) intermediate|autograd\.grad",
    "generator": r"generator|yield",
    "skipped": r"(?s)\A(?!.*trace the builtin)"
    r".*(marked as skipped|skip(ped)? function|in skipfiles|(compiler|dynamo)\.disable)",
    "builtin": r"builtin|[Uu]nsupported|C(/C\+\+)? (function|extension)",
}
_ABANDONED = "Failed to handle graph break gracefully"
"""Torch found no place to go on from, and gives the function up."""
_ADVICE = {
    "print": """Print outside the compiled function, or let torch do it after the graph:
        torch._dynamo.config.reorderable_logging_functions.add(print).""",
    "item": """Keep the value a tensor: use torch.where, or index with a 0-dim tensor. Where Python
        needs the number, set torch._dynamo.config.capture_scalar_outputs = True, or read it outside.""",
    "branch": """Choose by value without leaving the graph: torch.where for elements, torch.cond for
        work.""",
    "shape": """Keep the shape: torch.where or a mask in the place of selected elements. Or let the graph
        hold unknown sizes: torch._dynamo.config.capture_dynamic_output_shape_ops = True.""",
    "asked": "Somebody wrote torch._dynamo.graph_break() here: remove it where it is no longer needed.",
    "raise": """Check before the compiled function, or by torch._check, which stays in the graph.""",
    "backward": """Compile the forward and call backward outside: its graph is compiled with it.""",
    "generator": "Build a list in a plain loop, or pass a list instead of a generator.",
    "skipped": """Remove torch.compiler.disable where it is yours; else call the function before or
        after the compiled part, or wrap it as an operator with torch.library.""",
    "builtin": """Use a torch function in its place, call it outside the compiled function, or wrap
        it as an operator with torch.library.""",
    "other": """Read torch's hints; move what it names out of the compiled function, or write it
        with torch.""",
}


def read_break(event: Event) -> Break:
    text = event.text
    at = _AT.search(text)
    reason = re.search(
        r"Graph Break Reason: (.*?)(?:\n\s*\n(?:User code|Stack)|\Z)", text, re.DOTALL
    )
    told = (reason[1] if reason else text).strip()
    stack = _user_stack(text)
    kind = _kind(told)
    advice = " ".join(_ADVICE[kind].split())
    where = next(
        (line for line in reversed(stack) if at and line.number == int(at["number"])), None
    )
    if where is None and at:
        where = _line(at["file"], int(at["number"]), "")
    hints = [hint.strip() for hint in re.findall(r"^\s*Hint: (.+)$", told, re.MULTILINE)]
    return Break(kind, _summary(told), where, stack, advice, hints)


def _summary(told: str) -> str:
    """Torch's first sentence about the cause and its explanation; hints stand apart."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    abandoned = bool(lines) and lines[0].startswith(_ABANDONED)
    while lines and lines[0].startswith(("Encountered graph break", _ABANDONED)):
        lines = lines[1:]
    explanation = re.search(r"Explanation: (.+?)(?=\n\s*(?:Hint|Developer)|\Z)", told, re.DOTALL)
    head = lines[0] if lines else told
    rest = " ".join(explanation[1].split()) if explanation else ""
    text = f"{head.rstrip('.')}. {rest}" if rest else head
    return f"The function runs without torch.compile: {text}" if abandoned else text


def _kind(told: str) -> str:
    cause = re.sub(rf"^(Encountered graph break|{_ABANDONED}).*?:\n", "", told, flags=re.DOTALL)
    cause = re.sub(r"^\s*Hint: .*$", "", cause, flags=re.MULTILINE)
    return next((kind for kind, words in _KINDS.items() if re.search(words, cause)), "other")


def _user_stack(text: str) -> list[Line]:
    part = text.split("User code traceback:", 1)[-1].split("\nTraceback (most recent", 1)[0]
    lines = part.splitlines()
    stack = []
    for number, line in enumerate(lines):
        if match := _STACK_LINE.match(line):
            below = lines[number + 1].strip() if number + 1 < len(lines) else ""
            code = "" if below.startswith("File ") else below
            stack.append(Line(match["file"], int(match["number"]), match["function"], code))
    return [line for line in stack if not is_foreign(line.file)]


def _line(file: str, number: int, function: str) -> Line:
    return Line(file, number, function, linecache.getline(file, number).strip())


def read_inlined(events: list[Event]) -> list[Inlined]:
    """Calls in the user's files; those that torch's own modules make among themselves are left out,
    and comprehensions, which are functions to some Pythons: they are loops."""
    counts: Counter[tuple[str, str, int, str]] = Counter()
    for event in events:
        match = _CALL.match(event.text)
        comprehension = match and match["what"].startswith("<") and match["what"] != "<lambda>"
        if match and not comprehension and not is_foreign(match["file"]):
            counts[match["what"], match["file"], int(match["number"]), match["function"]] += 1
    return [
        Inlined(what, _line(file, number, function), times)
        for (what, file, number, function), times in counts.items()
    ]


def crossing(capture: Graph) -> list[str]:
    """Names of the values that a graph hands to Python."""
    return (
        capture.nodes[-1].inputs if capture.nodes and capture.nodes[-1].opcode == "output" else []
    )
