"""What the tests measured, for the README's tables: appended to the file that `PREFETCHD_VLLM_RESULTS` names.

    PREFETCHD_VLLM_RESULTS=docs/results/vllm.json make test-vllm && python bench/readme.py

Times on the null device are those of this machine's processor; counts are those of any engine.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_place import Place, Served

VARIABLE = "PREFETCHD_VLLM_RESULTS"
BENCH = Path(__file__).parents[2] / "bench"


def start_of(served: Served) -> dict[str, Any]:
    """One start: until it was up, its first prompt and all of them, and what it compiled itself."""
    return {
        "up_s": served.up_s,
        "first_prompt_s": served.prompt_s[0],
        "prompts_s": round(sum(served.prompt_s), 2),
        "compiles": dict(Counter(record.compiler for record in served.records)),
    }


def baked(manifest: Any) -> dict[str, Any]:
    """What a bake made, and how long each of its parts took."""
    return {
        "variants": dict(Counter(artifact["compiler"] for artifact in manifest["artifacts"])),
        "seconds": manifest["seconds"],
    }


def note_model(part: str, place: Place, **facts: Any) -> None:
    """Appends one run of a model on a target."""
    note(part, model=place.model.name, target=place.target, **facts)


def note(part: str, **facts: Any) -> None:
    """Appends one run; nothing where nobody asks for it."""
    if not (path := os.environ.get(VARIABLE)):
        return
    sys.path.append(str(BENCH))
    from tables.results import append, described, load_average

    run = described(null=True, part=part, **facts)
    append(Path(path), {**run, "command": "make test-vllm", "load": load_average()})
