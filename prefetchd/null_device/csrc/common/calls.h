// Entry points that the null device does not answer, counted by name.
#ifndef PREFETCHD_CALLS_H
#define PREFETCHD_CALLS_H

#include <stdatomic.h>

#pragma GCC visibility push(hidden)

struct null_call {
    const char *name;
    atomic_ulong count;
    struct null_call *next;
};

// Counts one call; the record joins the list at its first.
void null_count(struct null_call *call);

#pragma GCC visibility pop
#endif
