"""Commands in order, for a machine that nobody has run on yet. May import sweep and all below."""
