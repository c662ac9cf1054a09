"""Reads records and writes tables, figures, sentences and a page. Never imports torch.

The commands and the labels are modules of this package. A folder imports only the folders to its right in
show > answers > cells > read > labels.
"""
