"""The only door to what torch keeps private (2.11 to 2.14); each adapter has its test.

An adapter that a release does not serve returns None, and the report says "unknown" and why. What
keeps a run from changing anything has no such way out: without it nothing is explained.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

__all__ = [
    "CUDAGRAPHS", "FUSION", "POST_FUSION", "TRACE", "TRACE_CALL", "TRACE_SOURCE", "Profile", "Span",
    "compile_place", "compiled_times", "computed_table", "differentiated", "differentiated_so_far",
    "generated_names", "global_state", "is_torch_file", "key_set", "launched_with", "library", "limit",
    "memory_gbps", "node_stacks", "on_autotune", "on_round", "plain_of", "profiled", "recompiled_frame",
    "redispatch", "span", "switched_off", "tapped", "untouched", "written_arguments",
]  # fmt: skip

TRACE = "torch.__trace"
"""The structured trace: what torch tells its own tools about each stage."""
TRACE_SOURCE = "torch._dynamo.symbolic_convert.__trace_source"
TRACE_CALL = "torch._dynamo.symbolic_convert.__trace_call"
FUSION = "torch._inductor.scheduler.__fusion"
POST_FUSION = "torch._inductor.debug.__ir_post_fusion"
CUDAGRAPHS = "torch._inductor.cudagraph_utils.__cudagraphs"


missing: dict[str, str] = {}
"""What adapters are for that this torch does not serve → what it lacks."""


def _adapter(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """None where torch lacks something that the adapter names; :data:`missing` says so."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except (AttributeError, ImportError) as error:
            purpose = (function.__doc__ or function.__name__).split(".", 1)[0].split("\n\n")[0]
            missing[" ".join(purpose.split())] = f"torch {torch.__version__}: {error}"
            return None

    return call


