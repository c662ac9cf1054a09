"""Records of cells, the file that stores them, and the noise of losses. May import measure and all below."""
