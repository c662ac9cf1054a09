"""What the ranks of tests need beyond those of a sweep: their first functions stand in test modules."""

import hypothesis
import pytest

import bench.cell.run
import bench.observation
import tests.cells
import tests.together

__all__ = ["bench", "hypothesis", "pytest", "tests"]
