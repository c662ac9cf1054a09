"""Answers: what cells say, in sentences.

May import cells, frame, metrics and labels.
"""
