"""The cells of a sweep, their order, time and memory. May import request and all below; no torch."""