class _Tap(logging.Handler):
    """Takes every record of a logger, and passes on those that would have been seen without it."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.DEBUG)
        self.logger = logger
        self.takers: list[Callable[[logging.LogRecord], None]] = []
        self.before = (logger.level, logger.propagate, list(logger.handlers))
        self.visible = logger.getEffectiveLevel()
        logger.handlers[:] = [self]
        logger.propagate = False
        logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        for take in list(self.takers):
            try:
                take(record)
            except Exception:  # noqa: BLE001  (a tap must never end the compilation it watches)
                self.handleError(record)
        _, propagate, handlers = self.before
        if record.levelno < self.visible:
            return
        for handler in handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        if propagate and self.logger.parent is not None:
            self.logger.parent.callHandlers(record)

    def end(self) -> None:
        """The logger as it was, and what others have added; as it is, where somebody reset it."""
        if self not in self.logger.handlers:
            return
        level, propagate, handlers = self.before
        added = [each for each in self.logger.handlers if each is not self]
        self.logger.handlers[:] = handlers + added
        self.logger.propagate = propagate
        self.logger.setLevel(level)


_taps: dict[str, _Tap] = {}
_taps_lock = threading.Lock()


@contextlib.contextmanager
def tapped(names: dict[str, Callable[[logging.LogRecord], None]]) -> Iterator[None]:
    """Listen to these loggers; afterwards they are as before, and others saw what they would have.

    Sessions of several threads overlap in any order, so they share one tap of each logger.
    """
    with _taps_lock:
        for name, take in names.items():
            tap = _taps.get(name)
            if tap is None or tap not in tap.logger.handlers:
                tap = _taps[name] = _Tap(logging.getLogger(name))
            tap.takers.append(take)
    try:
        yield
    finally:
        with _taps_lock:
            for name, take in names.items():
                tap = _taps.get(name)
                if tap is not None:
                    tap.takers[:] = [each for each in tap.takers if each is not take]
                    if not tap.takers:
                        _taps.pop(name).end()


@_adapter
def compile_place() -> tuple[str, int] | None:
    """Id and attempt of the compilation that this thread is in."""
    place = torch._guards.CompileContext.current_trace_id()
    return None if place is None else (str(place.compile_id), place.attempt)


@_adapter
def recompiled_frame() -> tuple[dict[str, Any], dict[str, Any], types.CodeType] | None:
    """Locals, globals and code of the user's call that a guard has just refused. Not its frame: that
    is torch's own object, and gone after the check."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "get_and_maybe_log_recompilation_reasons":
            user = frame.f_locals.get("frame")
            return None if user is None else (user.f_locals, user.f_globals, user.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    return None


@_adapter
def global_state(name: str) -> bool | torch.dtype | None:
    """What a thread's state is now, by the name that torch's guard gives it."""
    if name == "grad_mode":
        return torch.is_grad_enabled()
    if name == "default_dtype":
        return torch.get_default_dtype()
    if autocast := re.fullmatch(r"autocast\((\w+)\)_enabled", name):
        return torch.is_autocast_enabled(autocast[1])
    return None


@_adapter
def node_stacks() -> list[dict[str, str]]:
    """For each graph at hand where torch has just printed one: the user's stack of each node.

    The printed graph has the innermost line only, which in a module of torch's own is torch's.
    """
    frame = sys._getframe(1)
    for _ in range(16):  # the frames of logging, and some of torch
        graphs = [v for v in frame.f_locals.values() if isinstance(v, torch.fx.GraphModule)]
        if graphs or frame.f_back is None:
            break
        frame = frame.f_back
    return [
        {node.name: node.stack_trace for node in graph.graph.nodes if node.stack_trace}
        for graph in graphs
    ]


@_adapter
def on_autotune(take: Callable[[str, dict[str, float]], None]) -> Callable[[], None] | None:
    """Call ``take`` with each choice that Inductor times: what for, and milliseconds by candidate.
    Gives what ends it. Inductor must be loaded: a session costs nothing where it is not used."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    cache = get_algorithm_selector_cache()

    def saver(timings: dict[Any, float], name: str, *_: Any) -> None:
        take(name, {getattr(choice, "name", str(choice)): time for choice, time in timings.items()})

    cache.add_feedback_saver(saver)

    def end() -> None:
        cache.feedback_saver_fns[:] = [fn for fn in cache.feedback_saver_fns if fn is not saver]

    return end


_rounds: list[Callable[[types.CodeType, Any], None]] = []
"""Who is told of rounds: sessions of several threads share one change of Dynamo's tables."""
_tables: list[tuple[list[Any], Any]] = []


@_adapter
def on_round(take: Callable[[types.CodeType, Any], None]) -> Callable[[], None]:
    """Call ``take`` with a loop's code and its ``FOR_ITER`` for each round that Dynamo traces. A line of
    its own for the body, which :data:`TRACE_SOURCE` would tell, a loop need not have. Gives what ends it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    number = dis.opmap["FOR_ITER"]
    with _taps_lock:
        waiting = [] if _rounds else [InstructionTranslatorBase]
        while waiting:
            translator = waiting.pop()
            waiting += translator.__subclasses__()
            table: list[Any] = translator.dispatch_table
            _tables.append((table, table[number]))
            table[number] = functools.partial(_traced, table[number])
        _rounds.append(take)

    def end() -> None:
        with _taps_lock:
            _rounds.remove(take)
            while _tables and not _rounds:
                table, plain = _tables.pop()
                table[number] = plain

    return end


def _traced(plain: Callable[..., None], translator: Any, instruction: Any) -> None:
    body = translator.instruction_pointer
    plain(translator, instruction)
    if translator.instruction_pointer == body:  # else the loop is over
        for take in (*_rounds,):
            take(translator.f_code, instruction)


@_adapter
def limit() -> int | None:
    """Compilations of one code after which Dynamo gives up."""
    found: int = torch._dynamo.config.recompile_limit
    return found


# ---- the dispatcher ------------------------------------------------------------------------------


@_adapter
def computed_table(operator: str) -> str | None:
    """Torch's own text: a line for each dispatch key that something serves."""
    try:
        return torch._C._dispatch_dump_table(operator) or None
    except RuntimeError:
        return None


@_adapter
def written_arguments(target: str) -> dict[int, str]:
    """Places and names of the arguments that an operator such as ``torch.ops.aten.add_.Tensor`` writes;
    none of one that is not registered."""
    found: Any = torch
    for name in target.split(".")[1:]:
        found = getattr(found, name, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = getattr(found, found.overloads()[0])
    if not isinstance(found, torch._ops.OpOverload):
        return {}
    arguments = found._schema.arguments
    return {
        number: each.name for number, each in enumerate(arguments)
        if each.alias_info and each.alias_info.is_write and not each.kwarg_only
    }  # fmt: skip


@_adapter
def key_set(device: str, *, functional: bool = False) -> Any:
    """The keys that a plain tensor of this device brings to a call, less what threads exclude.
    ``functional``: a tensor wrapped for the time in which torch makes a graph functional."""
    backend = torch._C._dispatch_key_for_device(device)
    names = [backend, "ADInplaceOrView", f"Autograd{backend}", f"Autocast{backend}"]
    names += ["Functionalize"] if functional else []
    keys = None
    for name in names:
        try:
            one = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name))
        except RuntimeError:  # a device without this functionality
            continue
        keys = one if keys is None else keys | one
    return None if keys is None else keys - torch._C._dispatch_tls_local_exclude_set()


