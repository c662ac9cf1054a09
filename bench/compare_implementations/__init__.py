"""Every implementation beside the others, on one attention call. May import cell and all below."""
