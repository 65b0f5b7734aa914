"""An engine that attaches and stays until a line comes in: PROFILE TARGET MAX_TOKENS STATE_SLOTS."""

from __future__ import annotations

import sys

from prefetchd import attach
from prefetchd.targets import load_target


def main() -> None:
    profile, target, max_tokens, state_slots = sys.argv[1:]
    handle = attach(
        profile,
        engine="cute",
        target=load_target(target),
        max_tokens=int(max_tokens),
        providers=["kda_cute"],
        state_slots=int(state_slots),
    )
    print("attached" if handle.attached else handle.reason, flush=True)
    sys.stdin.readline()
    handle.close()


if __name__ == "__main__":
    main()
