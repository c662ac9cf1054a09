"""A model, its data, its loss, its engine and its trainer. May import strategies and all below."""
