"""Runs at the start of every Python under `prefetchd run`, and runs the one it hides on PYTHONPATH.

Without `PREFETCHD` it does nothing else. With it, a process that imports torch *and then uses CUDA* announces
itself to the daemon, from a thread of its own, and one that imports a library which compiles kernels has that
observed; any other process never notices. The subtle rule: this file
lies in somebody else's program. It imports nothing heavy, torch least of all, and whatever is missing or
broken ends in one line on standard error, never in an exception.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

# As `typing` has it, without importing that.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# Python makes the entries of PYTHONPATH absolute before it looks there.
HERE = __file__.rpartition("/")[0]
# As in `config.py`, which an engine's interpreter need not be able to import.
ENABLED = os.environ.get("PREFETCHD", "") not in ("", "0")
OBSERVE = os.environ.get("PREFETCHD_OBSERVE", "") not in ("0", "false")
FAIL_FAST = os.environ.get("PREFETCHD_ON_ENGINE_COMPILE", "") == "error"


def load_post_import() -> ModuleType:
    """`prefetchd.post_import` by its file: prefetchd need not be installed for this interpreter."""
    name = "prefetchd_post_import"
    loader = SourceFileLoader(name, f"{HERE.rpartition('/')[0]}/post_import.py")
    module = type(sys)(name)
    loader.exec_module(module)
    return module


def complain(error: Exception, what: str = "does not announce itself to the daemon") -> None:
    """One line for people; a standard error that is closed or odd is no reason to fail."""
    fix = f"; install prefetchd for {sys.executable}" if isinstance(error, ImportError) else ""
    try:
        sys.stderr.write(
            f"prefetchd: process {os.getpid()} {what} and goes on alone: "
            f"{type(error).__name__}: {error}{fix}\n"
        )
    except Exception:
        return


def on_torch(torch: ModuleType) -> None:
    """Has torch call us once CUDA is up in this process, since only then it is known to run kernels."""
    try:
        torch.cuda._lazy_call(on_cuda)
    except Exception as error:
        complain(error)


def on_cuda() -> None:
    """Returns at once: the rest takes place in a thread that the engine never waits for."""
    try:
        import threading

        threading.Thread(target=announce, name="prefetchd-announce", daemon=True).start()
    except Exception as error:
        complain(error)


def announce() -> None:
    """The thread."""
    try:
        from prefetchd.announcing import announce

        announce()
    except Exception as error:
        complain(error)


def on_library(module: ModuleType) -> None:
    """A library that compiles kernels has been imported."""
    try:
        from prefetchd.observing.watch import library_imported

        library_imported(module)
    except Exception as error:
        complain(error, f"does not observe {module.__name__}")


def end() -> None:
    """Registered before any other such function, so the last to run: in fail-fast mode, the exit status.

    A process that ends badly by itself has another status than 0 already, or this one then.
    """
    watching = sys.modules.get("prefetchd.observing.watch")
    status = watching.status_at_exit() if watching is not None else 0
    if status:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                continue
        os._exit(status)


try:
    post_import: ModuleType | None = load_post_import()
    if post_import is not None and ENABLED:
        observed = dict.fromkeys(post_import.OBSERVED, on_library) if OBSERVE else {}
        post_import.install({"torch": on_torch, **observed})
        if OBSERVE and FAIL_FAST:
            import atexit

            atexit.register(end)
except Exception as error:
    post_import = None
    complain(error)

if post_import is not None:
    # Not guarded: what the user's own raises is treated as it would be without us.
    post_import.run_hidden_sitecustomize(HERE)
