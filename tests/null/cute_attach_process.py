"""An engine that attaches with a profile and stays until a line comes in: PROFILE TARGET MAX_TOKENS."""

from __future__ import annotations

import sys

from prefetchd import attach
from prefetchd.targets import load_target


def main() -> None:
    profile, target, max_tokens = sys.argv[1:]
    handle = attach(
        profile,
        engine="cute",
        target=load_target(target),
        max_tokens=int(max_tokens),
        providers=["kda_cute"],
    )
    print("attached" if handle.attached else handle.reason, flush=True)
    sys.stdin.readline()
    handle.close()


if __name__ == "__main__":
    main()
