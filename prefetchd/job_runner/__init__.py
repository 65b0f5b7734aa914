"""The C program every compile runs under: own process group, limits, and an end when its parent ends."""

from pathlib import Path

JOB_RUNNER = Path(__file__).parent / "job_runner"
