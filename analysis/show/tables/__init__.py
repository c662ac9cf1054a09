"""Cells as rows of text, for readers and for programs. May import what lies below show."""
