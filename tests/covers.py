"""Small covers of large grids."""

import itertools


def pairwise(cases):
    """The names of a cover: every two values that meet in any case, meet in one of these.

    `cases` maps a name to the case's value on each axis.
    """
    met, cover = set(), []
    for name, values in cases.items():
        pairs = set(itertools.combinations(enumerate(values), 2))
        if pairs - met:
            met |= pairs
            cover.append(name)
    return cover
