"""The report as one HTML file. May import figures, tables and what lies below show."""
