"""The one table of workloads. A new one is a file here, a line below and a YAML in conf/workload/.

May import passes, training and all below.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.measure.workloads.attention import Attention
from bench.measure.workloads.train import Train
from bench.measure.workloads.workload import Rank, Workload

WORKLOADS: Mapping[str, type[Workload]] = {"train": Train, "attention": Attention}

__all__ = ["WORKLOADS", "Rank", "Workload"]
