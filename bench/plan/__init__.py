"""Which cells run, in which order, and what they need. May import request and all below; no torch."""
