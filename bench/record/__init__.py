"""The record of a cell, the file of records, and the noise between runs. May import measure and all below."""
