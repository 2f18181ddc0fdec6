"""Names of operators."""

from __future__ import annotations

import re

__all__ = ["operator_base_name", "snake"]

_MIXED = ("PReLU", "ReLU", "SiLU", "MoE", "RoPE", "YaRN")
"""Words whose inner capitals begin no new word."""


def snake(class_name: str) -> str:
    """``RMSNormFwdOp`` → ``rms_norm_fwd``; ``MoEPostPermuteFwdOp`` → ``moe_post_permute_fwd``."""
    text = class_name.removesuffix("Op")
    for word in _MIXED:
        text = text.replace(word, word.capitalize())
    text = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", text)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()


def operator_base_name(family: str, class_name: str) -> str:
    """``norm_rms_norm_fwd``; the family is not said twice (``gemm_fwd``)."""
    name = snake(class_name)
    return name if name.startswith(family + "_") or name == family else f"{family}_{name}"
