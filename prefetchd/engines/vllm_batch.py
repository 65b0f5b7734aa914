"""What a vLLM scheduler has decided for its next step, as a `Batch`; on its thread, so in microseconds.

A request that has no output yet is in prefill, whether it is new, goes on in chunks or was resumed; every
other one decodes one token and verifies its drafts. The subtle rule: nearly every step of a busy server
decodes only, and is told apart by one look through a list in C before any request is looked at by itself.
"""

from __future__ import annotations

from typing import Any

from prefetchd.protocol import Batch


def batch_of(output: Any) -> Batch | None:
    """The batch of a `SchedulerOutput`; None for a step without tokens."""
    tokens = output.total_num_scheduled_tokens
    if not tokens:
        return None
    cached = output.scheduled_cached_reqs
    drafts = output.scheduled_spec_decode_tokens
    speculative = sum(map(len, drafts.values())) if drafts else 0
    if not output.scheduled_new_reqs and 0 not in cached.num_output_tokens:
        return Batch(tokens=tokens, decodes=len(cached.req_ids), speculative_tokens=speculative)
    scheduled = output.num_scheduled_tokens
    lengths = [scheduled[new.req_id] for new in output.scheduled_new_reqs]
    decodes = 0
    for name, made in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if made:
            decodes += 1
        else:
            lengths.append(scheduled[name])
    return Batch(
        tokens=tokens, prefill_lengths=tuple(lengths), decodes=decodes, speculative_tokens=speculative
    )
