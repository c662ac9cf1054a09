"""Records in; tables, figures, answers and a page out. Never imports torch.

At the top stand the commands and the labels. Each folder imports only what stands further right:
page > figures, tables, answers > cells > frame > metrics > labels.
"""
