// PREFETCHD_NULL_CALLS=stderr (or the path of a file to append to) prints the counts when the process ends.
#include "calls.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic(struct null_call *) first;

void null_count(struct null_call *call)
{
    if (atomic_fetch_add(&call->count, 1))
        return;
    call->next = atomic_load(&first);
    while (!atomic_compare_exchange_weak(&first, &call->next, call))
        ;
}

// Writes "name count" lines into `buffer` like snprintf: at most `size` bytes with the final zero; returns the
// length that the whole text has. Read through ctypes; each of the two libraries has its own list.
size_t prefetchd_null_calls(char *buffer, size_t size);

size_t prefetchd_null_calls(char *buffer, size_t size)
{
    size_t used = 0;
    if (size)
        buffer[0] = 0;
    for (struct null_call *call = atomic_load(&first); call; call = call->next) {
        size_t left = used < size ? size - used : 0;
        used += (size_t)snprintf(left ? buffer + used : NULL, left, "%s %lu\n", call->name, atomic_load(&call->count));
    }
    return used;
}

__attribute__((destructor)) static void print_calls(void)
{
    const char *where = getenv("PREFETCHD_NULL_CALLS");
    if (!where || !*where || !atomic_load(&first))
        return;
    FILE *out = strcmp(where, "stderr") ? fopen(where, "ae") : stderr;
    if (!out)
        return;
    for (struct null_call *call = atomic_load(&first); call; call = call->next)
        fprintf(out, "null device, process %d: not supported: %s, %lu calls\n", (int)getpid(), call->name,
                atomic_load(&call->count));
    if (out != stderr)
        fclose(out);
}
