"""Seconds by arithmetic, which run_sweep.py hands to the core. May import what lies below extras."""
