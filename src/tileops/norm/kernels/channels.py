"""BatchNorm and its gradient on CUDA, and InstanceNorm by running statistics: a channel held in
registers, or read twice.

A channel of few elements is read once by one program, several channels to one where they are
adjacent (``L`` is 1). Others are split over as many programs as the device runs at once, whose sums
every program of the second kernel adds in one order: equal calls give equal bits on one kind of
device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    pointer_to,
)

__all__ = ["HeldChannelGradients", "HeldChannels", "SplitChannelGradients", "SplitChannels"]

DEVICE = f"{__name__}_triton"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HELD = 8192
"""Elements that a program holds."""
TILE = 2048
"""Elements of a tile where channels are split."""
SPLITS = 64
"""Most programs to a channel."""
RUN_BYTES = 128
"""Read of neighbouring places, at least, where an instance has as many."""
SECOND_WARPS = 2
"""Of the second kernels, whose programs each add up all parts of their channels: with fewer warps less
waits for that."""

FORWARD = ("x", "running_mean", "running_var", "weight", "bias")
BACKWARD = ("grad", "x", "save_mean", "save_invstd", "weight")


@dataclass(frozen=True)
class ChannelTile:
    """What a program holds at a time."""

    elements: int
    """Of a channel."""
    places: int
    """Of an instance."""
    adjacent: int
    """Channels."""

    @property
    def size(self) -> int:
        return self.elements * self.adjacent


@dataclass(frozen=True)
class Channels:
    """What a call asks of these kernels."""

    x: TensorSpec
    given: dict[str, TensorSpec]
    """The inputs by the kernels' names."""
    outputs: tuple[TensorSpec | None, ...]
    channels: int
    spatial: int
    count: int
    """Elements of a channel."""
    trains: bool
    """Whether statistics are the batch's own."""
    dependent: bool
    """Whether kernels may be launched while the stream's previous one still ends."""

    @classmethod
    def of(cls, call: CallSpec) -> Channels:
        """Reads a call of BatchNorm, of its gradient, or of InstanceNorm."""
        roles = BACKWARD if "doutput" in call.inputs else FORWARD
        named = zip(roles, call.inputs.values(), strict=True)
        given = {name: spec for name, spec in named if spec is not None}
        x = given["x"]
        spatial = math.prod(x.shape[2:])
        outputs = tuple(call.outputs.values())
        return cls(
            x,
            given,
            outputs,
            channels=x.shape[1],
            spatial=spatial,
            count=x.shape[0] * spatial,
            trains=getattr(call.params, "training", call.op == "BatchNormBwdOp"),
            dependent=call.device.arch >= (9, 0),
        )

    @property
    def unsupported(self) -> str | None:
        """Why no kernel here takes the call."""
        if self.x.dtype not in DTYPES:
            accepted = ", ".join(str(dtype)[6:] for dtype in DTYPES)
            return f"{str(self.x.dtype)[6:]} is not one of {accepted}"
        if any(not spec.contiguous for spec in self.given.values()):
            return "running statistics that are written are not contiguous"
        return None

    @property
    def held_tile(self) -> ChannelTile:
        """Whole channels."""
        places, instances = next_power_of_2(self.spatial), self.count // max(self.spatial, 1)
        # Adjacent channels make wide reads where a channel's elements are not adjacent themselves.
        most = next_power_of_2(self.channels) if self.spatial == 1 else 1
        adjacent = min(most, 64, max(8, most // 128))
        return ChannelTile(next_power_of_2(instances) * places, places, adjacent)

    @property
    def split_tile(self) -> ChannelTile:
        """A part of a channel, of as few places as leave the fewest threads idle."""
        adjacent = min(64, next_power_of_2(self.channels)) if self.spatial == 1 else 1
        elements, instances = TILE // adjacent, self.count // self.spatial
        ways = [min(next_power_of_2(self.spatial), elements)]
        while ways[-1] * self.x.dtype.itemsize > RUN_BYTES:
            ways.append(ways[-1] // 2)

        def held(places: int) -> int:
            beside = elements // places
            return cdiv(self.spatial, places) * places * cdiv(instances, beside) * beside

        return ChannelTile(elements, min(ways, key=held), adjacent)

    @property
    def held(self) -> bool:
        """Whether a channel fits in registers."""
        return self.held_tile.size <= HELD

    def build(
        self,
        fn: str,
        arguments: tuple[str, ...],
        tile: ChannelTile,
        warps: int = 0,
        **constants: Any,
    ) -> TritonBuild:
        """Compile ``fn``, whose run-time arguments are ``arguments``; absent tensors are None."""
        wide = self.x.numel >= 2**31
        value = pointer_to(self.x.dtype)
        kinds = {name: pointer_to(spec.dtype) for name, spec in self.given.items()}
        kinds |= {"y": value, "grad_x": value, "parts": "*fp32"}
        kinds |= dict.fromkeys(("save_mean", "save_invstd", "grad_weight", "grad_bias"), "*fp32")
        kinds |= {"count": "i64" if wide else "i32", "splits": "i32", "blocks": "i32"}
        kinds |= {"eps": "fp32", "momentum": "fp32"}
        absent_here = set() if self.trains else {"save_mean", "save_invstd", "parts"}
        signature = tuple((n, kinds[n]) for n in arguments if n in kinds and n not in absent_here)
        absent = {n: None for n in arguments if n not in kinds or n in absent_here}
        sizes = {"C": self.channels, "L": self.spatial}
        sizes |= {"E": tile.elements, "P": tile.places, "CB": tile.adjacent}
        switches = {"WIDE": wide, "DEPENDENT": self.dependent}
        return TritonBuild(
            f"{DEVICE}:{fn}",
            signature,
            tuple({**absent, **sizes, **switches, **constants}.items()),
            num_warps=warps or min(16, max(1, tile.size // 512)),
            num_stages=1,
            aligned=tuple(
                n for n, _ in signature if n in ("x", "grad", "y", "grad_x") and self.aligned
            ),
            options=(("launch_pdl", True),) if self.dependent else (),
        )

    @property
    def aligned(self) -> bool:
        """Whether what is large begins at multiples of 16 bytes."""
        return all(s.aligned for n, s in self.given.items() if n in ("x", "grad"))

    def grids(self, call: CallSpec) -> tuple[int, int, int]:
        """Of split channels: blocks of channels; programs to one in the first kernel, and in the
        second."""
        tile = self.split_tile
        of_channels = cdiv(self.channels, tile.adjacent)
        instances = cdiv(self.count // self.spatial, tile.elements // tile.places)
        tiles = instances * cdiv(self.spatial, tile.places)
        wanted = cdiv(8 * call.device.multiprocessors, of_channels)
        return of_channels, max(1, min(SPLITS, wanted, tiles)), tiles


def _bind_empty(_: None, call: CallSpec) -> Run:
    makers = [None if spec is None else output_of(spec) for spec in call.outputs.values()]

    def run(*_given: torch.Tensor | None) -> Any:
        return tuple(None if make is None else make().zero_() for make in makers)

    return run


EMPTY = Entry(("tileops.norm", "channels without elements"), lambda: None, _bind_empty)
"""Serves what has no elements: sums over nothing are 0."""


def _all(*builds: TritonBuild) -> tuple[Launcher, ...]:
    return tuple(build() for build in builds)


class _OneReading(Kernel):
    """What the two kernels share that hold channels in registers."""

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        channels = Channels.of(call)
        if not channels.held:
            return f"channels of {channels.count} elements do not fit in registers"
        return cls.other_reason(call) or channels.unsupported

    @classmethod
    def other_reason(cls, call: CallSpec) -> str | None:
        """A reason of one kernel's own."""
        return None


class _TwoReadings(Kernel):
    """What the two kernels share that read split channels twice."""

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        channels = Channels.of(call)
        if channels.held and channels.trains:
            return f"channels of {channels.count} elements fit in registers"
        return channels.unsupported


# --- forward ------------------------------------------------------------------------------------


class HeldChannels(_OneReading):
    """Training on channels that fit in registers."""

    name = "triton_held_channels"

    @classmethod
    def other_reason(cls, call: CallSpec) -> str | None:
        return None if Channels.of(call).trains else "evaluation sums nothing"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        channels = Channels.of(call)
        if channels.x.numel == 0:
            return EMPTY
        arguments = (*FORWARD, "y", "save_mean", "save_invstd", "count", "eps", "momentum")
        build = channels.build("held_channels", arguments, channels.held_tile)
        return Entry(build.identity, build, cls._bind)

    @classmethod
    def _bind(cls, launcher: Launcher, call: CallSpec) -> Run:
        channels, launch = Channels.of(call), launcher.on(call.device.index)
        grid = cdiv(channels.channels, channels.held_tile.adjacent)
        makers = [output_of(spec) for spec in channels.outputs if spec is not None]
        scalars = (channels.count, float(call.params.eps), float(call.params.momentum))

        def run(*given: torch.Tensor | None) -> Any:
            outputs = tuple(make() for make in makers)
            launch(grid, 1, 1, *(t for t in given if t is not None), *outputs, *scalars)
            return outputs

        return run


class SplitChannels(_TwoReadings):
    """Training on longer channels: sums first, then results. Evaluation: results alone."""

    name = "triton_split_channels"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if getattr(call.params, "use_input_stats", False):
            return "the statistics of instances are those of rows"
        return super().refuses(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        channels = Channels.of(call)
        if channels.x.numel == 0:
            return EMPTY
        tile = channels.split_tile
        arguments = (*FORWARD, "y", "save_mean", "save_invstd", "parts")
        scalars = ("count", "splits", "blocks", "eps", "momentum")
        second = (*arguments, *scalars)
        warps = SECOND_WARPS if channels.trains else 0
        builds = [channels.build("normalize_channels", second, tile, warps, SPLITS=SPLITS)]
        if channels.trains:
            sums = ("x", "parts", "count", "splits")
            builds.append(channels.build("channel_moments", sums, tile))
        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(_all, *builds), cls._bind)

    @classmethod
    def _bind(cls, launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
        channels = Channels.of(call)
        normalize, *first = (launcher.on(call.device.index) for launcher in launchers)
        of_channels, splits, blocks = channels.grids(call)
        count, numbers = channels.count, (float(call.params.eps), float(call.params.momentum))
        makers = [output_of(spec) for spec in channels.outputs if spec is not None]
        single, missing = len(channels.outputs) == 1, (None,) * channels.outputs.count(None)
        shape = (3, splits, channels.channels)
        make_parts = output_of(TensorSpec.contiguous_of(shape, torch.float32, channels.x.device))

        def run(x: torch.Tensor, *given: torch.Tensor | None) -> Any:
            outputs = tuple(make() for make in makers)
            parts = []
            if first:
                parts = [make_parts()]
                first[0](of_channels * splits, 1, 1, x, *parts, count, splits)
            tensors = (x, *(t for t in given if t is not None), *outputs, *parts)
            normalize(of_channels * blocks, 1, 1, *tensors, count, splits, blocks, *numbers)
            return outputs[0] if single else (*outputs, *missing)

        return run


# --- backward -----------------------------------------------------------------------------------

GRADIENTS = ("grad_x", "grad_weight", "grad_bias")


class HeldChannelGradients(_OneReading):
    """Gradients of channels that fit in registers."""

    name = "triton_held_channel_gradients"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        channels = Channels.of(call)
        if channels.x.numel == 0:
            return EMPTY
        arguments = (*BACKWARD, *GRADIENTS, "count")
        build = channels.build("held_channel_gradients", arguments, channels.held_tile)
        return Entry(build.identity, build, cls._bind)

    @classmethod
    def _bind(cls, launcher: Launcher, call: CallSpec) -> Run:
        channels, launch = Channels.of(call), launcher.on(call.device.index)
        grid, count = cdiv(channels.channels, channels.held_tile.adjacent), channels.count
        makers = [output_of(spec) for spec in channels.outputs if spec is not None]

        def run(*given: torch.Tensor | None) -> Any:
            outputs = tuple(make() for make in makers)
            launch(grid, 1, 1, *(t for t in given if t is not None), *outputs, count)
            return outputs

        return run


class SplitChannelGradients(_TwoReadings):
    """Gradients of longer channels: sums first, then gradients."""

    name = "triton_split_channel_gradients"

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        channels = Channels.of(call)
        if channels.x.numel == 0:
            return EMPTY
        tile = channels.split_tile
        sums = (*BACKWARD[:4], "parts", "count", "splits")
        arguments = (*BACKWARD, *GRADIENTS, "parts", "count", "splits", "blocks")
        builds = [
            channels.build("channel_gradients", arguments, tile, SECOND_WARPS, SPLITS=SPLITS),
            channels.build("channel_gradient_sums", sums, tile),
        ]
        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(_all, *builds), cls._bind)

    @classmethod
    def _bind(cls, launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
        channels = Channels.of(call)
        gradients, add_up = (launcher.on(call.device.index) for launcher in launchers)
        of_channels, splits, blocks = channels.grids(call)
        makers = [output_of(spec) for spec in channels.outputs if spec is not None]
        shape, count = (2, splits, channels.channels), channels.count
        make_parts = output_of(TensorSpec.contiguous_of(shape, torch.float32, channels.x.device))

        def run(*given: torch.Tensor | None) -> Any:
            outputs = tuple(make() for make in makers)
            parts = make_parts()
            add_up(of_channels * splits, 1, 1, *given[:4], parts, count, splits)
            tensors = (*(t for t in given if t is not None), *outputs, parts)
            gradients(of_channels * blocks, 1, 1, *tensors, count, splits, blocks)
            return outputs

        return run
