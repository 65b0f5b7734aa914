"""Where an engine asked for a kernel: its own frame, whatever stands between, and never a failure."""

from __future__ import annotations

from typing import Any

import pytest

from prefetchd.observing.call_site import call_site

CODE = "def ask():\n    return call_site()\n\ndef through(inner):\n    return inner()\n"


def module(name: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name, "call_site": call_site}
    exec(compile(CODE, f"/{name}.py", "exec"), names)
    return names


def test_the_engines_own_place_is_told() -> None:
    assert module("engine.model")["ask"]() == "engine.model.ask (/engine.model.py:2)"


@pytest.mark.parametrize(
    "name",
    [
        *("torch.nn.modules", "triton.runtime", "deep_gemm", "vllm.third_party.deep_gemm.utils"),
        *(
            "sitecustomize",
            "prefetchd_post_import",
            "prefetchd.engine_site.sitecustomize",
            "importlib._bootstrap",
        ),
    ],
)
def test_what_stands_between_is_no_call_site(name: str) -> None:
    library, engine = module(name), module("engine")

    assert engine["through"](library["ask"]) == "engine.through (/engine.py:5)"


def test_module_whose_name_is_none_is_told_all_the_same() -> None:
    # As code has it that was made at run time; nothing of it may raise into the engine.
    assert "ask (/5.py:2)" in module(5)["ask"]()
    assert "ask" in module(None)["ask"]()