@_adapter
def redispatch(keys: Any) -> list[tuple[str, Any]]:
    """Dispatch keys in the order of priority, each with the set that remains below it."""
    undefined = torch._C.DispatchKey.Undefined
    found = []
    while (key := keys.highestPriorityTypeId()) != undefined:
        keys = keys & torch._C._dispatch_keyset_full_after(key)
        found.append((torch._C._dispatch_key_name(key), keys))
    return found


# ---- a measured run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something with a name that took time, in microseconds."""

    name: str
    start: float
    end: float
    thread: int = 0
    kernels: tuple[tuple[str, float], ...] = ()
    """Launched by it on a GPU, and how long each ran."""


@dataclass
class Profile:
    host: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    """Kernels and copies on a GPU."""
    why: str | None = None
    """Why there is none."""


@_adapter
def _is_profiling() -> bool:
    """Whether a profiler of torch runs already."""
    found: bool = torch._C._autograd._profiler_enabled()
    return found


@contextlib.contextmanager
def profiled() -> Iterator[Profile]:
    """What torch's profiler sees of the block, filled in when it ends."""
    made = Profile()
    if _is_profiling() is not False:
        made.why = "another profiler of torch is running, and there can be one"
        yield made
        return
    cuda = torch.cuda.is_available()
    profiler = torch.autograd.profiler.profile(use_device="cuda" if cuda else None, use_kineto=cuda)
    try:
        with profiler:
            yield made
    finally:
        for event in profiler.function_events or ():
            # What the profiler itself spends on a launch counts the launch again.
            own = () if event.name == "Activity Buffer Request" else event.kernels
            kernels = tuple((kernel.name, kernel.duration) for kernel in own)
            times = event.time_range
            seen = Span(event.name, times.start, times.end, event.thread, kernels)
            if event.device_type.name == "CPU":
                made.host.append(seen)
            elif not getattr(event, "is_user_annotation", False):  # the echo of a span of the host
                made.device.append(seen)


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """Leaves a span in a profile, as cheaply as this torch can."""
    fast = getattr(
        torch._C._profiler, "_RecordFunctionFast", torch.autograd.profiler.record_function
    )
    made: contextlib.AbstractContextManager[Any] = fast(name)
    return made


@_adapter
def generated_names(path: str) -> list[dict[str, Any]]:
    """Names in the modules that Inductor wrote to ``path``: loaded with other constants, one is two."""
    cache = sys.modules.get("torch._inductor.codecache")
    loaded = cache.PyCodeCache.modules if cache is not None else ()
    return [vars(each) for each in loaded if getattr(each, "__file__", None) == path]


