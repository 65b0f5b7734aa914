"""What the tests of `warm` share: an nvcc that takes no time, profiles of a few variants, and the commands.

The fast nvcc leaves a real cubin of the right architecture, made once by the real nvcc from an empty kernel:
all that our checks and the null device can see of a cubin is right, and a test takes seconds. What each test
wants to go wrong in it is a few lines of sh.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PREFETCHD = Path(sys.executable).with_name("prefetchd")
ENGINE = Path(__file__).with_name("engine.py")
# Lets another user run an interpreter that only root may read; it gives no right to write anywhere.
READ_ANYTHING = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
# Far beyond what any of them needs: a command that is still there has hung.
TIME_LIMIT_S = 120

NVCC = """\
#!/bin/sh
here={here}
for argument; do
    case $argument in
    --version | -V)
        {version_hook}
        cat $here/version.txt
        exit 0
        ;;
    esac
done
for argument; do
    case $previous in -o | --output-file) output=$argument ;; esac
    case $argument in
    --output-file=*) output=${{argument#*=}} ;;
    *.cu) source=$argument ;;
    *sm_100*) cubin=$here/100.cubin ;;
    *sm_90*) cubin=$here/90.cubin ;;
    esac
    previous=$argument
done
echo "${{source}}" >>$here/compiles
{hook}
cp "$cubin" "$output"
"""

HEAD = """\
version = 1
model = "test"
architecture = "test"
tp = 1
ep = 1
dp = 1
quantization = "fp8"
top_k = 2
context_tokens = 1
"""
SITE = """
[[gemms]]
name = "{name}"
op = "{op}"
n = {n}
k = {k}
m = "{m}"
"""


def profile_text(*sites: str) -> str:
    return HEAD + "".join(sites)


def site(name: str = "dense", op: str = "fp8_gemm_nt", n: int = 512, k: int = 512, m: str = "tokens") -> str:
    return SITE.format(name=name, op=op, n=n, k=k, m=m)


# Four variants on h200: three layouts, and the kernel that transposes scales, which compiles last.
SMALL = profile_text(site(m="1..4, 64, 300"))
SMALL_VARIANTS = 4
# Every kind of site that the tiny engine can call.
MIXED = profile_text(
    site(m="1..130"),
    site("experts", "m_grouped_fp8_gemm_nt_contiguous", 256, 512, "routed") + "groups = 4\n",
    site("experts.decode", "m_grouped_fp8_gemm_nt_masked", 256, 512, "expected") + "groups = 4\n",
    site("bf16", "bf16_gemm_nt", 256, 512) + "[gemms.options]\ndeterministic = true\n",
)
TOKENS = 64


@dataclass(frozen=True)
class Line:
    """A line of the library, and the files of its entries, the one that decides a hit last."""

    name: str
    files: tuple[str, ...]
    directory: Path | None = None

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.directory)} if self.directory else {}


NEW = Line("new", ("kernel.cu", "kernel.cubin", "meta.json", ".committed"))


def old_line() -> Line:
    """Fails, and never skips, where `make env` has not installed it."""
    directory = Path(os.environ.get("PREFETCHD_TEST_OLD_LINE") or ROOT / ".lines/deep_gemm-0.1.7")
    if not (directory / "deep_gemm").is_dir():
        pytest.fail(f"{directory} holds no deep_gemm of the older line: run `make env`")
    return Line("old", ("kernel.cu", "kernel.cubin"), directory)


class Nvcc:
    """An nvcc in a directory of its own, and what was asked of it."""

    def __init__(self, directory: Path, templates: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.path = directory / "nvcc"
        for name in ("version.txt", "90.cubin", "100.cubin"):
            shutil.copy(templates / name, directory)
        (directory / "compiles").touch()
        (directory / "compiles").chmod(0o666)
        self.behave()

    def behave(self, hook: str = "", *, version_hook: str = "") -> None:
        """`hook` runs before each compile, with $source and $output; `version_hook` before each --version."""
        text = NVCC.format(here=self.directory, hook=hook, version_hook=version_hook)
        self.path.write_text(text)
        self.path.chmod(0o755)

    def compiles(self) -> list[str]:
        return (self.directory / "compiles").read_text().split()

    def event(self, name: str = "event") -> str:
        """A sh line that says the script has got there, and waits until `wait_for_event` hears it."""
        os.mkfifo(self.directory / name)
        return f"echo here >{self.directory / name}"

    def wait_for_event(self, process: subprocess.Popen[str], name: str = "event") -> None:
        """Returns when the line is reached; fails when the process ends before."""
        pipe = os.open(self.directory / name, os.O_RDONLY | os.O_NONBLOCK)
        end = os.pidfd_open(process.pid)
        ready, _, _ = select.select([pipe, end], [], [], TIME_LIMIT_S)
        os.close(end)
        os.close(pipe)
        if pipe not in ready:
            process.kill()
            pytest.fail(f"the command ended or hung before: {process.communicate()}")

    def gate(self) -> tuple[str, Path]:
        """A sh line that waits until something is written to the file."""
        os.mkfifo(self.directory / "gate")
        return f"read opened <{self.directory}/gate", self.directory / "gate"


def make_templates(directory: Path) -> None:
    """What every `Nvcc` copies: the real version text and an empty kernel for each architecture."""
    real = shutil.which("nvcc")
    assert real, "these tests need nvcc on PATH"
    version = subprocess.run([real, "--version"], capture_output=True, text=True, check=True).stdout
    (directory / "version.txt").write_text(version)
    source = directory / "empty.cu"
    source.write_text('extern "C" __global__ void empty() {}\n')
    for number, architecture in ((90, "sm_90a"), (100, "sm_100a")):
        output = str(directory / f"{number}.cubin")
        subprocess.run([real, "-cubin", f"-arch={architecture}", "-o", output, str(source)], check=True)


@dataclass(frozen=True)
class Run:
    """How a command ended. `result` is the JSON object of standard output."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = self.result["providers"]["deep_gemm"]
        return found

    def counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.figures[name] for name in names)


