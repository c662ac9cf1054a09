"""Models, data, losses, engines and trainers. May import strategies and all below."""
