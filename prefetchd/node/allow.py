"""What a hello may bring about: nothing that this daemon's own installation and settings do not allow.

A peer *reports* its interpreter, package directories and cache directories. The daemon starts its own
interpreter, imports from its own packages and writes only into directories that are its user's and that
nobody else can turn into something else. The subtle rule: a report is looked up here, never used; what is not
here becomes a `Mismatch` that names the field and the line that would allow it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from prefetchd.compilers.base import ROOT_FIELDS
from prefetchd.config import Settings
from prefetchd.kernel_packages import HOME_PACKAGES, home_problem
from prefetchd.protocol import Hello, Mismatch

# A fingerprint's field that is a variable of the environment, such as `deep_jit.env.NVCC_APPEND_FLAGS`.
VARIABLE_MARK = ".env."

# `~/.triton/cache` is the deepest default of a library: two directories that its first use makes.
MADE_LEVELS = 2


class AllowList(msgspec.Struct, frozen=True, kw_only=True):
    """What is allowed. `interpreters` begins with the daemon's own."""

    interpreters: tuple[str, ...]
    library_directories: tuple[str, ...]
    # Named by the user, who answers for them.
    cache_roots: frozenset[str]
    # Those whose modules a request may have imported, by its home.
    kernel_packages: tuple[str, ...]
    uid: int

    def differences(self, hello: Hello) -> list[Mismatch]:
        """What of the reported places is not allowed, apart from cache directories."""
        found = []
        if hello.interpreter and self._allowed(hello.interpreter) is None:
            found.append(
                Mismatch(
                    compiler="",
                    field="interpreter",
                    engine=hello.interpreter,
                    helper=self.interpreters[0],
                    fix=_line("allow_interpreters", hello.interpreter)
                    + ", or start the daemon with the engine's interpreter",
                )
            )
        for directory in hello.library_directories:
            if directory not in self.library_directories:
                found.append(
                    Mismatch(
                        compiler="",
                        field="library_directories",
                        engine=directory,
                        helper=":".join(self.library_directories),
                        fix=_line("allow_library_directories", directory),
                    )
                )
        return found

    def interpreter_for(self, hello: Hello) -> str:
        """What to start a helper with for this peer: its own where that is allowed, else the daemon's."""
        return self._allowed(hello.interpreter) or self.interpreters[0]

    def _allowed(self, interpreter: str) -> str | None:
        """As it is spelled on the list; `python` and `python3` of one environment are one interpreter."""
        if "\0" in interpreter:
            # No path, and the system's calls for paths raise for it.
            return None
        place, real = Path(interpreter).parent, os.path.realpath(interpreter)
        for known in self.interpreters:
            if known == interpreter or (Path(known).parent == place and os.path.realpath(known) == real):
                return known
        return None

    def extra_directories(self, hello: Hello) -> tuple[str, ...]:
        """The peer's package directories that a user has allowed beside the daemon's own."""
        own = own_library_directories()
        return tuple(
            name for name in hello.library_directories if name in self.library_directories and name not in own
        )

    def home_problem(self, request: object) -> str:
        """Why a request is not traced: its kernels' home is nobody's we know. Empty if it may be."""
        return home_problem(getattr(request, "home", None), self.kernel_packages)

    def root_problem(self, text: str) -> str | None:
        """Why nothing is published in this directory; None if it may be."""
        if text in self.cache_roots:
            return None
        return directory_problem(text, self.uid)


def own_allow_list(settings: Settings) -> AllowList:
    """The daemon's own, with what its settings add."""
    return AllowList(
        interpreters=(sys.executable, *settings.allow_interpreters),
        library_directories=(*own_library_directories(), *settings.allow_library_directories),
        cache_roots=frozenset(settings.allow_cache_roots),
        kernel_packages=(*HOME_PACKAGES, *settings.replay_packages),
        uid=os.getuid(),
    )


def own_library_directories() -> tuple[str, ...]:
    """Where this interpreter finds installed packages."""
    return tuple(
        dict.fromkeys(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    )


def directory_problem(text: str, uid: int) -> str | None:
    """Why a directory is not this user's alone to decide about; None if it is, or can be made so.

    One that is not there yet, as a library's default before its first use, is made in a directory of this
    user's own, not deeper than such a default lies: what a hello says shall not plant directories anywhere.
    Every directory on the way is looked at: whoever could replace one of them could lead us elsewhere.
    """
    path = Path(text)
    if not path.is_absolute() or os.path.normpath(text) != text or "\0" in text:
        return f"{text!r} is not an absolute path in its simplest form"
    owner, deepest, open_to_all = -1, path, False
    for part in (*reversed(path.parents), path):
        try:
            found = part.lstat()
        except FileNotFoundError:
            break
        except OSError as error:
            return f"{part}: {error.strerror}"
        if stat.S_ISLNK(found.st_mode):
            return f"{part} is a symbolic link"
        if not stat.S_ISDIR(found.st_mode):
            return f"{part} is not a directory"
        if found.st_uid not in (0, uid):
            return f"{part} belongs to user {found.st_uid}, not to {uid}"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"{part} can be written by everyone"
        owner, deepest, open_to_all = found.st_uid, part, bool(found.st_mode & stat.S_IWOTH)
    if deepest == path:
        if open_to_all:
            return f"{path} can be written by everyone"
    elif open_to_all or deepest == Path(path.anchor):
        return f"{path} is not there, and nothing is made in {deepest}, which is nobody's own"
    elif len(path.relative_to(deepest).parts) > MADE_LEVELS:
        return f"{path} is not there, nor is the directory that should hold it"
    return None if owner == uid else f"{text} does not lie in a directory of user {uid}"


def compare(compiler: str, engine: Mapping[str, str], helper: Mapping[str, str]) -> Iterable[Mismatch]:
    """Where an engine's fingerprint contradicts the helper's. What it does not report is no difference.

    Except for variables: an engine that reports a compiler reports all its variables, so one more in the
    helper is a difference too.
    """
    names = set(engine) | {name for name in helper if VARIABLE_MARK in name}
    for name in sorted(names - ROOT_FIELDS):
        theirs, ours = engine.get(name, ""), helper.get(name, "")
        if theirs != ours:
            yield Mismatch(compiler=compiler, field=name, engine=theirs, helper=ours, fix=_fix(name, theirs))


def root_mismatch(compiler: str, root: str, instead: str, problem: str) -> Mismatch:
    """The report of a cache directory that is not written to."""
    return Mismatch(
        compiler=compiler,
        field="cache_root",
        engine=root,
        helper=instead,
        fix=f"{problem}; put that right, or {_line('allow_cache_roots', root)}",
    )


def _fix(name: str, value: str) -> str:
    _, mark, variable = name.partition(VARIABLE_MARK)
    if not mark:
        return "start the daemon in the engine's environment, with the same interpreter and packages"
    if not value:
        return f"unset {variable} in the daemon's environment, or set it in the engine's"
    return f"add to the daemon's prefetchd.toml under [helper_environment]: {variable} = {value!r}"


def _line(setting: str, value: str) -> str:
    return f"add to the daemon's prefetchd.toml: {setting} = [{value!r}]"
