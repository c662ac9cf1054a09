"""What the fork server of tests imports: all that a sweep's does, and what their ranks start in.

They trace two steps: a first and a last one. A sweep in a process of its own traces as many as it says.
"""

import importlib

import hypothesis
import pytest

import bench.extras.observe
import bench.run.cell.run
import tests.support.cells
import tests.support.cuda.fake_cuda
import tests.support.many_cells
from bench.measure.trace import section
from tests.support.trace_cases import TRACED

section.TRACED_STEPS = TRACED
importlib.import_module("bench.run.node.preload")  # last, as it ends with `gc.freeze`

__all__ = ["bench", "hypothesis", "pytest", "tests"]
