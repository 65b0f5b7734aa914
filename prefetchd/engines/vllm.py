"""vLLM's entry point: vLLM calls `register` in each of its processes, before it reads its configuration.

The subtle rule is what happens where nobody wants us. The plug-in is found wherever prefetchd is installed,
so without `PREFETCHD` in the environment it imports nothing, touches nothing and says nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """The entry point; may be called several times. Raises nothing."""
    # As in `config.py`, whose import alone takes longer than all that vLLM is to lose here.
    if os.environ.get("PREFETCHD", "") in ("", "0"):
        return
    from prefetchd.engines.vllm_hooks import install

    install()
