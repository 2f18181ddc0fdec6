"""The name of a kernel in the cache: what decides the machine code is in it, and nothing else."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tileops.engine.cache import sources, versions
from tileops.engine.cache.sources import UnknownSourceError, digest_of
from tileops.engine.manifest.catalog import families, package_root
from tileops.lib import machine_code
from tileops.lib.launch import DeviceFunction, TritonBuild
from tileops.lib.machine_code import key_of, resources

ROOT = Path(__file__).parents[2]

FILES = {
    "__init__.py": "",
    "device.py": '''
"""Device code."""
import triton
import triton.language as tl
import math
from . import shapes
from .helpers import twice, THREE as three
from .more import *

WIDTH = 4
SCALE = tl.constexpr(WIDTH * 2)
TABLE = {}
TABLE["x"] = 1
if WIDTH > 3:
    WIDE = True
else:
    WIDE = False

@triton.jit
def plain(x, N: tl.constexpr):
    tl.store(x, N)

@triton.jit
def uses(x, N: tl.constexpr = SCALE):
    """Docs."""
    value = twice(tl.load(x))  # a comment
    tl.store(x, value * three + shapes.area(N) + math.pi)

@triton.jit
def stars(x):
    tl.store(x, starred(x))

@triton.jit
def table(x):
    shapes = 3
    tl.store(x, TABLE["x"] + WIDE + shapes)

def broken(x):
    return missing(x)
''',
    "helpers.py": '''
from triton import jit
import triton.language as tl
THREE = 3
UNUSED = 1
@jit
def inner(x):
    return x + 1
@jit
def twice(x):
    """Docs of the helper."""
    return inner(x) * 2
''',
    "shapes.py": "def area(n):\n    return n * side(n)\ndef side(n):\n    return n\ndef other(n):\n    return 5\n",
    "more.py": "def starred(x):\n    return x\n",
}
FUNCTIONS = ("plain", "uses", "stars", "table")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of device code, which is read and never imported."""
    name = f"keyed_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    for file, text in FILES.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.forget()
    yield folder
    sources.forget()
    assert f"{name}.device" not in sys.modules
    assert f"{name}.helpers" not in sys.modules


def digests(folder):
    sources.forget()
    return {name: digest_of(f"{folder.name}.device:{name}") for name in FUNCTIONS}


def edit(folder, file, old, new):
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        # What makes no difference.
        ("device.py", "# a comment", "# another", ()),
        ("device.py", '"""Docs."""', '"""Other words."""', ()),
        ("device.py", '    """Docs."""\n', "", ()),
        ("device.py", "value * three + shapes.area(N)", "(value*three)+shapes.area( N )", ()),
        ("device.py", "def broken(x):\n    return missing(x)", "", ()),
        ("helpers.py", "Docs of the helper", "Yes", ()),
        ("helpers.py", "UNUSED = 1", "UNUSED = 2", ()),
        ("shapes.py", "return 5", "return 6", ()),
        # What does, for whom it does.
        ("device.py", "tl.store(x, N)", "tl.store(x, N + 1)", ("plain",)),
        ("device.py", "WIDTH = 4", "WIDTH = 5", ("uses", "table")),
        ("device.py", "WIDTH * 2", "WIDTH * 3", ("uses",)),
        ("device.py", 'TABLE["x"] = 1', 'TABLE["x"] = 2', ("table",)),
        ("device.py", "WIDE = True", "WIDE = 2", ("table",)),
        (
            "device.py",
            "@triton.jit\ndef plain",
            "@triton.jit(noinline=True)\ndef plain",
            ("plain",),
        ),
        ("device.py", "math.pi", "math.e", ("uses",)),
        ("device.py", "THREE as three", "UNUSED as three", ("uses",)),
        ("helpers.py", "return x + 1", "return x + 2", ("uses",)),
        ("helpers.py", "THREE = 3", "THREE = 4", ("uses",)),
        ("shapes.py", "return n\n", "return n + 1\n", ("uses",)),
        ("more.py", "return x", "return -x", ("stars",)),
    ],
)
def test_an_edit_rebuilds_what_uses_it_and_nothing_else(package, file, old, new, changed):
    before = digests(package)
    assert len(set(before.values())) == len(FUNCTIONS)
    edit(package, file, old, new)
    after = digests(package)
    assert {name for name in FUNCTIONS if before[name] != after[name]} == set(changed)


