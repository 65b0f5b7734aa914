"""FlashInfer's own objects that describe modules: read, and watched while they are made.

Only what the library itself does is used: the text of the build file comes from its own function, and the
directories from its own constants. A library that has them not, or otherwise, is left alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from prefetchd.compilers.flashinfer_calls import CORE, Generator, Module, described_in, key_of
from prefetchd.post_import import install as after_import

ENVIRONMENT = "flashinfer.jit.env"
CLASS = "JitSpecNvcc"
# On a description: the call that made it.
_CALL = "_prefetchd_call"
EMBEDS = "it embeds cubins that FlashInfer makes while it builds; the engine makes this module"

Meet = Callable[[Any], Any]


def manifest_of(spec: Any) -> str:
    """The text of the build file that the library would write for a module."""
    core: Any = sys.modules[CORE]
    return str(
        core.generate_ninja_build_for_op(
            name=spec.name,
            sources=spec.sources,
            extra_cflags=spec.extra_cflags,
            extra_cuda_cflags=spec.extra_cuda_cflags,
            extra_ldflags=spec.extra_ldflags,
            extra_include_dirs=spec.extra_include_dirs,
            needs_device_linking=spec.needs_device_linking,
            **{name: getattr(spec, name) for name in ("extra_cuda_cflags_by_source",) if hasattr(spec, name)},
        )
    )


def module_of(spec: Any, *roots: Path) -> Module:
    """A module as data. `roots`: cache directories around the library's own that its text may name too."""
    own, workspace = library_directories()
    key = key_of(manifest_of(spec), str(spec.name), workspace, (own, *roots))
    call = getattr(spec, _CALL, "it was described before prefetchd watched")
    if embeds(spec):
        call = EMBEDS
    if isinstance(call, Generator):
        return Module(key=key, call=call)
    return Module(key=key, refused=str(call))


def embeds(spec: Any) -> bool:
    """Whether its build file depends on what is made while it is built."""
    return getattr(spec, "embedded_cubin_factory", None) is not None


def library_directories() -> tuple[Path, Path]:
    """The library's cache directory in this process, links resolved as it does; below it the workspace."""
    environment: Any = import_module(ENVIRONMENT)
    own = Path(environment.FLASHINFER_CACHE_DIR)
    return own.resolve(), Path(environment.FLASHINFER_WORKSPACE_DIR).relative_to(own)


@contextlib.contextmanager
def elsewhere(root: Path) -> Iterator[None]:
    """Within it, the library writes below `root` in place of its own cache directory."""
    environment: Any = import_module(ENVIRONMENT)
    own = Path(environment.FLASHINFER_CACHE_DIR)
    names = "CACHE_DIR", "WORKSPACE_DIR", "JIT_DIR", "GEN_SRC_DIR"
    before = {f"FLASHINFER_{name}": getattr(environment, f"FLASHINFER_{name}") for name in names}
    for name, path in before.items():
        setattr(environment, name, root / Path(path).relative_to(own))
    try:
        yield
    finally:
        for name, path in before.items():
            setattr(environment, name, path)


@contextlib.contextmanager
def made() -> Iterator[list[Any]]:
    """Within it, every description that is made is put into the list."""
    owner, found = getattr(import_module(CORE), CLASS), []
    before = owner.__init__

    def describe(spec: Any, *args: Any, **known: Any) -> None:
        before(spec, *args, **known)
        found.append(spec)

    owner.__init__ = describe
    try:
        yield found
    finally:
        owner.__init__ = before


def remember_call(before: Callable[..., None]) -> Callable[..., None]:
    """In place of a description's `__init__`: it keeps the call of the generator that makes it."""

    def describe(spec: Any, *args: Any, **known: Any) -> None:
        before(spec, *args, **known)
        # In an engine nothing may come of it, whatever a release's descriptions refuse to be told.
        with contextlib.suppress(Exception):
            setattr(spec, _CALL, described_in(sys._getframe(1)))

    return describe


@contextlib.contextmanager
def intercepted(meet: Meet) -> Iterator[None]:
    """Within it, the library asks `meet` for each module that it would build, once it is imported.

    One that came ready-made with a package is the library's own business.
    """
    undo: list[Callable[[], None]] = []
    active = True

    def patch(module: ModuleType) -> None:
        owner: Any = getattr(module, CLASS, None)
        if owner is None or not active:
            return
        made_before, load_before = owner.__init__, owner.build_and_load

        def load(spec: Any, *args: Any, **known: Any) -> Any:
            return load_before(spec, *args, **known) if spec.is_aot else meet(spec)

        owner.__init__, owner.build_and_load = remember_call(made_before), load

        def put_back() -> None:
            owner.__init__, owner.build_and_load = made_before, load_before

        undo.append(put_back)

    when_imported(patch)
    try:
        yield
    finally:
        active = False
        for step in undo:
            step()


def when_imported(patch: Callable[[ModuleType], None]) -> None:
    """Calls it with the library's module, now or once it is imported."""
    module = sys.modules.get(CORE)
    if module is not None:
        patch(module)
    else:
        after_import({CORE: patch})
