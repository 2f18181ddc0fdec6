"""What torch.compile did with a function: collected, told as data, shown to a reader.

``tileops.explain(fn, ...)`` is :func:`tileops.explain.session.explain`: the function and its package
share a name, so the package is callable.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tileops.explain.session import explain

        return explain(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