@dataclass
class Bench:
    """A place with a cache, an nvcc and a profile, and the commands on them."""

    place: Path
    nvcc: Nvcc
    line: Line = NEW
    target: str = "h200"
    user: int | None = None

    def __post_init__(self) -> None:
        self.cache = self.place / "cache"
        self.temporary = self.place / "tmp"
        self.temporary.mkdir(mode=0o777)
        self.temporary.chmod(0o777)
        self.profile = self.place / "test.profile.toml"
        self.profile.write_text(SMALL)

    def environment(self, changes: Mapping[str, str | None] = {}) -> dict[str, str]:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.place),
            "TMPDIR": str(self.temporary),
            "DG_JIT_CACHE_DIR": str(self.cache),
            "DG_JIT_NVCC_COMPILER": str(self.nvcc.path),
            **self.line.environment(),
        }
        merged: dict[str, str | None] = {**base, **changes}
        return {name: value for name, value in merged.items() if value is not None}

    def command(self, *arguments: str) -> list[str]:
        become = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *READ_ANYTHING]
        what = [str(PREFETCHD), "warm", "--target", self.target, "--provider", "deep_gemm", "--json"]
        where = [] if "--model" in arguments else ["--profile", str(self.profile)]
        return [*(become if self.user else []), *what, *where, *arguments]

    def start(self, *arguments: str, changes: Mapping[str, str | None] = {}) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments), env=self.environment(changes), cwd=self.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals,
        )  # fmt: skip

    def warm(self, *arguments: str, changes: Mapping[str, str | None] = {}) -> Run:
        return ended(self.start(*arguments, changes=changes))

    def engine(self, max_tokens: int = TOKENS) -> dict[str, Any]:
        """The tiny engine on the null device, with an nvcc that fails every compile; its result."""
        self.nvcc.behave("exit 1")
        result = self.place / "engine.json"
        command = [str(PREFETCHD), "null", "--target", self.target, "--", sys.executable, str(ENGINE)]
        done = subprocess.run(
            [*command, str(self.profile), str(max_tokens), str(result)], env=self.environment(),
            cwd=self.place, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def entries(self, cache: Path | None = None) -> list[Path]:
        return sorted((cache or self.cache).glob("cache/*"))

    def leftovers(self) -> list[Path]:
        """Whatever a run may not leave behind: staging directories, traces, sockets, nvcc's own files."""
        found = [
            *self.cache.glob(".prefetchd/owner-*"),
            *self.temporary.glob("prefetchd-*/.prefetchd/owner-*"),
        ]
        return found + [path for path in self.temporary.iterdir() if not path.name.startswith("prefetchd-")]


def heed_signals() -> None:
    """Tests in a script's background or under `nohup` ignore these, and so would whatever they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ended(process: subprocess.Popen[str]) -> Run:
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the command did not end within {TIME_LIMIT_S} s: {err}")
    return Run(process.returncode, out, err)


@dataclass
class Warmed:
    """A cache filled once, and the runs that did it. Tests copy the cache before they change it."""

    bench: Bench
    dry: Run
    first: Run

    def copy(self, bench: Bench) -> Bench:
        """`bench` with this cache's content and profile."""
        shutil.copytree(self.bench.cache, bench.cache)
        shutil.copy(self.bench.profile, bench.profile)
        return bench
