"""Table of the workloads, whose steps the harness runs. May import the passes and what lies below measure.

A new workload is a file here, a name in `WORKLOADS` and a YAML file in conf/workload/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.measure.workloads.workload import Workload

WORKLOADS = ("train", "attention")


def load_workload_class(name: str) -> type[Workload]:
    """Return the class of a workload, which is imported only in rank processes."""
    code: type[Workload] = importlib.import_module(f"bench.measure.workloads.{name}").WORKLOAD
    return code
