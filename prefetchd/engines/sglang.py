"""SGLang's entry point: SGLang calls `register` in each of its processes, as vLLM does with its plug-ins.

Without `PREFETCHD` in the environment it imports nothing, touches nothing and says nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """The entry point; may be called several times. Raises nothing."""
    # As in `config.py`, whose import alone takes longer than all that SGLang is to lose here.
    if os.environ.get("PREFETCHD", "") in ("", "0"):
        return
    from prefetchd.engines.sglang_hooks import install

    install()
