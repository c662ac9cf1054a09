"""What the ranks of tests need beyond those of a sweep: their first functions stand in test modules.

They trace two steps: a first and a last one. A sweep in a process of its own traces as many as it says.
"""

import hypothesis
import pytest

import bench.cell.run
import bench.observation
import tests.cells
import tests.together
from bench.passes.trace import section
from tests.trace_cases import TRACED

section.TRACED_STEPS = TRACED

__all__ = ["bench", "hypothesis", "pytest", "tests"]
