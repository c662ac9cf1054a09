"""Cells: repeats as one row, and rows beside one another: what may be compared, and the outcome.

May import frame, metrics and labels.
"""
