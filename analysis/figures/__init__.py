"""Figures: cells drawn on axes, each figure a PNG and an SVG.

May import cells, frame, metrics and labels.
"""
