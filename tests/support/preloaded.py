"""Import in the fork server of tests what a sweep's imports, and the modules with the tests' rank functions.

Ranks of tests trace two steps, a first and a last one. A sweep in a new process traces its usual number.
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
