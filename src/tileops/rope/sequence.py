"""Rotary position embedding of whole sequences: a token's position is its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tileops.authoring import KernelInterface, Op
from tileops.rope import rotation, spectra

_KERNEL = KernelInterface(cuda=("rotate:Rotate",), cpu=("rotate_cpu:Rotate",))


def _turning(
    spectrum: Callable[..., spectra.Spectrum], turned: str = "x", *flags: str
) -> Callable[..., torch.Tensor]:
    """The decomposition of an op that turns ``turned`` by what ``spectrum`` gives for the op's params,
    backwards for a gradient."""
    way = 1 if turned == "x" else -1

    def decomposition(x: torch.Tensor, **params: Any) -> torch.Tensor:
        named = {name: params[name] for name in spectra.keywords(spectrum)}
        rates, scale = spectrum(x.shape[-1], x.device, **named)
        layouts = (params["input_layout"], params.get("rope_layout", "neox"))
        return rotation.in_sequence(x, (way * rates, scale), *layouts)

    names = ("input_layout", *spectra.keywords(spectrum), *flags)
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    first = inspect.Parameter(turned, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    decomposition.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return decomposition


class RoPEFwdOp(Op):
    """Rotates the pairs of ``x`` ``[S, D]`` (``input_layout`` ``1d``) or ``[B, S, H, D]`` (``2d``) by
    ``s * base^(-2i / D)``. Pair ``i`` is entries ``i`` and ``i + D / 2`` (``rope_layout`` ``neox``) or
    ``2i`` and ``2i + 1`` (``interleaved``).

    Angles are exact to float32 at any position. Formula: Su et al., RoFormer, 2021; API: vLLM's
    ``RotaryEmbedding``.
    """

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.plain, "x", "rope_layout"))


class RoPEBwdOp(Op):
    """The gradient of ``RoPEFwdOp``: ``grad_output`` turned back, since a rotation's transpose is its
    inverse."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.plain, "grad_output", "rope_layout", "wants_x"))


class RoPELlama31FwdOp(Op):
    """``RoPEFwdOp`` of the NeoX layout at the rates of Llama 3.1: pairs that turn fewer than
    ``low_freq_factor`` times in ``original_max_position`` are slowed by ``scaling_factor``, those that
    turn more than ``high_freq_factor`` times stay. API: vLLM's ``Llama3RotaryEmbedding``."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.llama31))


class RoPELlama31BwdOp(Op):
    """The gradient of ``RoPELlama31FwdOp``."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.llama31, "grad_output", "wants_x"))


class YaRNFwdOp(Op):
    """``RoPEFwdOp`` of the NeoX layout at the rates of YaRN, and with its longer vectors: pairs that turn
    fewer than ``beta_slow`` times in ``original_max_position`` are slowed by ``scaling_factor``, those
    that turn more than ``beta_fast`` times stay. Formula: Peng et al., 2023; API: vLLM's
    ``YaRNScalingRotaryEmbedding``."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.yarn))


class YaRNBwdOp(Op):
    """The gradient of ``YaRNFwdOp``: turned back, and longer by the same factor."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.yarn, "grad_output", "wants_x"))


class LongRoPEFwdOp(Op):
    """``RoPEFwdOp`` of the NeoX layout, pair ``i`` slowed by ``rescale_factors[i]`` (None: not), and with
    longer vectors where ``max_position`` exceeds ``original_max_position``. Formula: Ding et al., 2024;
    API: vLLM's ``Phi3LongRoPEScaledRotaryEmbedding``, one of whose two lists of factors is given."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.long_rope))


class LongRoPEBwdOp(Op):
    """The gradient of ``LongRoPEFwdOp``: turned back, and longer by the same factor."""

    kernel = _KERNEL
    decomposition = staticmethod(_turning(spectra.long_rope, "grad_output", "wants_x"))
