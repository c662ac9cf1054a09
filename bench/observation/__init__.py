"""Somebody's own training loop, observed: the same record, gates and report as a cell of a sweep.

May import cell and all below.
"""

from bench.observation.observe import ObserveCallback, observe
from bench.observation.probe import probe

__all__ = ["ObserveCallback", "observe", "probe"]
