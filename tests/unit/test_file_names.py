"""Files of tests have names of their own: pytest imports them by these and refuses a second one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
# pytest knows these by their directory.
OF_A_DIRECTORY = {"conftest.py", "__init__.py"}


def test_no_two_files_of_the_tests_share_a_name() -> None:
    names = Counter(path.name for path in TESTS.glob("*/*.py"))

    assert names["test_file_names.py"] == 1
    assert {name for name, count in names.items() if count > 1} <= OF_A_DIRECTORY
