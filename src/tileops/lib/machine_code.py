"""From a :class:`TritonBuild` to machine code: out of the cache where it is there, else compiled.

The key holds all that decides the code and nothing else, and is found without importing Triton or the
device function. Kernels that the cache cannot name (defined in no file, or with constants that have no
literal form) and those that only Triton can launch are left to Triton's own cache, which also keeps the
intermediate forms of all others.
"""

from __future__ import annotations

import importlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tileops.engine import record
from tileops.engine.cache.entry import FORMAT, Stored
from tileops.engine.cache.shelves import Found, shelves
from tileops.engine.cache.sources import UnknownSourceError, digest_of, still
from tileops.engine.cache.versions import compiler_settings, triton_version
from tileops.engine.settings import settings
from tileops.lib.driver import Binary

if TYPE_CHECKING:
    from tileops.lib.launch import TritonBuild

__all__ = ["Code", "DeviceFunction", "check_card", "code_for", "key_of", "resources"]


@dataclass(frozen=True)
class DeviceFunction:
    """A ``@triton.jit`` function as a compile-time argument of another, as ``package.module:name``."""

    fn: str

    @property
    def function(self) -> Any:
        """The function itself; imports Triton."""
        module, _, name = self.fn.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Code:
    """The machine code of one build for one architecture."""

    binary: Binary | None
    """None for a kernel that only Triton can launch."""
    compiled: Any
    """Triton's ``CompiledKernel``, where this process made one."""
    key: str | None
    """Its name in the cache; None for what the cache cannot name."""
    origin: str
    """``bundle``, ``disk`` or ``made``."""
    seconds: float
    registers: int = 0
    """Of a thread."""
    stack: int = 0
    """Bytes of local memory of a thread: 0 unless registers are spilled or indexed."""

    def portable(self) -> Code:
        """Itself without what cannot leave the process."""
        return replace(self, compiled=None)


# ---- keys ----------------------------------------------------------------------------------------


def literal(value: Any) -> str:
    """Text that equal values have in common and others do not. Raises ``UnknownSourceError``."""
    if value is None or isinstance(value, bool | int | str | bytes | float):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(literal, value))})"
    if isinstance(value, DeviceFunction):
        return f"function:{value.fn}:{digest_of(value.fn)}"
    raise UnknownSourceError(f"a constant of type {type(value).__name__} has no literal form")


def _arch_name(arch: tuple[int, int]) -> str:
    return f"sm_{arch[0]}{arch[1]}"


def _compiler() -> str | None:
    here = triton_version()
    if here is None and shelves().bundles:  # without a compiler the bundle's word holds
        return str(shelves().bundles[-1].manifest["triton"])
    return here


def key_of(build: TritonBuild, arch: tuple[int, int]) -> str:
    """The name of a build in the cache. Raises ``UnknownSourceError`` where it has none."""
    options = (("num_warps", build.num_warps), ("num_stages", build.num_stages), *build.options)
    parts = (
        ("format", FORMAT),
        ("triton", _compiler()),
        ("environment", compiler_settings()),
        ("arch", _arch_name(arch)),
        ("function", build.fn.rpartition(":")[2]),
        ("source", digest_of(build.fn)),
        ("signature", build.signature),
        ("constants", tuple(sorted(build.constexprs))),
        ("options", tuple(sorted(options))),
        ("aligned", tuple(sorted(build.aligned))),
    )
    return sha256(literal(parts).encode()).hexdigest()


# ---- code ----------------------------------------------------------------------------------------


