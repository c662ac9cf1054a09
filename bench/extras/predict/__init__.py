"""Predicted step times, as modes that run_sweep.py registers. May import what lies below extras."""