def _generated(path: str, name: str) -> Any:
    found = [names[name] for names in generated_names(path) or () if name in names]
    return found[-1] if found else None


@_adapter
def library(path: str, kernel: str) -> str | None:
    """The file with the machine code of a C++ kernel in the module at ``path``."""
    return getattr(getattr(_generated(path, kernel), "__self__", None), "__file__", None)


@_adapter
def launched_with(path: str, kernel: str) -> dict[str, Any]:
    """Block sizes, warps and stages of a Triton kernel in the module at ``path``, and what its machine
    code takes. Empty before its first launch, which chooses."""
    launchers: list[Any] = list(getattr(_generated(path, kernel), "launchers", None) or ())
    if len(launchers) != 1:
        return {}
    config = launchers[0].config
    found = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    taken = {name: getattr(launchers[0], name, None) for name in ("n_regs", "n_spills", "shared")}
    return found | {name: value for name, value in taken.items() if value is not None}


def differentiated_so_far() -> int:
    """The number of this thread's latest node in autograd's graph."""
    return differentiated(torch.zeros((), requires_grad=True).view(()).grad_fn)


def differentiated(node: torch.autograd.graph.Node | None) -> int:
    """Its number; nodes count up as they are made. -1: there is none."""
    return -1 if node is None else node._sequence_nr()


def plain_of(function: Any) -> Any:
    """The function or module that ``torch.compile`` made this of; else the thing itself."""
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return function._orig_mod
    return getattr(function, "_torchdynamo_orig_callable", function)


@_adapter
def memory_gbps() -> float | None:
    """Of the current GPU's memory, from its clock and bus; both edges of the clock carry data."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties()
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 / 1e9 if clock and width else None


# ---- caches and state ----------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(*, cpu: bool) -> Iterator[None]:
    """What the block compiles, and what torch learns by it, is gone afterwards. ``cpu``: it may
    compile C++. One block at a time: the cache's place is a variable of the process."""
    with _alone:
        if cpu:
            _probe_processor()
        with _private_disk(), _same_shapes_state(), _forgotten_code():
            yield


_alone = threading.RLock()


def _probe_processor() -> None:
    """Inductor compiles a program for each instruction set to see whether it runs: a fact about the
    machine, which is looked up in the user's cache and not found out anew."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


@contextlib.contextmanager
def _private_disk() -> Iterator[None]:
    """An empty cache directory meanwhile. Compiled C++ headers stay shared: torch keeps those apart."""
    from torch._inductor.utils import fresh_cache

    failed = None
    with (
        fresh_cache()
    ):  # which would leave its directory behind, and say so, if it saw an exception
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            failed = error
    if failed is not None:
        raise failed


@contextlib.contextmanager
def _same_shapes_state() -> Iterator[None]:
    """Sizes that Dynamo has seen vary are the same before and after."""
    from torch._dynamo import pgo

    names = [name for name in ("_CODE_STATE", "_INIT_CODE_STATE") if hasattr(pgo, name)]
    before = {name: copy.deepcopy(getattr(pgo, name)) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(pgo, name, value)


@contextlib.contextmanager
def _forgotten_code() -> Iterator[None]:
    """Functions that had no compiled version have none afterwards."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    fresh: list[Any] = []

    def seen(code: types.CodeType, new_code: types.CodeType) -> None:
        if not compiled_times(code):
            fresh.append(code)

    handle = register_bytecode_hook(seen)
    try:
        yield
    finally:
        handle.remove()
        for code in fresh:
            torch._C._dynamo.eval_frame.reset_code(code)


@_adapter
def switched_off() -> bool:
    """Whether Dynamo is to compile nothing."""
    found: bool = torch._dynamo.config.disable
    return found


def compiled_times(code: Any) -> int:
    """Compiled versions that Dynamo holds for a code object."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


@functools.cache
def package_root() -> str:
    return str(Path(torch.__file__).parent)


def is_torch_file(file: str) -> bool:
    return file.startswith(package_root() + "/")
