"""Many engines look keys up at once, on the null device, while somebody publishes; says who read what.

The engines are forks of one warm process, so that they all start at the same instant. Every file that an
engine writes bears its number, so that a group which two writers have made can be told from a whole one; what
is published bears none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import compiler
from triton.runtime.cache import FileCacheManager
from triton_kernels import run_blocks

MARK = re.compile(rb"#writer=(\d+)")


def mark_what_is_written() -> None:
    original = FileCacheManager.put

    def put(manager: Any, data: Any, filename: str, binary: bool = True) -> str:
        mark = f"#writer={os.getpid()}"
        if filename.endswith(".json") and not filename.startswith("__grp__"):
            data = json.dumps({**json.loads(data), "writer": mark})
        elif isinstance(data, bytes):
            data = data + mark.encode()
        elif not filename.startswith("__grp__"):
            data = f"{data}\n// {mark}"
        return str(original(manager, data, filename, binary))

    FileCacheManager.put = put


def report_what_is_read(read: list[dict[str, list[int]]]) -> None:
    original = compiler.CompiledKernel.__init__

    def __init__(kernel: Any, source: Any, group: dict[str, str], digest: str) -> None:
        writers = {
            name: [int(n) for n in MARK.findall(Path(path).read_bytes())] for name, path in group.items()
        }
        original(kernel, source, group, digest)
        read.append(writers)

    compiler.CompiledKernel.__init__ = __init__


def engine(number: int, blocks: list[int], start: Any, answers: Any) -> None:
    mark_what_is_written()
    read: list[dict[str, list[int]]] = []
    report_what_is_read(read)
    turn = number % len(blocks)
    start.wait()
    run_blocks(blocks[turn:] + blocks[:turn])
    answers.put((os.getpid(), read))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--blocks", type=json.loads, required=True)
    arguments = parser.parse_args()
    triton.runtime.driver.active.get_current_target()
    torch.empty(1, device="cuda")
    torch.cuda._is_in_bad_fork = lambda: False
    forks = multiprocessing.get_context("fork")
    start, answers = forks.Barrier(arguments.engines + 1), forks.SimpleQueue()
    engines = [
        forks.Process(target=engine, args=(number, arguments.blocks, start, answers))
        for number in range(arguments.engines)
    ]
    for process in engines:
        process.start()
    print("ready", flush=True)
    input()
    start.wait()
    print(json.dumps([answers.get() for _ in engines]), flush=True)
    for process in engines:
        process.join()


if __name__ == "__main__":
    main()
