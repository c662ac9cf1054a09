"""What the fork server of tests imports: all that a sweep's does, and what their ranks start in.

They trace two steps: a first and a last one. A sweep in a process of its own traces as many as it says.
"""

import importlib

import hypothesis
import pytest

import bench.cell.run
import bench.observation
import tests.cells
import tests.fake_cuda
import tests.together
from bench.passes.trace import section
from tests.trace_cases import TRACED

section.TRACED_STEPS = TRACED
importlib.import_module("bench.node.preload")  # last, as it ends with `gc.freeze`

__all__ = ["bench", "hypothesis", "pytest", "tests"]
