"""Which token counts are alike for a kernel, so that one of each kind is enough.

Triton compiles another variant when an integer argument is 1 or stops being a multiple of 16, and libraries
add constants of their own that depend on the number of tokens: the buckets of fla's norms, one for each 65536
rows, and blocks no longer than the input. Most of fla's kernels ask not to be specialised on the token count.
So each kernel has a rule; the promise is that every count up to the largest falls into the class of one of
`representatives`, and that `representative` names that very one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

# any: one variant whatever the count. buckets: the bucket of rows alone. divisible: also whether the count
# is 1 or a multiple of 16. blocks: also how long a block of tokens may be.
Rule = Literal["any", "buckets", "divisible", "blocks"]

# fla's norms take the number of blocks of this many rows as a constant of the kernel.
BUCKET_ROWS = 2048 * 32
# Triton's divisibility.
DIVISOR = 16
# Output kernels of the vendored copies take blocks of 16, 32 or 64 tokens, no longer than the input needs.
SHORT, MIDDLE = 16, 32
# An ordinary small batch, for kernels to which nothing but the bucket matters.
ORDINARY = 128


@lru_cache(maxsize=4096)
def representatives(max_tokens: int, rows_per_token: int, rule: Rule) -> tuple[int, ...]:
    """One token count of every class that counts from 1 to `max_tokens` fall into, ascending."""
    if rule == "any":
        return (1,)
    found: dict[object, int] = {}
    bucket = 0
    while (first := bucket_start(bucket, rows_per_token)) <= max_tokens:
        for tokens in _candidates(first, rows_per_token, rule):
            # Where only the bucket counts, the ordinary batch may be larger than any that comes.
            if tokens <= max_tokens or rule == "buckets":
                found.setdefault(_class_of(tokens, rows_per_token, rule), tokens)
        bucket = (first * rows_per_token - 1) // BUCKET_ROWS + 1
    return tuple(sorted(found.values()))


def representative(tokens: int, rows_per_token: int, rule: Rule) -> int:
    """The count that stands for this one, whatever the largest batch is."""
    if rule == "any":
        return 1
    wanted = _class_of(tokens, rows_per_token, rule)
    first = bucket_start((tokens * rows_per_token - 1) // BUCKET_ROWS, rows_per_token)
    for candidate in _candidates(first, rows_per_token, rule):
        if _class_of(candidate, rows_per_token, rule) == wanted:
            return candidate
    return tokens


def bucket_start(bucket: int, rows_per_token: int) -> int:
    """The first token count with more than `bucket` full buckets of rows."""
    return bucket * BUCKET_ROWS // rows_per_token + 1


def _candidates(first: int, rows_per_token: int, rule: Rule) -> tuple[int, ...]:
    last = max(bucket_start((first * rows_per_token - 1) // BUCKET_ROWS + 1, rows_per_token) - 1, first)
    if rule == "buckets":
        return (min(ORDINARY, last),) if first == 1 else (first,)
    multiple = -(-first // DIVISOR) * DIVISOR
    small = (1, 2, SHORT, SHORT + 1, MIDDLE, MIDDLE + 1, 3 * DIVISOR) if first == 1 else ()
    return tuple(tokens for tokens in (*small, first, first + 1, multiple) if tokens <= last)


def _class_of(tokens: int, rows_per_token: int, rule: Rule) -> tuple[int | bool, ...]:
    bucket = (tokens * rows_per_token - 1) // BUCKET_ROWS
    if rule == "buckets":
        return (bucket,)
    block = 2 if rule == "divisible" or tokens > MIDDLE else 1 if tokens > SHORT else 0
    return (bucket, tokens == 1, tokens % DIVISOR == 0, block)
