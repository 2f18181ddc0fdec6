"""Every error tileops raises, one class each, with its message template.

A message repeats the user's own words: the op, the argument, what was given, what is accepted, and
what to do. Code raises these names; users search them.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousKernelError",
    "AmbiguousTargetError",
    "BackendError",
    "BackwardError",
    "BundleError",
    "CheckError",
    "ColdCaptureError",
    "ExportError",
    "ImmutableOpError",
    "InstanceKeyError",
    "KernelBuildError",
    "KernelLaunchError",
    "ManifestError",
    "NoKernelError",
    "OpNotAvailableError",
    "TileopsError",
    "TransformError",
    "UnknownTargetError",
]


class TileopsError(Exception):
    """Base of every error of this package."""

    def __reduce__(self) -> tuple[object, ...]:
        # Without __init__, which takes the words and not the message: errors come back from workers.
        return (_again, (type(self), self.args), self.__dict__)


def _again(cls: type[TileopsError], args: tuple[object, ...]) -> TileopsError:
    return cls.__new__(cls, *args)


class CheckError(TileopsError, ValueError):
    """A call or a constructor breaks the op's signature. Raised before any work."""

    def __init__(self, op: str, argument: str, given: object, accepted: str) -> None:
        self.op, self.argument, self.given, self.accepted = op, argument, given, accepted
        super().__init__(f"{op}: argument '{argument}': given {given}; accepted: {accepted}")


class ImmutableOpError(TileopsError, AttributeError):
    """An attribute of a constructed op was assigned or deleted."""

    def __init__(self, op: str, attribute: str) -> None:
        super().__init__(
            f"{op}: cannot set or delete '{attribute}': an op is immutable after construction, "
            f"because equal ops share kernels and compiled graphs; construct another {op} instead"
        )


class ManifestError(TileopsError, ValueError):
    """A manifest file is malformed. ``where`` is ``file:line``, ``entry`` the op class or ''."""

    def __init__(self, where: str, entry: str, problem: str) -> None:
        self.where, self.entry, self.problem = where, entry, problem
        super().__init__(f"{where}: {entry + ': ' if entry else ''}{problem}")


class InstanceKeyError(TileopsError, ValueError):
    """An op cannot be re-created from the key found in a compiled graph."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"cannot re-create the op {key!r}: {problem}")


class ExportError(TileopsError, ValueError):
    """An op was exported that no other process could make again."""

    def __init__(self, op: str, parameter: str, problem: str) -> None:
        super().__init__(
            f"{op} cannot be exported: parameter '{parameter}': {problem}, so the process that loads "
            f"the program could not make the op again; give a value of a basic type, or of a class "
            f"decorated with tileops.authoring.literal_type"
        )


class BackwardError(TileopsError, RuntimeError):
    """A gradient was asked of an op that declares no backward, or for an argument that has none."""

    def __init__(self, op: str, argument: str = "") -> None:
        of = f" for argument '{argument}'" if argument else ""
        advice = f"detach '{argument}'" if argument else "detach its inputs or its output"
        super().__init__(
            f"{op} declares no backward{of}: its output cannot be differentiated. "
            f"Call it under torch.no_grad(), or {advice}"
        )


class TransformError(TileopsError, RuntimeError):
    """A torch transform (forward mode, vmap of a write, ...) cannot pass through this op."""

    def __init__(self, op: str, transform: str, advice: str) -> None:
        super().__init__(f"{op}: {transform} is not supported by this op; {advice}")


class BackendError(TileopsError, RuntimeError):
    """A target or kernel could not serve a call."""


class UnknownTargetError(BackendError):
    """A target was asked for that nobody registered."""

    def __init__(self, target: object, known: list[str], failures: dict[str, str]) -> None:
        text = f"unknown target {target!r}; registered targets: {', '.join(known)}"
        if isinstance(target, str) and target in failures:
            text += f". Its plugin failed to load: {failures[target]}"
        elif failures:
            broken = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            text += f". Plugins that failed to load: {broken}"
        super().__init__(text)


class AmbiguousTargetError(BackendError):
    """Several detectors claim one device."""

    def __init__(self, device: object, claims: list[str]) -> None:
        super().__init__(
            f"targets {', '.join(repr(c) for c in claims)} all claim device {device}; choose one "
            f"with target=, tileops.use_target(...) or tileops.set_default_target(...)"
        )


class OpNotAvailableError(BackendError):
    """A target does not serve this op, or declines this call.

    A ``build_kernel`` raises ``OpNotAvailableError(op, target, reason)`` to decline a call.
    """

    def __init__(self, op: str, target: str, reason: str) -> None:
        self.op, self.target, self.reason = op, target, reason
        super().__init__(f"{op}: target {target!r} does not serve this call: {reason}")


class NoKernelError(BackendError):
    """No in-tree kernel accepts the call; names each kernel with its reason."""

    def __init__(self, op: str, call: str, refused: list[tuple[str, str]]) -> None:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in refused)
        super().__init__(f"{op}: no in-tree kernel serves {call}:{lines or ' none is declared'}")


class AmbiguousKernelError(BackendError):
    """Two specialised kernels claim one call and neither declares a cost."""

    def __init__(self, op: str, call: str, names: list[str]) -> None:
        super().__init__(
            f"{op}: kernels {' and '.join(names)} both claim {call}; make their regions disjoint "
            f"or give each a cost(call)"
        )


class KernelBuildError(BackendError):
    """Building a kernel failed. Nothing was stored: the next call decides afresh."""

    def __init__(self, op: str, target: str, kernel: str, problem: str) -> None:
        super().__init__(f"{op}: target {target!r} failed to build {kernel}: {problem}")


class KernelLaunchError(BackendError):
    """The CUDA driver refused to load or launch a kernel."""

    def __init__(self, kernel: str, function: str, problem: str) -> None:
        super().__init__(f"kernel {kernel}: {function}: {problem}")


class BundleError(BackendError):
    """A bundle of kernels cannot be used, as a whole; ``reason`` says why."""

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"bundle {path}: {reason}")


class ColdCaptureError(BackendError):
    """A CUDA graph capture met an op whose kernel is not built yet."""

    def __init__(self, op: str) -> None:
        super().__init__(
            f"{op}: called for the first time inside a CUDA graph capture, where no kernel can be "
            f"built; warm up first: call op.prepare(...), or the op, with such inputs before it begins"
        )
