"""Cells drawn on axes, each figure as PNG and SVG. May import what lies below show."""
