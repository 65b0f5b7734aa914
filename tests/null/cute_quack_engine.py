"""An engine as a user has it: attaches, calls quack's rmsnorm once, and ends. What it compiles is logged."""

from __future__ import annotations

import sys

import prefetchd
from prefetchd.targets import load_target


def main() -> None:
    prefetchd.attach(target=load_target(sys.argv[1]), or_observe=True)
    from cute_quack_process import call

    call()


if __name__ == "__main__":
    main()
