#!/bin/sh
# Takes nvcc's place while a library is traced: the library computes its keys and nothing is compiled.
#
# PREFETCHD_NVCC_MODE says what happens to a compile:
#   capture  its arguments (NUL-terminated) are written to prefetchd.argv beside its output, which becomes a
#            placeholder, and the library goes on as if it had been compiled
#   forbid   its arguments and its source are written to the directory PREFETCHD_NVCC_MISSES, and it fails
# --version is answered by the real nvcc, PREFETCHD_REAL_NVCC, since its text enters the library's keys.
# Plain sh with builtins only: it starts in about a millisecond, once for every variant.

for argument in "$@"; do
    case $argument in
    --version | -V)
        unset LD_PRELOAD LD_LIBRARY_PATH
        exec "${PREFETCHD_REAL_NVCC:?prefetchd: the nvcc stand-in needs the path of the real nvcc}" --version
        ;;
    esac
done

output='' source='' previous=''
for argument in "$@"; do
    case $previous in
    -o | --output-file) output=$argument ;;
    esac
    case $argument in
    --output-file=*) output=${argument#*=} ;;
    *.cu) source=$argument ;;
    esac
    previous=$argument
done
if [ -z "$output" ]; then
    echo "prefetchd: the nvcc stand-in was called without an output file: $*" >&2
    exit 1
fi

case $PREFETCHD_NVCC_MODE in
capture)
    printf '%s\0' "$@" >"${output%/*}/prefetchd.argv" && printf 'placeholder' >"$output"
    ;;
forbid)
    cp "$source" "$PREFETCHD_NVCC_MISSES/$$.cu" && printf '%s\0' "$@" >"$PREFETCHD_NVCC_MISSES/$$.argv"
    echo "prefetchd: compiling is forbidden here, and this kernel is not in the cache: $source" >&2
    exit 1
    ;;
*)
    echo "prefetchd: the nvcc stand-in was started outside a trace (PREFETCHD_NVCC_MODE='$PREFETCHD_NVCC_MODE')" >&2
    exit 1
    ;;
esac
