"""Other machines that run ranks: an agent on each, and the link to it. May import node and all below."""
