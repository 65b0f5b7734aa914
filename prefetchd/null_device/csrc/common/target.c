#include "target.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIABLE "PREFETCHD_NULL_TARGET"

static struct null_target target;
static bool valid;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void complain(const char *what, const char *field)
{
    fprintf(stderr,
            "prefetchd null device: " VARIABLE " %s%s; there is no device. "
            "Start the program with `prefetchd null --target NAME -- CMD...`.\n",
            what, field);
}

// The text after `key=` up to the next `;`, or NULL.
static const char *value_of(const char *text, const char *key, size_t *length)
{
    size_t wanted = strlen(key);
    for (const char *entry = text; *entry;) {
        size_t size = strcspn(entry, ";");
        if (size > wanted && entry[wanted] == '=' && !strncmp(entry, key, wanted)) {
            *length = size - wanted - 1;
            return entry + wanted + 1;
        }
        entry += size + (entry[size] == ';');
    }
    return NULL;
}

static bool read_integer(const char *text, const char *key, long long *out)
{
    size_t length;
    const char *value = value_of(text, key, &length);
    if (!value || !length) {
        complain("lacks the field ", key);
        return false;
    }
    char *end;
    *out = strtoll(value, &end, 10);
    if (end != value + length || *out < 0) {
        complain("holds no whole number in the field ", key);
        return false;
    }
    return true;
}

static void read_target(void)
{
    const char *text = getenv(VARIABLE);
    if (!text || !*text) {
        complain("is not set", "");
        return;
    }
    size_t length;
    const char *name = value_of(text, "name", &length);
    if (!name || !length || length >= sizeof target.name) {
        complain("lacks a usable field ", "name");
        return;
    }
    memcpy(target.name, name, length);
#define X(field)                                        \
    if (!read_integer(text, #field, &target.field))     \
        return;
    TARGET_FIELDS(X)
#undef X
    valid = true;
}

const struct null_target *null_target(void)
{
    pthread_once(&once, read_target);
    return valid ? &target : NULL;
}
