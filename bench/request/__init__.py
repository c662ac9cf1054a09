"""The user's words become legal cells. May import training's text, strategies and all below; no torch."""
