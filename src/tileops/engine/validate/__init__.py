"""The validator: everything that an entry promises and nobody can see by reading one file.

``check`` holds entries, classes, operators, kernels and workloads to each other, on any machine: no
GPU, no kernel run, no real memory. Every fault names file, line and entry.
"""

from tileops.engine.validate.report import Fault, Report
from tileops.engine.validate.walk import check

__all__ = ["Fault", "Report", "check"]
