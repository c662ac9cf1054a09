"""Results of cells, in sentences. May import cells, read and labels."""
