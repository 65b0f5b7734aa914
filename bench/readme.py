"""Writes the generated parts of README.md and docs/benchmarks.md from the stored results.

    python bench/readme.py [--check] [--root DIR]

With `--check` nothing is written; status 1 says that a document does not have what the results say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tables import engines, reports, rows
from tables.markdown import UnknownPart, filled
from tables.rows import Stored

DOCUMENTS = ("README.md", "docs/benchmarks.md")
PARTS = {
    "results": rows.results,
    "deep-gemm-traffic": reports.deep_gemm_traffic,
    "lead-times": reports.lead_times,
    "first-contact": reports.first_contact,
    "traffic-replay": reports.traffic_replay,
    "scaling": reports.scaling,
    "vllm-starts": engines.vllm_starts,
    "vllm-bakes": engines.vllm_bakes,
    "vllm-scheduler": engines.vllm_scheduler,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="of the repository")
    options = parser.parse_args()
    stored = Stored(options.root / "docs/results")
    parts = {name: part(stored) for name, part in PARTS.items()}
    status = 0
    for name in DOCUMENTS:
        path = options.root / name
        text = path.read_text(encoding="utf-8")
        try:
            wanted = filled(text, parts)
        except UnknownPart as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if wanted != text and options.check:
            print(f"{name} is not what the results say; run: python bench/readme.py", file=sys.stderr)
            status = 1
        elif wanted != text:
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
