"""``tileops cache`` and ``tileops bundle``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.engine.cache.folder import Folder
    from tileops.engine.kernel import TensorSpec
    from tileops.engine.prepare import Prepared

__all__ = ["add_commands"]

_CACHE = """\
The kernel cache: machine code and choices of tuning, kept between processes.
Exit status: 0; 1 where 'verify' finds damage or 'prune' cannot remove it; 2 where there is no
directory that is used."""
_BUNDLE = """\
Write kernels into one file that 'tileops.load_bundle' or TILEOPS_BUNDLE uses without compiling.

Without --op and --call: what the cache holds now. With them: the kernels of these calls, compiled
where the cache lacks them; no GPU is needed. An --input follows the --op or --call that it is for:

  tileops bundle -o norm.bundle --arch sm_90 \\
      --op "RMSNormFwdOp(normalized_shape=(4096,))" --input 2048x4096:f16 --input 4096:f16
  tileops bundle -o model.bundle --arch sm_90 --call model.py:forward --input 1x2048:i64

An input is SHAPE:DTYPE, NAME=SHAPE:DTYPE, or - for one that is omitted; a scalar has the shape ''.
Exit status: 0; 1 where something cannot be compiled or written; 2 where an argument is wrong."""
_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}  # fmt: skip


def add_commands(commands: Any) -> None:
    """Add both to the parser's commands."""
    raw = argparse.RawDescriptionHelpFormatter
    cache = commands.add_parser(
        "cache", help="look after kept kernels", description=_CACHE, formatter_class=raw
    )
    actions = cache.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("path", _path, "print where kernels are kept"),
        ("list", _list, "list what is kept, the most recently used first"),
        ("verify", _verify, "check every entry to the last byte"),
        ("prune", _prune, "remove damaged entries, leftovers, and what exceeds the limit"),
        ("clear", _clear, "remove every entry"),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("--json", action="store_true", help="print a JSON object")
        if name == "prune":
            action.add_argument(
                "--limit", metavar="SIZE", help="bytes, or such as 500 MB (TILEOPS_CACHE_LIMIT)"
            )
        action.set_defaults(run=run)

    bundle = commands.add_parser(
        "bundle",
        help="write kernels into one file",
        description=_BUNDLE,
        formatter_class=raw,
    )
    bundle.add_argument("-o", "--output", metavar="FILE", type=Path, required=True)
    bundle.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        default=[],
        help="sm_90, or sm_90:114 for a card of 114 multiprocessors; may be repeated",
    )
    bundle.add_argument("--op", metavar="OP", dest="calls", action=_Call, help="an op, as its repr")
    bundle.add_argument(
        "--call", metavar="FILE:NAME", dest="calls", action=_Call, help="a function or a module"
    )
    bundle.add_argument("--input", metavar="INPUT", dest="calls", action=_Input, help="of the last")
    bundle.add_argument("--jobs", metavar="N", type=int, help="processes that compile")
    bundle.add_argument("--json", action="store_true", help="print the manifest")
    bundle.set_defaults(run=_bundle, calls=[])


class _Call(argparse.Action):
    def __call__(self, parser: Any, space: Any, value: Any, option: Any = None) -> None:
        space.calls = [*space.calls, (option, value, [])]


class _Input(argparse.Action):
    def __call__(self, parser: Any, space: Any, value: Any, option: Any = None) -> None:
        if not space.calls:
            parser.error("--input: it must follow the --op or --call that it is for")
        space.calls[-1][2].append(value)


# ---- tileops cache ------------------------------------------------------------------------------


def _own() -> Folder | None:
    from tileops.engine.cache.shelves import shelves

    own = shelves().own
    if own is None:
        problem = "there is no home directory; set TILEOPS_CACHE_DIR"
    elif own.path.exists() and not own.path.is_dir():
        problem = f"{own.path} is no directory; set TILEOPS_CACHE_DIR to one"
    elif own.refused():  # which says why
        problem = f"{own.path} is not used"
    else:
        return own
    print(f"tileops cache: {problem}", file=sys.stderr)
    return None


def _path(options: argparse.Namespace) -> int:
    from tileops.engine.cache.shelves import shelves

    known = shelves()
    own = known.own if options.json else _own()
    if options.json:
        print(json.dumps({
            "path": None if own is None else str(own.path),
            "limit": None if own is None else own.limit,
            "readonly": [str(folder.path) for folder in known.readonly],
            "bundles": [str(bundle.path) for bundle in known.bundles],
        }))  # fmt: skip
    elif own is not None:
        print(own.path)
    return 2 if own is None else 0


