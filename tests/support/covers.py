"""Small covers of large grids."""

import itertools


def pairwise(cases, whole=()):
    """The names of a cover: every two values that meet in any case, meet in one of these.

    `cases` maps a name to the case's value on each axis; of the axes in `whole` all values that meet do so.
    What brings most together comes first: one case after another would be twice as many.
    """
    left = {
        name: {*itertools.combinations(enumerate(values), 2), tuple(values[axis] for axis in whole)}
        for name, values in cases.items()
    }
    missing, cover = set().union(*left.values()), []
    while missing:
        left = {name: meeting & missing for name, meeting in left.items() if meeting & missing}
        most = max(left, key=lambda name: len(left[name]))
        missing -= left[most]
        cover.append(most)
    return cover
