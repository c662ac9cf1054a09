"""Metrics: one record's numbers, and what each of them means.

May import labels.
"""
