"""Records in; tidy frame, metrics, tables, figures and the report out. Never imports torch."""
