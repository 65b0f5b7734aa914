"""What every Python under `prefetchd run` gets at its start, with a small stand-in for torch.

The stand-in starts CUDA as torch does, on the null device, so that device and context are asked for by the
real calls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon

from prefetchd.engine_environment import SITE
from prefetchd.null_device.launcher import environment as null_environment
from prefetchd.protocol import Hello, Universe
from prefetchd.targets import load_target

ROOT = Path(__file__).parents[2]
TORCH = """
import ctypes, sys
value = 7
class cuda:
    calls = []
    def _lazy_call(call):
        cuda.calls.append(call)
    def init():
        cuda.driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        assert cuda.driver.cuInit(0) == 0
        for call in cuda.calls:
            call()
    def set_device(number):
        context = ctypes.c_void_p()
        assert cuda.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number) == 0
"""
ENGINE = """
import sys, torch
torch.cuda.init()
torch.cuda.set_device(0)
print("serving", flush=True)
sys.stdin.readline()
"""


class Engine:
    """A Python with the packages of a folder, on the null device, as `prefetchd run` would start it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        (self.folder / "torch.py").write_text(TORCH)
        self.address = f"ipc://{folder}/daemon"

    def environment(self, **variables: str) -> dict[str, str]:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": f"{SITE}:{self.folder}:{ROOT}",
            "PREFETCHD": "1",
            "PREFETCHD_ENDPOINT": self.address,
        }
        child = null_environment(load_target("h200"), base)
        # As after `prefetchd null -- prefetchd run -- ...`: ours in front of the null device's.
        child["PYTHONPATH"] = ":".join([str(SITE), *child["PYTHONPATH"].replace(f"{SITE}:", "").split(":")])
        return {**child, **variables}

    def run(self, program: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *options, "-c", program],
            env=self.environment(**variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def start(self, program: str = ENGINE, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env=self.environment(**variables),
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def engine() -> Iterator[Engine]:
    with TemporaryDirectory(prefix="pd") as folder:
        yield Engine(folder)


def end(process: subprocess.Popen[str]) -> str:
    """Ends it in peace; what it wrote on standard error."""
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    return errors


@contextlib.contextmanager
def daemon_of(engine: Engine) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(engine.address)
    try:
        yield daemon
    finally:
        daemon.close()


def hello_of(engine: Engine, program: str = ENGINE, **variables: str) -> Hello:
    with daemon_of(engine) as daemon:
        process = engine.start(program, **variables)
        try:
            return daemon.next(Hello)
        finally:
            assert end(process) == ""


def test_an_engine_that_uses_cuda_says_which_device_it_really_has(engine: Engine) -> None:
    hello = hello_of(engine)

    assert hello.target == load_target("h200")
    assert (hello.rank, hello.world, hello.interpreter) == (0, 1, sys.executable)


def test_a_launchers_rank_is_reported(engine: Engine) -> None:
    hello = hello_of(engine, RANK="5", WORLD_SIZE="8")

    assert (hello.rank, hello.world) == (5, 8)


def test_torchs_own_rank_wins_over_a_launchers(engine: Engine) -> None:
    group = """
import sys
class distributed:
    is_available = is_initialized = staticmethod(lambda: True)
    get_rank, get_world_size = staticmethod(lambda: 2), staticmethod(lambda: 4)
sys.modules["torch.distributed"] = distributed
"""
    hello = hello_of(engine, group + ENGINE, RANK="5", WORLD_SIZE="8")

    assert (hello.rank, hello.world) == (2, 4)


def test_a_known_engine_is_named(engine: Engine) -> None:
    (engine.folder / "vllm.py").touch()

    assert hello_of(engine, "import vllm" + ENGINE).engine == "vllm"


def test_the_hello_waits_until_a_device_is_chosen(engine: Engine) -> None:
    chooses_later = """
import sys, torch
torch.cuda.init()
print("started", flush=True)
sys.stdin.readline()
torch.cuda.set_device(0)
sys.stdin.readline()
"""
    with daemon_of(engine) as daemon:
        process = engine.start(chooses_later)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert daemon.is_quiet()
        process.stdin.write("\n")
        process.stdin.flush()

        assert daemon.next(Hello).target == load_target("h200")

        end(process)


THREADS = "import threading\nprint([thread.name for thread in threading.enumerate()])"


@pytest.mark.parametrize(
    "program",
    ["pass", "import torch", "import importlib.util\nimportlib.util.find_spec('torch')"],
    ids=["no torch", "torch without CUDA", "torch only looked for"],
)
def test_a_process_that_uses_no_cuda_has_no_thread_and_none_of_our_modules(
    engine: Engine, program: str
) -> None:
    loaded = "import sys\nprint([name for name in sys.modules if name.startswith(('prefetchd.', 'zmq'))])"

    result = engine.run(f"{program}\n{THREADS}\n{loaded}")

    assert (result.stdout, result.stderr) == ("['MainThread']\n[]\n", "")


@pytest.mark.parametrize("value", ["", "0"])
def test_switched_off_nothing_happens(engine: Engine, value: str) -> None:
    result = engine.run(
        "import torch, sys\ntorch.cuda.init()\ntorch.cuda.set_device(0)\n"
        "print(len(torch.cuda.calls), any('AfterImport' in type(one).__name__ for one in sys.meta_path))",
        PREFETCHD=value,
        PREFETCHD_NULL="",
    )

    assert (result.stdout, result.stderr) == ("0 False\n", "")


def test_being_looked_for_first_does_not_lose_the_hook(engine: Engine) -> None:
    hello = hello_of(engine, "import importlib.util\nassert importlib.util.find_spec('torch')" + ENGINE)

    assert hello.target is not None


def test_an_engine_that_attaches_itself_is_left_alone(engine: Engine) -> None:
    announced = """
import prefetchd.attaching, sys, threading, torch
torch.cuda.init()
torch.cuda.set_device(0)
for thread in threading.enumerate():
    if thread.name == "prefetchd-announce":
        thread.join()
print([thread.name for thread in threading.enumerate()])
"""
    assert engine.run(announced).stdout == "['MainThread']\n"


def test_a_hooked_module_looks_as_if_it_were_not(engine: Engine) -> None:
    result = engine.run(
        "import importlib.util\n"
        "spec = importlib.util.find_spec('torch')\n"
        "print(spec.loader.get_filename('torch') == spec.origin)\n"
        "import inspect, torch\n"
        "print(torch.value, type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__)\n"
        "print(len(inspect.getsource(torch)) > 100)\n"
    )

    assert result.stdout == "True\n7 SourceFileLoader True\nTrue\n", result.stderr


def test_an_import_that_fails_and_is_tried_again_is_still_hooked(engine: Engine) -> None:
    (engine.folder / "torch.py").write_text(
        "import os\nif 'FAIL' in os.environ:\n    raise RuntimeError('not now')\n" + TORCH
    )
    result = engine.run(
        "import os\nos.environ['FAIL'] = '1'\n"
        "try:\n    import torch\nexcept RuntimeError as error:\n    print(error)\n"
        "del os.environ['FAIL']\nimport torch\nprint(len(torch.cuda.calls))"
    )

    assert result.stdout == "not now\n1\n", result.stderr


def test_the_hidden_sitecustomize_runs_too_and_ours_with_the_null_devices_once_each(engine: Engine) -> None:
    (engine.folder / "sitecustomize.py").write_text("print('the hidden one', __name__)\n")

    result = engine.run(
        "import sys, sitecustomize\n"
        "print(sitecustomize.__file__)\n"
        "print(sum('AfterImport' in type(one).__name__ for one in sys.meta_path))"
    )

    assert result.stdout == f"the hidden one sitecustomize\n{engine.folder}/sitecustomize.py\n2\n"
    assert result.stderr == ""


def test_a_hidden_sitecustomize_that_fails_is_told_as_python_tells_it(engine: Engine) -> None:
    (engine.folder / "sitecustomize.py").write_text("raise ValueError('mine')\n")

    result = engine.run("print('serving')")

    assert result.stdout == "serving\n"
    assert result.stderr.splitlines() == [
        "Error in sitecustomize; set PYTHONVERBOSE for traceback:",
        "ValueError: mine",
    ]


# What in an engine's process is broken, and what the one line says. Each is put in front of the program.
BROKEN = {
    "prefetchd is not installed": ("sys.modules['prefetchd'] = None", "install prefetchd for"),
    "msgspec is not installed": ("sys.modules['msgspec'] = None", "install prefetchd for"),
    "ZeroMQ is not installed": ("sys.modules['zmq'] = None", "install prefetchd for"),
    "a setting is wrong": ("os.environ['PREFETCHD_WAIT_MS'] = 'long'", "PREFETCHD_WAIT_MS"),
    "the settings file is missing": ("os.environ['PREFETCHD_CONFIG'] = '/nowhere'", "/nowhere"),
    "the profile is missing": ("os.environ['PREFETCHD_PROFILE'] = '/nowhere'", "/nowhere"),
    "the endpoint is wrong": ("os.environ['PREFETCHD_ENDPOINT'] = 'nonsense'", "must start with ipc://"),
    "the endpoint is elsewhere": ("os.environ['PREFETCHD_ENDPOINT'] = 'tcp://h:1'", "daemon of its own node"),
    "torch has no such call": ("import torch\ndel torch.cuda._lazy_call", ""),
    "no thread can be started": (
        "import threading\nthreading.Thread.start = lambda self: 1 / 0",
        "division by zero",
    ),
    "no driver library is loaded": (
        "import ctypes\nreal = ctypes.CDLL\n"
        "def cdll(name, mode=0):\n"
        "    if mode & os.RTLD_NOLOAD:\n        raise OSError('not loaded')\n"
        "    return real(name, mode=mode)\n"
        "ctypes.CDLL = cdll",
        "no libcuda.so.1 is loaded",
    ),
    "the logger of the engine fails": (
        "import logging\nclass Bad(logging.Handler):\n    def emit(self, record):\n        1 / 0\n"
        "logging.getLogger().addHandler(Bad())\nos.environ['PREFETCHD_WAIT_MS'] = 'long'",
        "",
    ),
    "standard error is closed": ("sys.stderr.close()\nsys.modules['prefetchd'] = None", ""),
    "there is no standard error": ("sys.stderr = None\nsys.modules['prefetchd'] = None", ""),
}
JOINED = """
import torch
torch.cuda.init()
torch.cuda.set_device(0)
import threading
# What a strict engine does with a thread that fails.
threading.excepthook = lambda arguments: os._exit(9)
for thread in threading.enumerate():
    if thread.name == "prefetchd-announce" and thread.ident:
        thread.join()
print("serving", flush=True)
"""


@pytest.mark.parametrize("way", BROKEN)
def test_the_engine_runs_however_prefetchd_is_broken_in_it(way: str, engine: Engine) -> None:
    broken, said = BROKEN[way]

    result = engine.run(f"import os, sys\n{broken}\n{JOINED}")

    assert (result.returncode, result.stdout) == (0, "serving\n"), result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 1


@pytest.fixture
def copied(engine: Engine) -> Path:
    """A copy of our directory and what lies beside it, to be broken; the engine uses it."""
    package = engine.folder / "copy"
    shutil.copytree(SITE, package / "engine_site")
    shutil.copy(SITE.parent / "post_import.py", package)
    return package


@pytest.mark.parametrize("content", [None, "this is no Python", "raise OSError('broken')", ""])
def test_the_engine_runs_when_the_hooks_file_is_broken(
    engine: Engine, copied: Path, content: str | None
) -> None:
    if content is None:
        (copied / "post_import.py").unlink()
    else:
        (copied / "post_import.py").write_text(content)

    result = engine.run(
        "import torch\nprint(torch.value)", PYTHONPATH=f"{copied}/engine_site:{engine.folder}"
    )

    assert result.stdout == "7\n"
    assert len(result.stderr.splitlines()) == 1
    assert "goes on alone" in result.stderr


def test_the_start_of_python_is_not_felt(engine: Engine) -> None:
    # Modules that take milliseconds each to import, in every process that an engine starts.
    heavy = ("typing", "pathlib", "contextlib", "threading", "logging", "importlib.util", "ctypes")
    program = f"import sys; print([name for name in {heavy} if name in sys.modules])"

    # -S, and ours by hand: what else is installed here imports what it likes.
    result = engine.run(f"import sitecustomize\n{program}", "-S", PREFETCHD_NULL="", PYTHONPATH=str(SITE))

    assert result.stdout == "[]\n", result.stderr


def test_with_a_profile_the_daemon_is_told_all_that_the_model_may_launch(engine: Engine) -> None:
    profile = ROOT / "tests/gpu/deep_gemm.profile.toml"

    with daemon_of(engine) as daemon:
        process = engine.start(PREFETCHD_PROFILE=str(profile), RANK="1", WORLD_SIZE="2")
        universe = daemon.next(Universe)
        end(process)

    assert universe.providers == ("deep_gemm",)
