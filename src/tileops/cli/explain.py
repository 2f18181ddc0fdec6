"""``tileops explain``: what torch.compile did with a function of a script."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.explain.model import Report

__all__ = ["add_command"]

_ABOUT = """\
Compile a function or module of a script, call it once, and show each stage of torch.compile.
Exit status: 0; 1 where the report has what --fail-on names; 2 where the request is no good, the call
raises or nothing was compiled."""
_CONDITIONS = ("break", "recompile", "unfused")
_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i8": "int8",
    "u8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64", "b8": "bool", "bool": "bool",
}  # fmt: skip


class _RequestError(ValueError):
    """What the command line asks for does not exist."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", help="show what torch.compile did with a function", description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "target",
        metavar="FILE:NAME",
        help="a function or module of a script, or a part of one: model.py:net.encoder",
    )
    parser.add_argument(
        "--input", metavar="SPEC", action="append", default=[],
        help='an argument, such as "2048x4096:f16:cuda"; may be repeated; f32 and cpu without',
    )  # fmt: skip
    parser.add_argument(
        "--then", metavar="SPECS", action="append", default=[],
        help="inputs of a further call, separated by commas; may be repeated",
    )  # fmt: skip
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--mode", help="torch.compile's mode")
    parser.add_argument("--dynamic", action=argparse.BooleanOptionalAction)
    parser.add_argument(
        "--training", action=argparse.BooleanOptionalAction,
        help="run backward too: inputs require grad; --no-training: without gradients",
    )  # fmt: skip
    parser.add_argument(
        "--fail-on", metavar="WHAT", type=_conditions, default=(),
        help=f"exit with 1 where there is any of these, separated by commas: {','.join(_CONDITIONS)}; "
        "unfused: a value goes through memory from one generated kernel to another",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one self-contained page")
    parser.add_argument(
        "--measure", action="store_true",
        help="call it some times more, for time of kernels, gaps and synchronisations",
    )  # fmt: skip
    parser.add_argument(
        "--show", metavar="STAGES", type=_stages, default=(),
        help="the summary and only these stages: capture,breaks,guards,dispatch,aten,inductor,run,ops",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the data; - prints it")
    parser.set_defaults(run=_explain)


def _conditions(text: str) -> tuple[str, ...]:
    return _names(text, _CONDITIONS)


def _stages(text: str) -> tuple[str, ...]:
    from tileops.explain.views.terminal import STAGES

    return _names(text, STAGES)


def _names(text: str, accepted: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in accepted]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; accepted are {', '.join(accepted)}")
    return names


def _explain(options: argparse.Namespace) -> int:
    from tileops.explain.model import Report
    from tileops.explain.session import explain_into

    report = Report()
    raised = None
    # What the script prints is no JSON.
    prints_json = options.json is not None and str(options.json) == "-"
    with contextlib.redirect_stdout(sys.stderr if prints_json else sys.stdout):
        try:
            _check(options)
            target = _load(options.target)
            given = [("--input", options.input), *(("--then", t.split(",")) for t in options.then)]
            inputs, *then = (
                tuple(_tensor(name, spec, training=bool(options.training)) for spec in specs)
                for name, specs in given
            )
        except _RequestError as error:
            print(f"tileops explain: {error}", file=sys.stderr)
            return 2
        try:
            explain_into(
                report, target, inputs, {}, backend=options.backend, mode=options.mode,
                dynamic=options.dynamic, training=options.training, measure=options.measure, then=then,
            )  # fmt: skip
        except (Exception, SystemExit) as error:  # noqa: BLE001  (told after what was seen of the call)
            raised = error
    try:
        _write(options, report)
    except OSError as error:
        print(f"tileops explain: {error}", file=sys.stderr)
        return 2
    if raised is not None:
        _tell(raised)
        return 2
    if report.nothing:  # neither good nor bad: a check of it would pass for ever
        print(f"tileops explain: nothing was compiled: {report.nothing}", file=sys.stderr)
        return 2
    failed = [name for name in options.fail_on if _count(report, name)]
    for name in failed:
        print(f"tileops explain: --fail-on {name}: {_count(report, name)}", file=sys.stderr)
    return 1 if failed else 0


def _write(options: argparse.Namespace, report: Report) -> None:
    if options.html:
        report.to_html(options.html)
    printed = options.json is not None and str(options.json) == "-"
    if options.json and not printed:
        options.json.write_text(report.to_json(indent=1), encoding="utf-8")
    try:
        if printed:
            print(report.to_json(indent=1))
        else:
            report.show(*options.show)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough, and the status still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check(options: argparse.Namespace) -> None:
    """What would fail at the end, before the script runs."""
    import torch

    for name, path in (("--html", options.html), ("--json", options.json)):
        if path and path.is_dir():
            raise _RequestError(f"{name} {str(path)!r}: this is a folder; accepted is a file")
        if path and str(path) != "-" and not path.parent.is_dir():
            raise _RequestError(f"{name} {str(path)!r}: there is no folder {str(path.parent)!r}")
    if options.backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise _RequestError(f"--backend {options.backend!r}; accepted are {known}")
    modes = list(torch._inductor.list_mode_options())
    if options.mode is not None and options.mode not in modes:
        raise _RequestError(f"--mode {options.mode!r}; accepted are {', '.join(modes)}")


def _tell(error: BaseException) -> None:
    """The user's part of a traceback, and the error."""
    from tileops.explain.torch_private import is_torch_file

    foreign = (str(Path(__file__).parents[1]), "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if not f.filename.startswith(foreign) and not is_torch_file(f.filename)
    ]
    sys.stderr.writelines(traceback.format_list(own))
    print(f"tileops explain: raised {''.join(traceback.format_exception_only(error)).strip()}",
          file=sys.stderr)  # fmt: skip


def _count(report: Report, condition: str) -> int:
    counts = {
        "break": len(report.breaks),
        "recompile": len(report.recompiles),
        "unfused": len(report.unfused),
    }
    return counts[condition]


def _load(text: str) -> Callable[..., Any]:
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise _RequestError(f"{text!r}: accepted is FILE:NAME, with a file that exists")
    taken = getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path)
    module_name = (
        f"script_{path.stem}" if taken or path.stem in sys.builtin_module_names else path.stem
    )
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise _RequestError(f"{file!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script that is run
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's)
        _tell(error)
        raise _RequestError(f"{file} cannot be run") from None
    found: Any = module
    for part in name.split("."):  # a part of a model, or a method, too
        found = getattr(found, part, None)
    if isinstance(found, type):
        raise _RequestError(f"{name!r} of {file} is a class; accepted is a function or an instance")
    if not callable(found):
        known = sorted(
            n for n, v in vars(module).items()
            if callable(v) and not isinstance(v, type) and not n.startswith("_")
        )  # fmt: skip
        raise _RequestError(f"{file} has no callable {name!r}; it has {', '.join(known)}")
    return found


def _tensor(option: str, spec: str, *, training: bool) -> Any:
    """A tensor of ``2048x4096:f16:cuda``: random, or zeros for integers, which may be indices."""
    import torch

    shape, _, rest = spec.partition(":")
    dtype_name, _, device = rest.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*|scalar", shape):
        raise _RequestError(
            f"{option} {spec!r}: shape {shape!r}; accepted is such as 2048x4096, or scalar"
        )
    if dtype_name and dtype_name not in _DTYPES:
        raise _RequestError(
            f"{option} {spec!r}: dtype {dtype_name!r}; accepted are {', '.join(_DTYPES)}"
        )
    sizes = [] if shape == "scalar" else [int(part) for part in shape.split("x")]
    dtype: torch.dtype = getattr(torch, _DTYPES[dtype_name or "f32"])
    try:
        made = torch.zeros(sizes, dtype=dtype, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:
        raise _RequestError(f"{option} {spec!r}: {error}") from None
    if dtype.is_floating_point:
        generator = torch.Generator().manual_seed(0)
        made.copy_(torch.randn(sizes, generator=generator))
        made.requires_grad_(training)
    return made