def test_touching_a_file_rebuilds_nothing(package):
    before = digests(package)
    for path in package.iterdir():
        os.utime(path, (1, 1))
    assert digests(package) == before


def test_an_edit_while_a_process_runs_is_noticed(package):
    """What is imported then is not what the key says, so it must not be kept under it."""
    fn = f"{package.name}.device:uses"
    before = digest_of(fn)
    assert sources.still(fn)
    edit(package, "helpers.py", "return x + 1", "return x + 2")
    assert digest_of(fn) == before
    assert not sources.still(fn)
    assert sources.still(f"{package.name}.device:plain")
    edit(package, "helpers.py", "def inner", "def renamed")
    assert not sources.still(fn)
    assert digest_of(fn) == before


def test_what_cannot_be_found_is_said(package):
    with pytest.raises(UnknownSourceError, match=r"device has no name 'missing'"):
        digest_of(f"{package.name}.device:broken")
    with pytest.raises(UnknownSourceError, match="has no name 'absent'"):
        digest_of(f"{package.name}.device:absent")
    with pytest.raises(UnknownSourceError, match="no_such_module has no source file"):
        digest_of("no_such_module:kernel")
    edit(package, "helpers.py", "THREE = 3", "THREE = = 3")
    sources.forget()
    with pytest.raises(UnknownSourceError, match="helpers"):
        digest_of(f"{package.name}.device:uses")


def test_text_is_the_same_for_every_python():
    """Fields that releases add, or leave out where empty, are not in the text."""
    (function,) = ast.parse(
        "def f(x, *, y: int = 1.5) -> None:\n    return f'{x!r:>{y}}' + x[1:]"
    ).body
    assert sources._text(function) == (
        "FunctionDef(name=str:'f',args=arguments(args=[arg(arg=str:'x',),],kwonlyargs=[arg(arg=str:'y',"
        "annotation=Name(id=str:'int',),),],kw_defaults=[Constant(value=float:1.5,),],),body=[Return("
        "value=BinOp(left=JoinedStr(values=[FormattedValue(value=Name(id=str:'x',),conversion=int:114,"
        "format_spec=JoinedStr(values=[Constant(value=str:'>',),FormattedValue(value=Name(id=str:'y',),"
        "conversion=int:-1,),],),),],),op=Add(),right=Subscript(value=Name(id=str:'x',),slice=Slice("
        "lower=Constant(value=int:1,),),),),),],returns=Constant(value=NoneType:None,),)"
    ).replace("returns=Constant(value=NoneType:None,)", "returns=Constant()")


# ---- the whole key -----------------------------------------------------------------------------------


def row_build(**constants):
    absent = ("residual", "bias", "scale", "shift", "gate", "moments", "total", "quanta", "bound")
    given = {"BLOCK": 512, "N": 500, "TILE": 1, "VECTOR": 4, "PERSISTENT": False, "POLICY": "",
             "DEPENDENT": False, "CENTRED": False, "GROUPS": 0, "SPATIAL": 1, "TOP": 0.0,
             "LEAST": 0.0, "NATIVE": False, **dict.fromkeys(absent)}  # fmt: skip
    return TritonBuild(
        "tileops.norm.kernels.rows_triton:normalize_rows",
        (("x", "*fp16"), ("weight", "*fp16"), ("y", "*fp16"), ("rows", "i64"), ("eps", "fp32")),
        tuple({**given, **constants}.items()),
        aligned=("x", "y"),
    )


def test_the_key_holds_all_that_decides_the_code(monkeypatch):
    build = row_build()
    keys = {
        key_of(build, (9, 0)),
        key_of(build, (8, 0)),
        key_of(row_build(TILE=2), (9, 0)),
        key_of(row_build(TILE=True), (9, 0)),
        key_of(row_build(TILE=1.0), (9, 0)),
        key_of(row_build(POLICY="evict_first"), (9, 0)),
        key_of(replace(build, num_warps=8), (9, 0)),
        key_of(replace(build, num_stages=2), (9, 0)),
        key_of(replace(build, options=(("maxnreg", 64),)), (9, 0)),
        key_of(replace(build, aligned=("x",)), (9, 0)),
        key_of(replace(build, fn=build.fn.replace("normalize", "stream")), (9, 0)),
        key_of(replace(build, signature=(*build.signature[:-1], ("eps", "fp64"))), (9, 0)),
    }
    monkeypatch.setattr(machine_code, "triton_version", lambda: "of another release")
    keys.add(key_of(build, (9, 0)))
    monkeypatch.setattr(machine_code, "compiler_settings", lambda: (("DISABLE_LLVM_OPT", "1"),))
    keys.add(key_of(build, (9, 0)))
    assert len(keys) == 14


