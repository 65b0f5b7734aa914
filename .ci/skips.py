"""Fails when a test under tests/null was skipped that is not listed here.

A skip looks like success: an import that broke would otherwise turn the whole folder off in silence.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

# "classname::name" of each test under tests/null that may be skipped, with the reason beside it.
ALLOWED: frozenset[str] = frozenset()


def skipped(report: str) -> list[str]:
    """The skipped tests of a JUnit report, as classname::name."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is not None]
    return [f"{case.get('classname')}::{case.get('name')}" for case in cases]


def main(reports: list[str]) -> int:
    """Prints each skip that is not allowed; 1 if there is one."""
    found = [test for report in reports for test in skipped(report)]
    forbidden = [test for test in found if test.startswith("tests.null") and test not in ALLOWED]
    for test in forbidden:
        print(f"skipped but not listed in .ci/skips.py: {test}", file=sys.stderr)
    return 1 if forbidden else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
