"""Somebody's own training loop, observed: the same record, gates and report as a cell of a sweep.

May import cell and all below.
"""

from bench.observation.callback import ObserveCallback
from bench.observation.observation import Observation
from bench.observation.observe import observe
from bench.observation.probe import probe

__all__ = ["Observation", "ObserveCallback", "observe", "probe"]
