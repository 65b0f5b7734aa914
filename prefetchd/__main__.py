"""`python -m prefetchd`, for environments whose scripts directory is not on PATH."""

from prefetchd.cli import main

main(prog_name="prefetchd")
