"""Time by arithmetic: `mode=predict`, a replay's link, a plan's minutes. May import sweep and all below.

No other package of `bench` imports it: run_sweep.py hands its functions to the core.
"""