def _list(options: argparse.Namespace) -> int:
    own = _own()
    if own is None:
        return 2
    rows = own.rows()
    table: list[dict[str, Any]] = []
    for row in rows:
        stored = own.read(row.kind, row.key)
        if stored is not None:
            facts = stored.facts
            table.append({
                "key": row.key, "kind": row.kind, "bytes": row.size, "arch": facts.get("arch"),
                "name": facts.get("fn") or facts.get("op"), "used": row.used,
                "registers": facts.get("registers"), "stack": facts.get("stack"),
            })  # fmt: skip
    if options.json:
        print(json.dumps(table, indent=1))
        return 0
    for one in table:
        day = time.strftime("%Y-%m-%d", time.localtime(one["used"]))
        print(f"{one['key'][:12]}  {one['kind']:6}  {one['arch'] or '-':6}  {one['bytes']:>8}  "
              f"{day}  {one['name']}")  # fmt: skip
    print(
        f"{len(table)} entries, {_size(sum(one['bytes'] for one in table))} of {_size(own.limit)}"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    from tileops.engine.cache.shelves import shelves

    if _own() is None:
        return 2
    known = shelves()
    damaged = {
        str(folder.path / name): reason
        for folder in known.folders
        for name, reason in folder.damaged().items()
    }
    count = sum(len(folder.rows()) for folder in known.folders)
    if options.json:
        print(json.dumps({"entries": count, "damaged": damaged}, indent=1))
    else:
        for path, reason in damaged.items():
            print(f"{path}: {reason}")
        print(f"{count} entries checked, {len(damaged)} damaged")
    return 1 if damaged else 0


def _prune(options: argparse.Namespace) -> int:
    from tileops.engine.settings import parse_size

    own = _own()
    if own is None:
        return 2
    try:
        limit = None if options.limit is None else parse_size(options.limit)
    except ValueError as error:
        print(f"tileops cache prune: --limit: {error}", file=sys.stderr)
        return 2
    swept = own.prune(limit)
    if options.json:
        print(json.dumps(vars(swept), indent=1))
    else:
        print(f"removed: {len(swept.damaged)} damaged, {len(swept.abandoned)} left behind, "
              f"{len(swept.evicted)} beyond the limit")  # fmt: skip
        for name in swept.stuck:
            print(f"damaged, and could not be removed: {own.path / name}")
    return 1 if swept.stuck else 0


def _clear(options: argparse.Namespace) -> int:
    own = _own()
    if own is None:
        return 2
    count = own.clear()
    print(json.dumps({"removed": count}) if options.json else f"{count} entries removed")
    return 0


def _size(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


# ---- tileops bundle -----------------------------------------------------------------------------


class _ArgumentError(Exception):
    """An argument that means nothing."""


def _bundle(options: argparse.Namespace) -> int:
    from tileops.engine.bundling import bundle
    from tileops.engine.errors import TileopsError
    from tileops.engine.places import place_of

    try:
        devices = [f"cuda:{arch}" for arch in options.arch]
        wanted: list[str | None] = [*devices] or [None]
        prepared = [
            _prepared(call, device, options.jobs) for call in options.calls for device in wanted
        ]
        names = [place_of(device).facts.arch_name for device in devices]
        manifest = bundle(options.output, *prepared, architectures=names)
    except (_ArgumentError, ValueError) as error:
        print(f"tileops bundle: {error}", file=sys.stderr)
        return 1 if isinstance(error, TileopsError) else 2
    except TileopsError as error:
        print(f"tileops bundle: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(manifest, indent=1))
        return 0
    for one in prepared:
        print(one)
    size = options.output.stat().st_size
    print(f"{options.output}: {len(manifest['entries'])} entries for "
          f"{', '.join(manifest['architectures'])}, {_size(size)}")  # fmt: skip
    return 0


def _prepared(call: tuple[str, str, list[str]], device: str | None, jobs: int | None) -> Prepared:
    from tileops.engine.trace import prepare

    option, text, inputs = call
    subject = _op(text) if option == "--op" else _function(text)
    specs: list[Any] = []
    named: dict[str, Any] = {}
    for given in inputs:
        name, _, rest = given.rpartition("=")
        if name:
            named[name] = _input(rest)
        else:
            specs.append(_input(rest))
    return prepare(subject, *specs, device=device, jobs=jobs, **named)


def _input(text: str) -> TensorSpec | None:
    import torch

    from tileops.engine.trace import spec

    if text == "-":
        return None
    shape, colon, name = text.partition(":")
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    sizes = shape.split("x") if shape else []
    if not colon or not isinstance(dtype, torch.dtype) or not all(s.isdigit() for s in sizes):
        accepted = ", ".join(_DTYPES)
        raise _ArgumentError(
            f"--input {text!r}: accepted is SHAPE:DTYPE, as 2048x4096:f16; of {accepted}"
        )
    return spec(*map(int, sizes), dtype=dtype)


def _op(text: str) -> Any:
    from tileops.engine.manifest.catalog import families, load_family
    from tileops.engine.signature.literal import read_call

    name = text.partition("(")[0].strip()
    for family, path in families().items():
        if name in load_family(path):
            cls = getattr(importlib.import_module(f"tileops.{family}"), name)
            try:
                return cls(**read_call(text if "(" in text else f"{text}()")[1])
            except ValueError as error:
                raise _ArgumentError(f"--op {text!r}: {error}") from None
    raise _ArgumentError(f"--op {text!r}: no op is named {name!r}; see 'tileops list'")


def _function(text: str) -> Any:
    file, _, name = text.rpartition(":")
    try:
        if file.endswith(".py"):
            path = Path(file).resolve()
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(path.stem)
        else:
            module = importlib.import_module(file)
        return getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _ArgumentError(
            f"--call {text!r}: accepted is FILE.py:NAME or MODULE:NAME; {error}"
        ) from None
