"""The faults that a sweep has to survive, and the table of those that a run of tests has made happen.

A test says which it makes happen by `pytest.mark.fault(NUMBER)`. No torch: tests/conftest.py imports this.
"""

MATRIX = {
    1: "out of memory in one rank, the others in a collective",
    2: "out of memory, then a slow cleanup",
    3: "out of memory on every rank",
    4: "an error that looks like one of memory",
    5: "a rank is killed",
    6: "a rank crashes",
    7: "a rank hangs",
    8: "a rank ignores SIGTERM",
    9: "a rank leaves with code 0 and no result",
    10: "ranks call different collectives",
    11: "the launcher is killed",
    12: "Ctrl-C, once and twice",
    13: "a port is taken, or two sweeps run at once",
    14: "two sweeps write to one folder",
    15: "the disk is full",
    16: "the last line is torn",
    17: "a line of the records is corrupt",
    18: "a sweep is resumed",
    19: "records are of other code, torch or device",
    20: "a folder cannot be written to, or has an odd name",
    21: "GPU counters are missing or die",
    22: "the device is throttled",
    23: "the profiler fails, or its trace is no good",
    24: "a package is not installed",
    25: "attention computes wrong numbers",
    26: "the wall clock jumps",
    27: "a GPU is truly full, then the next cell",
}

NUMBER, FOUND = "fault", "found"
"""What a test of a fault keeps as properties: its number, and what the record said."""
TITLES = ("fault", "what happens", "test", "status", "rank", "phase", "seconds to detect")
LEGEND = (
    "seconds to detect: from the fault in the first rank to the record on the disk;"
    " where no rank met one (<), all of the test's own code"
)


def fault_table(reports):
    """The lines of the table, in the order of the matrix, from the reports of a run's tests.

    A test that tells nothing of a record has one row, however often it ran; of its cases the longest counts,
    and before it one that failed.
    """
    told = [each for each in reports if NUMBER in dict(each.user_properties)]
    told = [each for each in told if each.when == "call" or not each.passed]
    rows = dict(map(_row, sorted(told, key=lambda each: (each.failed, each.duration))))
    table = [TITLES, *(rows[key] for key in sorted(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _row(report):
    properties = dict(report.user_properties)
    number, found = properties[NUMBER], properties.get(FOUND)
    named = report.nodeid.rpartition("::")[2].partition("@")[0]  # after which xdist names the worker's group
    test, _, case = named.removeprefix("test_").partition("[")
    name = (
        case[:-1].removeprefix(f"F{number} ")
        if case and (found or not report.passed)
        else test.replace("_", " ")
    )
    status, rank, phase, detected_s = found or ("passed", None, None, None)
    seconds = f"< {report.duration:.1f}" if detected_s is None else f"{detected_s:.1f}"
    cells = (
        f"F{number}",
        MATRIX[number],
        name,
        status if report.passed else report.outcome,
        "" if rank is None else str(rank),
        phase or "",
        seconds if report.passed else "",
    )
    return (number, name), cells
