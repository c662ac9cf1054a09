"""The report as one HTML file. May import findings, columns and what lies below show."""
