"""Every implementation beside the others, as one command. May import experiments and all below."""
