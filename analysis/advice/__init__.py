"""Which strategy for which work: options side by side, their order, and the answer in sentences.

May import cells, frame, figures and all below; a table alone imports neither pandas nor matplotlib.
"""
