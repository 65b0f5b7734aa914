"""Places to work in that every user may enter, the fast nvcc, and a cache warmed once a combination."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warming import MIXED, NEW, TOKENS, Bench, Line, Nvcc, Warmed, ended, make_templates, old_line


@pytest.fixture(scope="session")
def open_place() -> Iterator[Path]:
    """Pytest's own temporary directories are closed to other users, and too long for a socket's path."""
    place = Path(tempfile.mkdtemp(prefix="pt-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def templates(open_place: Path) -> Path:
    directory = open_place / "templates"
    directory.mkdir()
    make_templates(directory)
    return directory


@pytest.fixture(scope="session")
def new_bench(open_place: Path, templates: Path) -> Callable[..., Bench]:
    def make(name: str, line: Line = NEW, target: str = "h200") -> Bench:
        place = Path(tempfile.mkdtemp(prefix=name[:4], dir=open_place))
        place.chmod(0o755)
        return Bench(place, Nvcc(place / "nvcc", templates), line, target)

    return make


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """The new line on h200, an empty cache, and a profile of four variants."""
    return new_bench("bench")


@pytest.fixture(params=["new", "old"])
def line(request: pytest.FixtureRequest) -> Line:
    return NEW if request.param == "new" else old_line()


@pytest.fixture(scope="session")
def warmed(new_bench: Callable[..., Bench]) -> Callable[[Line, str], Warmed]:
    made: dict[tuple[str, str], Warmed] = {}

    def get(line: Line, target: str) -> Warmed:
        key = (line.name, target)
        if key not in made:
            bench = new_bench("warmed", line, target)
            bench.profile.write_text(MIXED)
            limit = ("--max-tokens", str(TOKENS))
            # Side by side: a dry run looks at a cache of its own, which nothing fills.
            other = {"DG_JIT_CACHE_DIR": str(bench.place / "other")}
            dry = bench.start(*limit, "--dry-run", changes=other)
            made[key] = Warmed(bench, first=bench.warm(*limit), dry=ended(dry))
        return made[key]

    return get
