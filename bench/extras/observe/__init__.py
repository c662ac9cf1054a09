"""Records and checks for a user's own training loop. May import what lies below extras."""

from bench.extras.observe.observe import ObserveCallback, observe

__all__ = ["ObserveCallback", "observe"]
