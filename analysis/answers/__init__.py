"""States the results of cells in sentences. May import cells, read and labels."""
