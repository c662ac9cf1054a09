"""Time model of steps, which run_sweep.py registers with the core. May import what lies below extras."""
