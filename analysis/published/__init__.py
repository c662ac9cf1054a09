"""Numbers that others have published, and what is to be thought of each.

May import frame, metrics and labels; of `bench` also cost, and in `model` the request, for a claim becomes a
cell as a user's words do.
"""