def test_a_device_function_counts_by_its_text(package):
    fn = f"{package.name}.device:uses"
    build = row_build(POLICY=DeviceFunction(fn))
    assert build.functions == (build.fn, fn)
    first = key_of(build, (9, 0))
    assert key_of(row_build(POLICY=fn), (9, 0)) != first
    assert key_of(row_build(POLICY=DeviceFunction(f"{package.name}.device:plain")), (9, 0)) != first
    helpers = package / "helpers.py"
    helpers.write_text(helpers.read_text().replace("2", "3"))
    sources.forget()
    assert key_of(build, (9, 0)) != first


def test_the_order_of_constants_and_options_is_none():
    build = row_build()
    turned = replace(build, constexprs=build.constexprs[::-1], aligned=build.aligned[::-1])
    assert key_of(turned, (9, 0)) == key_of(build, (9, 0))


def test_a_constant_without_literal_form():
    with pytest.raises(UnknownSourceError, match="type object"):
        key_of(row_build(TILE=object()), (9, 0))


def test_tools_count_by_what_they_are(tmp_path, monkeypatch):
    tool = tmp_path / "ptxas"
    given = {"compiler": (("TRITON_PTXAS_PATH", str(tool)), ("DISABLE_LLVM_OPT", "1"))}
    monkeypatch.setattr(versions, "settings", lambda: type("S", (), given))
    seen = set()
    for text in ("one", "other"):
        tool.write_text(text)
        versions.compiler_settings.cache_clear()
        seen.add(versions.compiler_settings())
    versions.compiler_settings.cache_clear()
    assert len(seen) == 2


KEYS_CODE = """
import sys, json
from tests.unit.test_cache_keys import row_build
from tileops.lib.machine_code import key_of
builds = [row_build(TILE=n) for n in range(4)]
if sys.argv[1] == "turned":
    builds = builds[::-1]
keys = {str(b.constexprs): key_of(b, (9, 0)) for b in builds}
assert "triton" not in sys.modules
print(json.dumps(sorted(keys.items())))
"""


def test_keys_are_the_same_in_every_process_and_order():
    found = set()
    for order, seed in (("straight", "1"), ("turned", "2")):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        found.add(
            subprocess.run(
                [sys.executable, "-c", KEYS_CODE, order],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    (only,) = found
    assert len({key for _, key in json.loads(only)}) == 4
    assert key_of(row_build(TILE=2), (9, 0)) in only


# ---- in tree --------------------------------------------------------------------------------------------


def device_functions():
    """Every ``@triton.jit`` function in tree, as a build would name it."""
    for path in sorted(package_root().glob("*/kernels/*_triton.py")):
        module = ".".join(path.relative_to(package_root().parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                yield f"{module}:{node.name}"


def test_every_device_function_in_tree_has_a_key():
    every = list(device_functions())
    assert len(every) > 10
    assert len({digest_of(fn) for fn in every}) == len(every)


HOST_CODE = """
import importlib, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, NoTriton())
from tileops.engine.manifest.catalog import families
from tileops.engine.plan import in_tree_kernels
import tileops
count = 0
for family in families():
    package = importlib.import_module(f"tileops.{family}")
    for name in dir(package):
        cls = getattr(package, name)
        if getattr(cls, "kernel", None) is not None:
            count += len(in_tree_kernels(cls, "cuda"))
print(count)
"""


def test_no_host_module_imports_triton():
    done = subprocess.run([sys.executable, "-c", HOST_CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(families())


def test_resources_are_those_that_the_toolkit_reports():
    from tests import aot

    for build in (row_build(), row_build(BLOCK=8192, N=8000)):
        reported = aot.resources(build, (9, 0))
        cubin = build.compile_for((9, 0)).asm["cubin"]
        assert resources(cubin) == (reported.registers, reported.stack)
        assert reported.registers > 0
    assert resources(b"no machine code") == (0, 0)
    assert importlib.import_module("tileops.lib.machine_code") is machine_code
