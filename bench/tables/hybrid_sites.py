"""The hybrid model of tables 2 and 3 as sizes and as the profile that prefetchd is given; no torch here."""

from __future__ import annotations

from typing import NamedTuple

HEADS, WIDTH = 32, 128
# By name, N and K of the products of each layer.
PRODUCTS = {"in": (4608, 2048), "out": (2048, 2048), "up": (8192, 2048), "down": (2048, 4096)}
# Of the verified drafts, after which a sequence may be suspended.
DRAFTS = 2


class MambaSizes(NamedTuple):
    """A Mamba2 layer on one rank."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int


MAMBA = MambaSizes(heads=128, head_dim=64, groups=8, state=128, chunk=256)
FAMILIES = ("kda", "mamba")

HEAD = """version = 1
model = "hybrid in miniature"
architecture = "written by hand"
tp = 1
ep = 1
dp = 1
quantization = "fp8"
context_tokens = 1
"""
PREFILLS = {
    "kda": f"""
[[kernels]]
name = "kda.chunk"
op = "chunk_kda"
home = "fla"
sizes = {{ heads = {HEADS}, key_dim = {WIDTH}, value_dim = {WIDTH} }}
flags = {{ set = "vllm" }}
""",
    "mamba": """
[[kernels]]
name = "mamba.scan"
op = "mamba2_prefill"
home = "mamba_ssm"
sizes = {{ heads = {}, head_dim = {}, groups = {}, state = {}, chunk = {} }}
flags = {{ }}
""".format(*MAMBA),
}
MAMBA_STEP = "heads = {}, head_dim = {}, groups = {}, state = {}".format(*MAMBA)
STEPS = f"""
[[kernels]]
name = "kda.step"
op = "fused_recurrent_kda"
home = "fla"
sizes = {{ heads = {HEADS}, key_dim = {WIDTH}, value_dim = {WIDTH} }}
flags = {{ set = ["vllm", "vllm-verify"] }}

[[kernels]]
name = "mamba.step"
op = "mamba2_decode"
home = "mamba_ssm"
sizes = {{ {MAMBA_STEP} }}
flags = {{ }}
"""


def family_profile(family: str) -> str:
    """One layer's prefill."""
    return HEAD + PREFILLS[family]


def model_profile() -> str:
    """All that a step of the whole model launches."""
    site = '\n[[gemms]]\nname = "{}"\nop = "fp8_gemm_nt"\nn = {}\nk = {}\nm = "tokens"\n'
    products = "".join(site.format(name, n, k) for name, (n, k) in PRODUCTS.items())
    return HEAD + products + "".join(PREFILLS.values()) + STEPS
