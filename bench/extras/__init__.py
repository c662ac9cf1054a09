"""What a sweep can do without; no room below imports it. May import run and all below."""
