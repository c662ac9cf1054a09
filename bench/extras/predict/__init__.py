"""Time by arithmetic; run_sweep.py hands its functions to the core. May import what lies below extras."""
