"""What enters a Triton cache key, named part by part, so that two keys that differ can say where.

A key is one digest over the library's own code, the kernel's source and specialization, the backend (ptxas'
version text and the architecture), the options and every cache-invalidating variable that is set. It is
always computed by the library itself (`triton_capture.py` listens in); here its ingredients are only kept
beside it. The subtle rule: a variable counts when it is set at all, even to its default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Annotated, Any

import msgspec

# Records of keys are read from files that anyone may have written. The longest text is ptxas' version.
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Texts = Annotated[dict[Text, Text], msgspec.Meta(max_length=256)]


class KeyParts(msgspec.Struct, frozen=True, kw_only=True):
    """The ingredients of one key. `options` holds each option's text; the library's digest is beside it."""

    version: Text
    library: Text
    source: Text
    backend: Text
    architecture: int
    options: Texts
    options_digest: Text
    environment: Texts
    # A pipeline hook set in Python code adds its own text to the key.
    stages_hook: bool

    def fingerprint(self) -> dict[str, str]:
        """The parts that do not depend on the kernel, one named field each."""
        return {
            "triton.version": self.version,
            "triton.library": self.library,
            "triton.backend": self.backend,
            "triton.stages_hook": str(self.stages_hook),
            **{f"triton.env.{name}": value for name, value in sorted(self.environment.items())},
        }

    def differences(self, here: KeyParts) -> Iterator[str]:
        """One line for each field in which `here` is not what was recorded in `self`."""
        yield from differences(self.fingerprint(), here.fingerprint())
        if self.options_digest != here.options_digest:
            recorded = {f"triton.option.{name}": value for name, value in self.options.items()}
            found = {f"triton.option.{name}": value for name, value in here.options.items()}
            named = list(differences(recorded, found))
            yield from named or [
                "triton.options: equal by name, but the content of a file they name (libdevice) differs"
            ]
        if self.source != here.source:
            yield (
                "triton.source: the kernel's source, one it calls, a global it reads or its specialization "
                "is not what was recorded; import the very module the engine imports"
            )


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """One line for each name whose value differs or which only one side has."""
    for name in sorted({*recorded, *here}):
        if recorded.get(name) != here.get(name):
            yield f"{name}: recorded {_shown(recorded.get(name))}, here {_shown(here.get(name))}"


def key_parts(source: Any, backend: Any, options: Any, environment: Mapping[str, str]) -> KeyParts:
    """The parts of a key from the very arguments with which the library computes it."""
    import triton

    texts, digest = _described(options)
    return KeyParts(
        version=triton.__version__,
        library=library_digest(),
        source=source.hash(),
        backend=backend.hash(),
        architecture=backend.target.arch,
        options=dict(texts),
        options_digest=digest,
        environment=dict(environment),
        stages_hook=stages_hook_is_set(),
    )


# A process knows some dozen sets of options, and meets one of them at each compile of its engine.
@lru_cache(maxsize=256)
def _described(options: Any) -> tuple[Mapping[str, str], str]:
    """Each option's text, and the library's digest of all. Options are frozen, so equal ones are the same."""
    return {name: str(value) for name, value in vars(options).items()}, options.hash()


@cache
def library_digest() -> str:
    """A short name for the library's code: the text the library itself puts in a key is 4 KB."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()


def stages_hook_is_set() -> bool:
    """Whether someone changes the compile pipeline of this process, which enters the key since 3.7."""
    from triton import knobs

    return getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None


def process_fingerprint(capability: int) -> dict[str, str]:
    """What every key made in this process for that architecture has in common."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return {
        "triton.version": triton.__version__,
        "triton.library": library_digest(),
        "triton.backend": make_backend(GPUTarget("cuda", capability, 32)).hash(),
        "triton.stages_hook": str(stages_hook_is_set()),
        **{f"triton.env.{name}": text for name, text in sorted(get_cache_invalidating_env_vars().items())},
    }


def _shown(value: str | None) -> str:
    if value is None:
        return "unset"
    lines = value.strip().splitlines()
    return repr(value if len(value) < 200 else f"{lines[0][:80]} ... {lines[-1][-100:]}")
