"""Records of DeepGEMM kernels as an observer would write them, on a machine made for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_deep_gemm import Site

from prefetchd.compilers.base import NotRebuildable, fingerprint_id
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.compilers.deep_jit_digest import Digests
from prefetchd.shapelog import Record

HEADER = "deep_gemm/impls/sm90_made_up_gemm.cuh"
HEAD = f"\n#include <{HEADER}>\n\nusing namespace deep_gemm;\n"
BODY = """
static void __instantiate_kernel() {
    auto ptr = reinterpret_cast<void*>(&made_up_gemm_impl<
        cute::UMMA::Major::K, 0, -1, 512 / 16,
        0x1.9p+4f, epilogue::EpilogueHeadSplits<128, 0, 128>,
        cute::numeric_limits<float>::infinity(), true
    >);
};
"""
ASSERTION = (
    "\nstatic_assert(sizeof(layout::MQALogitsSharedStorage<\n    64, float\n>) == 203776, "
    '"Incorrect MQA logits shared-memory size");\n'
)
OLD_HEAD = f"// Includes' hash value: {'0a' * 16}\n"


class Written:
    """One machine with one record of the form that its observer would write."""

    def __init__(self, directory: Path, *, new: bool) -> None:
        self.site = Site(directory, new=new)
        header = self.site.package / "include" / HEADER
        header.parent.mkdir()
        header.write_text("#pragma once\n#include <deep_gemm/common.cuh>\n#include <cute/tensor.hpp>\n")
        self.new = new
        self.compiler: DeepJit = self.site.compiler()
        self.headers = str(self.site.package / "include")
        self.source = ("" if new else OLD_HEAD) + HEAD + BODY
        flags = ["--gpu-architecture=sm_90a", "-O3", "--compiler-options=-fPIC,-O3", "-std=c++20"]
        if new:
            self.arguments = ["{source}", "--cubin", "--output-file", "{output}", *flags]
            self.arguments += ["--include-path", self.headers]
            self.flags = flags
        else:
            self.flags = [*flags, f"-I{self.headers}"]
            self.arguments = ["{source}", "-cubin", "-o", "{output}", *self.flags]
        self.meta: dict[str, Any] | None = None
        if new:
            config = {"extra_signature": "cutlass-481", "include_dirs": ["/elsewhere"]}
            options = {"arch": "90a", "nvcc_flags": ["-std=c++20"], "post_hook": None}
            self.meta = {
                "command": None,
                "config": config,
                "compiler_info": None,
                "compiler_options": options,
            }

    def record(self, *, key: str | None = None, **changes: Any) -> Record:
        """With the key that the library would give it, unless another one is named."""
        rebuild = {
            "source": self.source,
            "arguments": self.arguments,
            "meta": self.meta,
            "op": "x",
            **changes,
        }
        return Record(
            compiler="deep_jit",
            key=self.key_of(rebuild["source"]) if key is None else key,
            fingerprint=fingerprint_id(self.compiler.fingerprint()),
            rebuild=rebuild,
        )

    def key_of(self, source: str) -> str:
        digests = Digests(self.compiler.package, self.compiler.nvcc)
        digest = digests.of("made_up_gemm", source, self.flags, "cutlass-481")
        return f"{'' if self.new else 'kernel.'}made_up_gemm.{digest}"

    def refusal(self, record: Record) -> str:
        with pytest.raises(NotRebuildable) as refused:
            self.compiler.rebuild(record)
        return str(refused.value)
