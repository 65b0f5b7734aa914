"""An engine on the null device whose Triton is observed. Usage: observed_engine.py CALLS [options].

CALLS are names of `observed_calls`, with commas. Others' hooks are set before ours (`--before`) and after
(`--after`), as vLLM's and SGLang's monitors do. The answer is one JSON object on the last line: what the
observer was told, and what the engine itself saw.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from typing import Any

import msgspec
from observed_calls import named

from prefetchd.observer import EngineCompiled, Observer
from prefetchd.observing.call_site import call_site
from prefetchd.observing.triton import TritonAdaptor
from prefetchd.shapelog import Record, encode_record
from prefetchd.winners import Winner


class Heard:
    """What the observer reports, kept."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.winners: list[Winner] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def winner(self, winner: Winner) -> None:
        self.winners.append(winner)

    def __getattr__(self, _: str) -> Any:
        """Whatever else it has to say."""
        return lambda *args, **named: None


class Others:
    """Somebody else's hooks, with a word of their own each; `raising` ones fail."""

    def __init__(self, *, chain: bool, raising: bool = False) -> None:
        self.heard: list[str] = []
        self.chain, self.raising = chain, raising

    def hook(self, name: str, owner: Any, attribute: str) -> None:
        previous = getattr(owner, attribute, None)

        def hook(*args: Any, **known: Any) -> Any:
            self.heard.append(name)
            if self.raising:
                raise RuntimeError(f"{name} of somebody else")
            return previous(*args, **known) if self.chain and previous else None

        setattr(owner, attribute, hook)

    def set(self, *names: str) -> None:
        from triton import knobs

        places = {
            "cache": (knobs.runtime, "jit_cache_hook"),
            "post": (knobs.runtime, "jit_post_compile_hook"),
            "listener": (knobs.compilation, "listener"),
        }
        for name in names or places:
            self.hook(name, *places[name])
        if not names:
            knobs.runtime.kernel_load_start_hook.add(lambda *_, **__: self.heard.append("load"))


def forbid_compiling() -> None:
    from triton.compiler.compiler import ASTSource

    def make_ir(source: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{source.name} is compiled")

    ASTSource.make_ir = make_ir


def measure_as_an_engine() -> None:
    """This process passes for one with a device, and its tuners keep results again."""
    from winners_process import tune_as_an_engine

    del os.environ["PREFETCHD_NULL"]
    tune_as_an_engine()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("calls")
    parser.add_argument("--forbid", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--without", action="store_true", help="no adaptor at all")
    parser.add_argument("--on-compile", default="ignore")
    parser.add_argument("--before", choices=["chain", "raise"])
    parser.add_argument("--after", choices=["chain", "replace"])
    parser.add_argument("--only", default="", help="which hooks of others, with commas; all if empty")
    arguments = parser.parse_args()
    heard, adaptor = Heard(), TritonAdaptor()
    observer = Observer(heard, on_compile=arguments.on_compile, site=call_site)
    import torch  # noqa: F401
    import triton

    if arguments.forbid:
        forbid_compiling()
    if arguments.measure:
        measure_as_an_engine()
    only = [name for name in arguments.only.split(",") if name]
    before = Others(chain=True, raising=arguments.before == "raise")
    after = Others(chain=arguments.after == "chain")
    if arguments.before:
        before.set(*only)
    if not arguments.without:
        adaptor.install(observer)
    if arguments.after:
        after.set(*only)
    raised = []
    for name in arguments.calls.split(","):
        try:
            named(name)()
        except EngineCompiled as error:
            raised.append(f"EngineCompiled: {error}")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    answer = {
        "triton": triton.__version__,
        "figures": observer.figures(),
        "open": len(observer.running()),
        "errors": observer.guard.errors,
        "raised": raised,
        "before": before.heard,
        "after": after.heard,
        "records": [base64.b64encode(encode_record(each)).decode() for each in heard.records],
        "winners": msgspec.to_builtins(heard.winners),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
