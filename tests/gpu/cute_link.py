"""Makes what `test_cute.py` takes to a GPU: kernels compiled on the null device, linked to load alone.

    python tests/gpu/cute_link.py DIRECTORY

The directory then holds one shared object for each kernel, and the DSL's runtime library beside them. With
tvm_ffi they are all that a process needs to launch the kernels; the DSL, which compiled them here, is not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "null"))

from cute_site import Site

from prefetchd.cute.artifacts import find
from prefetchd.pipeline import Ending

CALLS = ("scale", "decode")


def main() -> None:
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    runtime, tvm_ffi = libraries()
    shutil.copy(runtime, place)
    kernels = {}
    with tempfile.TemporaryDirectory() as work:
        site = Site(Path(work))
        for call in CALLS:
            (job,) = site.capture(call)
            (outcome,) = site.warm([job])
            assert outcome.ending is Ending.COMPILED, outcome.text
            found = find(site.root, job.key)
            assert found is not None
            kernels[call] = {"symbol": found.artifact.symbol, "file": f"{call}.so"}
            link = ["gcc", "-shared", "-o", str(place / f"{call}.so"), str(found.path)]
            subprocess.run([*link, str(runtime), str(tvm_ffi), "-Wl,-rpath,$ORIGIN"], check=True)
    (place / "kernels.json").write_text(json.dumps(kernels))
    print(json.dumps(kernels))


def libraries() -> tuple[Path, Path]:
    """The DSL's runtime and tvm_ffi's library, from a process that has both."""
    program = (
        "from cutlass.cute.runtime import find_runtime_libraries as find\n"
        "print(*[path for path in find(enable_tvm_ffi=True)], sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    runtime, tvm_ffi = done.stdout.split()
    return Path(runtime), Path(tvm_ffi)


if __name__ == "__main__":
    main()
