"""Records in; tables, figures, answers and a page out. Never imports torch.

The commands and the labels stand at the top. Each folder imports only what stands further right:
show > answers > cells > read > labels.
"""
