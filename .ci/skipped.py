"""How many tests were skipped, by reason: `python .ci/skipped.py REPORT.xml ...` of JUnit reports."""

import sys
from collections import Counter
from xml.etree import ElementTree as ET

reports = [ET.parse(path) for path in sys.argv[1:]]  # noqa: S314  pytest has just written them
reasons = Counter(skip.get("message") for report in reports for skip in report.iter("skipped"))
print(f"{reasons.total()} tests were skipped")
for reason, count in reasons.most_common():
    print(f"{count:5} {reason}")