def code_for(build: TritonBuild, arch: tuple[int, int], compile: bool = True) -> Code | None:
    """The machine code of ``build`` for compute capability ``arch``; needs no GPU.

    None where it is not in the cache and ``compile`` is false.
    """
    begin = time.perf_counter()
    compiled: Any = None
    made: Stored | None = None

    def make() -> Stored | None:
        nonlocal compiled, made
        compiled = build.compile_for(arch)
        binary = _binary(compiled)
        record.emit("compiled", kernel=build.fn, arch=_arch_name(arch), key=key,
                    seconds=time.perf_counter() - begin)  # fmt: skip
        if binary is None:
            return None
        made = _stored(binary, build, key or "")
        # An editor may have been at work between reading the text and importing it.
        return made if key is not None and all(map(still, build.functions)) else None

    key: str | None = None
    if not settings().compiler_forced:
        try:
            key = key_of(build, arch)
        except UnknownSourceError as unknown:
            record.emit("unkeyed", kernel=build.fn, reason=str(unknown))
    stored: Stored | None
    found = None if key is None else _found(build, arch, key)
    if found is not None:
        stored, origin = found.stored, found.origin
    elif not compile:
        return None
    elif key is None:
        make()
        stored, origin = made, "made"
    else:
        kept, origin = shelves().obtain("kernel", key, make)
        stored = kept or made
    seconds = time.perf_counter() - begin
    if stored is None:
        return Code(None, compiled, key, origin, seconds)
    if origin != "made":
        record.emit("loaded", kernel=build.fn, arch=_arch_name(arch), key=key, origin=origin)
    facts = stored.facts
    binary = Binary(
        code=stored.payload,
        name=facts["name"],
        arch=arch,
        warps=facts["warps"],
        shared=facts["shared"],
        dependent=facts["dependent"],
        cooperative=facts["cooperative"],
    )
    return Code(binary, compiled, key, origin, seconds, facts["registers"], facts["stack"])


def check_card(arch: tuple[int, int]) -> None:
    """Raises ``BundleError`` where the bundles of this process are for other cards than this."""
    shelves().check_arch(_arch_name(arch))


def _found(build: TritonBuild, arch: tuple[int, int], key: str) -> Found | None:
    known = shelves()
    found = known.find("kernel", key)
    if found is None:
        for bundle in known.bundles:
            bundle.missed(build.fn, digest_of(build.fn))
    return found


def _stored(binary: Binary, build: TritonBuild, key: str) -> Stored:
    registers, stack = resources(binary.code)
    facts = {
        "name": binary.name,
        "arch": _arch_name(binary.arch),
        "warps": binary.warps,
        "shared": binary.shared,
        "dependent": binary.dependent,
        "cooperative": binary.cooperative,
        "registers": registers,
        "stack": stack,
        "fn": build.fn,
        "source": digest_of(build.fn) if key else "",
        "triton": triton_version(),
        "signature": [list(pair) for pair in build.signature],
        "constants": {name: repr(value) for name, value in sorted(build.constexprs)},
    }
    return Stored("kernel", key, json.loads(json.dumps(facts)), binary.code)


def _binary(kernel: Any) -> Binary | None:
    """What the driver needs of a ``CompiledKernel``; None where it needs more than a launch gives:
    scratch memory, tensor descriptors, clusters.
    """
    meta = kernel.metadata
    described = any(str(kind).startswith("tensordesc") for kind in kernel.src.signature.values())
    if meta.global_scratch_size or meta.profile_scratch_size or meta.num_ctas != 1 or described:
        return None
    return Binary(
        code=kernel.asm["cubin"],
        name=meta.name,
        arch=divmod(meta.target.arch, 10),
        warps=meta.num_warps,
        shared=meta.shared,
        dependent=bool(meta.launch_pdl),
        cooperative=bool(meta.launch_cooperative_grid),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """``(registers, bytes of local memory)`` of one thread: the most that a function of a cubin has.

    From the attributes REGCOUNT (0x2f) and FRAME_SIZE (0x11) of its section ``.nv.info``. Zeros for
    what is no such file.
    """
    try:
        attributes = next(data for name, data in _sections(cubin) if name == ".nv.info")
    except (struct.error, StopIteration, IndexError, ValueError):
        return 0, 0
    found, at = {0x2F: 0, 0x11: 0}, 0
    while at + 4 <= len(attributes):
        form, attribute, size = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if form == 4:  # the others carry their value in place of a size
            if attribute in found and size == 8:
                found[attribute] = max(
                    found[attribute], struct.unpack_from("<I", attributes, at + 4)[0]
                )
            at += size
    return found[0x2F], found[0x11]


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + n * entry) for n in range(count)]
    for header in headers:
        begin = headers[names_at][4] + header[0]
        name = elf[begin : elf.index(b"\0", begin)].decode()
        yield name, elf[header[4] : header[4] + header[5]]
