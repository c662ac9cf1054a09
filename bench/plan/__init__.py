"""The cells of a sweep, their order, and what they need. May import request and all below; no torch."""
