"""Rebuilds records as a daemon does, in a process of the engine's environment and off any device.

Records come as base64 in a JSON list on standard input; the answer, one JSON object, holds the jobs and a
text for each record that is refused.
"""

from __future__ import annotations

import base64
import json
import os
import sys

import msgspec

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.triton import Triton
from prefetchd.shapelog import decode_record
from prefetchd.targets import load_target


def main() -> None:
    compiler = Triton(load_target(sys.argv[1]), dict(os.environ))
    jobs, refused = [], []
    for text in json.load(sys.stdin):
        try:
            jobs.append(compiler.rebuild(decode_record(base64.b64decode(text))))
        except NotRebuildable as error:
            refused.append(str(error))
    packed = base64.b64encode(msgspec.msgpack.encode(jobs)).decode()
    print(json.dumps({"jobs": packed, "refused": refused, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main()
