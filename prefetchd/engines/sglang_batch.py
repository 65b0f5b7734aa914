"""What an SGLang scheduler is about to run, as a `Batch`; on its thread, so in microseconds.

A batch has one forward mode for all of its requests. The subtle rule is the prefill to which running requests
are appended as if each were a prompt of one token: these are told apart only by how many of them there are.
"""

from __future__ import annotations

from typing import Any

from prefetchd.protocol import Batch

EXTENDING = frozenset({"EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"})


def batch_of(batch: Any, drafts: int = 0) -> Batch | None:
    """The batch of a `ScheduleBatch`, whose decoding requests verify `drafts` each; None if nothing runs."""
    mode = getattr(batch.forward_mode, "name", "")
    count = len(batch.reqs)
    if mode in EXTENDING and batch.extend_lens:
        running = len(batch.decoding_reqs or ())
        lengths = tuple(batch.extend_lens[: len(batch.extend_lens) - running])
        return Batch(tokens=sum(batch.extend_lens), prefill_lengths=lengths, decodes=running)
    if mode in ("DECODE", "TARGET_VERIFY") and count:
        return Batch(tokens=count * (drafts + 1), decodes=count, speculative_tokens=count * drafts)
    return None
