"""Tables: cells as rows of text, for readers and for programs.

May import cells, frame, metrics and labels.
"""
