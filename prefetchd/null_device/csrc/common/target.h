// The device that is imitated, as Python wrote it into PREFETCHD_NULL_TARGET.
#ifndef PREFETCHD_TARGET_H
#define PREFETCHD_TARGET_H

#pragma GCC visibility push(hidden)

// The integers of prefetchd.targets.Target, in its order; `name` is the only text.
#define TARGET_FIELDS(X)                                                                            \
    X(major)                                                                                        \
    X(minor)                                                                                        \
    X(sm_count)                                                                                     \
    X(memory_bytes)                                                                                 \
    X(l2_bytes)                                                                                     \
    X(shared_bytes_per_block)                                                                       \
    X(shared_bytes_per_block_optin)                                                                 \
    X(shared_bytes_per_sm)                                                                          \
    X(reserved_shared_bytes_per_block)                                                              \
    X(registers_per_block)                                                                          \
    X(registers_per_sm)                                                                             \
    X(threads_per_block)                                                                            \
    X(threads_per_sm)                                                                               \
    X(blocks_per_sm)                                                                                \
    X(warp_size)                                                                                    \
    X(clock_khz)                                                                                    \
    X(memory_clock_khz)                                                                             \
    X(memory_bus_bits)                                                                              \
    X(persisting_l2_bytes)

struct null_target {
    char name[96];
#define X(field) long long field;
    TARGET_FIELDS(X)
#undef X
};

// NULL, after one line on stderr, when the variable is missing or malformed: no device's numbers are assumed.
const struct null_target *null_target(void);

// A fixed identity: libraries compare the UUID of the runtime, the driver and NVML.
#define NULL_UUID_BYTE 1
#define NULL_UUID_TEXT "GPU-01000000-0000-0000-0000-000000000000"
// CUDA writes a PCI domain with four digits, NVML with eight.
#define NULL_PCI_BUS_ID "0000:01:00.0"
#define NULL_NVML_PCI_BUS_ID "0000" NULL_PCI_BUS_ID

// Not below the newest CUDA line that the tables know, and what NVML reports to match.
#define NULL_CUDA_VERSION 13000
#define NULL_DRIVER_TEXT "580.00.00"

#pragma GCC visibility pop
#endif
