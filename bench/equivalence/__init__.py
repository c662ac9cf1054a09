"""Whether two trainings are the same one: losses and gradient norms, step by step. No torch.

May import the nouns only.
"""
