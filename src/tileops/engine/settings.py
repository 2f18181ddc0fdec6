"""The only reader of the environment. Read at first use, not at import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Settings", "parse_size", "settings"]


@dataclass(frozen=True)
class Settings:
    """What the environment says; see ``docs/settings.md`` for each name."""

    default_target: str | None
    """``TILEOPS_TARGET``: the process default target until ``set_default_target`` is called."""
    validate_inputs: bool
    """``TILEOPS_VALIDATE_INPUTS=1``: check what index inputs hold; reads the device on each call."""
    cpu_kernel: str
    """``TILEOPS_CPU_KERNEL``: ``auto`` (measured rule), ``plain`` or ``inductor``."""
    plan_limit: int
    """``TILEOPS_PLAN_LIMIT``: plans kept per op key (the oldest go first)."""
    triton_interpret: bool
    """``TRITON_INTERPRET=1``: Triton's own switch to interpret kernels instead of compiling."""
    cache_dir: Path | None
    """``TILEOPS_CACHE_DIR``: where kernels are kept; None where there is no home directory."""
    cache_readonly: tuple[Path, ...]
    """``TILEOPS_CACHE_READONLY``: further directories that are read, separated as in ``PATH``."""
    cache_limit: int
    """``TILEOPS_CACHE_LIMIT``: bytes that the own directory may hold; 0 keeps nothing."""
    bundle: tuple[Path, ...]
    """``TILEOPS_BUNDLE``: bundles to use, separated as in ``PATH``."""
    tune: str
    """``TILEOPS_TUNE``: ``off``, ``on`` (time candidates, keep the choice) or ``stored`` (use kept
    choices, time nothing)."""
    jobs: int
    """``TILEOPS_JOBS``: processes in which ``prepare`` compiles; the cores of this process else."""
    compiler: tuple[tuple[str, str], ...]
    """What the environment tells Triton about the code that it makes."""
    compiler_forced: bool
    """Triton was told to compile always, or to take or leave its intermediate files."""


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{name}={text!r}: accepted are 1 and 0")


_COMPILER = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES", "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS",
    "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "TRITON_DEBUG", "TRITON_DEFAULT_FP_FUSION",
    "TRITON_DISABLE_LINE_INFO", "TRITON_ENABLE_ASAN", "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
    "TRITON_F32_DEFAULT", "TRITON_INSTRUMENTATION_MODE", "TRITON_LIBDEVICE_PATH",
    "TRITON_MOCK_PTX_VERSION", "TRITON_OVERRIDE_ARCH", "TRITON_PLUGIN_PATHS",
    "TRITON_PREFER_TMEM_16x256_LAYOUT", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH",
    "USE_IR_LOC",
)  # fmt: skip
"""Names that Triton's own cache key covers, and the tools and files that it may be pointed to."""
_FORCING = ("TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP", "TRITON_KERNEL_OVERRIDE")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``500``, ``64 MB`` or ``2 GiB``. Raises ``ValueError``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; accepted are bytes, or such as 500 MB and 2 GiB")
    power = " KMGT".index(match[2].upper()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _cache_dir() -> Path | None:
    given = os.environ.get("TILEOPS_CACHE_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # the specification says: else ignore it
        base = os.path.expanduser("~/.cache")  # noqa: PTH111  (keeps ~ where there is no home)
    return Path(base) / "tileops" if Path(base).is_absolute() else None


def _paths(name: str) -> tuple[Path, ...]:
    given = os.environ.get(name, "").split(os.pathsep)
    return tuple(Path(text).expanduser().absolute() for text in given if text)


def _count(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}={text!r}: accepted is a positive integer")
    return int(text)


def _cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _word(name: str, default: str, words: dict[str, str]) -> str:
    text = os.environ.get(name, default).strip().lower()
    if text not in words:
        accepted = ", ".join(word for word in words if word)
        raise ValueError(f"{name}={text!r}: accepted are {accepted}")
    return words[text]


def _cache_limit() -> int:
    try:
        return parse_size(os.environ.get("TILEOPS_CACHE_LIMIT") or "2 GiB")
    except ValueError as error:
        raise ValueError(f"TILEOPS_CACHE_LIMIT: {error}") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Raises ``ValueError`` naming a variable with a bad value."""
    cpu_kernels = {word: word for word in ("auto", "plain", "inductor")}
    tuning = {**dict.fromkeys(_TRUE, "on"), **dict.fromkeys(_FALSE, "off"), "stored": "stored"}
    return Settings(
        default_target=os.environ.get("TILEOPS_TARGET") or None,
        validate_inputs=_flag("TILEOPS_VALIDATE_INPUTS"),
        cpu_kernel=_word("TILEOPS_CPU_KERNEL", "auto", cpu_kernels),
        plan_limit=_count("TILEOPS_PLAN_LIMIT", 256),
        triton_interpret=_flag("TRITON_INTERPRET"),
        cache_dir=_cache_dir(),
        cache_readonly=_paths("TILEOPS_CACHE_READONLY"),
        cache_limit=_cache_limit(),
        bundle=_paths("TILEOPS_BUNDLE"),
        tune=_word("TILEOPS_TUNE", "off", tuning),
        jobs=_count("TILEOPS_JOBS", _cores()),
        compiler=tuple((name, os.environ[name]) for name in _COMPILER if os.environ.get(name)),
        compiler_forced=any(os.environ.get(name, "").lower() in _TRUE for name in _FORCING),
    )
