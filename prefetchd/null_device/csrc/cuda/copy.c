// Copies and fills act on the bytes at once; there is one kind of memory and no stream to wait for.
#define _GNU_SOURCE
#include "null.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Below this a fill is cheaper than the system call that drops pages.
#define DROP_PAGES_FROM ((size_t)1 << 20)

int null_copy(void *to, const void *from, size_t size)
{
    if (!size)
        return SUCCESS;
    if (!to || !from)
        return INVALID_VALUE;
    memmove(to, from, size);
    return SUCCESS;
}

int null_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height)
{
    if (height > 1 && (width > to_pitch || width > from_pitch))
        return INVALID_VALUE;
    for (size_t row = 0; row < height; row++) {
        int result = null_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
        if (result)
            return result;
    }
    return SUCCESS;
}

// Zeros: whole pages of our own mappings are given back to the operating system, which answers zeros when they are
// read again. A large torch.zeros then commits nothing.
static void zero(char *to, size_t size)
{
    struct null_range range;
    if (size >= DROP_PAGES_FROM && null_find(to, &range) && range.kind == DEVICE_MEMORY &&
        size <= range.size - (size_t)(to - range.start)) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        size_t head = (page - (size_t)(uintptr_t)to % page) % page;
        size_t body = (size - head) / page * page;
        if (!madvise(to + head, body, MADV_DONTNEED)) {
            memset(to, 0, head);
            memset(to + head + body, 0, size - head - body);
            return;
        }
    }
    memset(to, 0, size);
}

int null_fill(void *to, unsigned value, size_t element, size_t count)
{
    if (!count)
        return SUCCESS;
    if (!to)
        return INVALID_VALUE;
    if (element == 1)
        value &= 0xff;
    else if (element == 2)
        value &= 0xffff;
    if (!value)
        zero(to, element * count);
    else if (element == 1)
        memset(to, (int)value, count);
    else
        for (size_t i = 0; i < count; i++)
            memcpy((char *)to + i * element, &value, element);
    return SUCCESS;
}

int null_fill_rows(void *to, size_t pitch, unsigned value, size_t element, size_t width, size_t height)
{
    for (size_t row = 0; row < height; row++) {
        int result = null_fill((char *)to + row * pitch, value, element, width);
        if (result)
            return result;
    }
    return SUCCESS;
}
