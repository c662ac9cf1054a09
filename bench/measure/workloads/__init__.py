"""Steps that the harness runs itself. May import the passes and what lies below measure.

The one table of workloads: a new one is a file here, a name below and a YAML in conf/workload/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.measure.workloads.workload import Workload

WORKLOADS = ("train", "attention")


def workload_code(name: str) -> type[Workload]:
    """Return a workload's code, imported only where ranks run."""
    code: type[Workload] = importlib.import_module(f"bench.measure.workloads.{name}").WORKLOAD
    return code
