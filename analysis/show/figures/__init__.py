"""Figures of cells, written as PNG and SVG. May import what lies below show."""
