"""Programs that a test starts and that answer with JSON, as the last line they print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 300.0


def answer_of(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    given: str = "",
    directory: Path | None = None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """Runs this Python with `arguments`, `given` as its input; fails with what it complained of."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, input=given, cwd=directory, capture_output=True,
        text=True, check=False, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
