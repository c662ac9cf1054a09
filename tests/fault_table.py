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


def fault_rows(reports):
    """The rows of the table, in the order of the matrix, from the reports of a run's tests.

    A test that tells nothing of a record has one row, however often it ran.
    """
    told = {report.nodeid: report for report in sorted(reports, key=_moment) if _is_of_a_fault(report)}
    rows = dict(_row(report) for report in sorted(told.values(), key=_seconds))
    return [TITLES, *(rows[key] for key in sorted(rows))]


def aligned(rows):
    """The rows as lines of equal columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def _is_of_a_fault(report):
    return NUMBER in dict(report.user_properties)


def _moment(report):
    """A test's call says more than what was before and after it, but for a failure."""
    return report.failed, report.when == "call"


def _seconds(report):
    """The longest case of a test counts, and before it one that failed."""
    return report.failed, report.duration


def _row(report):
    properties = dict(report.user_properties)
    number = properties[NUMBER]
    named = report.nodeid.rpartition("::")[2].partition("@")[0]  # after which xdist names the worker's group
    test, _, case = named.removeprefix("test_").partition("[")
    name = case[:-1].removeprefix(f"F{number} ") or test.replace("_", " ")
    if FOUND not in properties and report.passed:  # how often it ran does not matter
        name = test.replace("_", " ")
    status, rank, phase, detected_s = properties.get(FOUND) or ("passed", None, None, None)
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
