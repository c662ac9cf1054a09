"""The user's words become legal cells. May import training.text, strategies and all below; no torch."""
