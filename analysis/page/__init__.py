"""The page: everything a reader sees of a sweep, as one HTML file.

May import figures, tables and answers, and whatever lies below those.
"""
