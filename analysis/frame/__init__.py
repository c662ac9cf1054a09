"""The frame: one row per record, read from the folders of sweeps.

May import metrics and labels.
"""
