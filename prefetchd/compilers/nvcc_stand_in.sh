#!/bin/sh
# Takes nvcc's place while a library is traced (nothing is compiled), or in an engine that is observed (the
# real nvcc runs).
#
# PREFETCHD_NVCC_MODE says what happens to a compile:
#   capture  its arguments (NUL-terminated) are written to prefetchd.argv beside its output, which becomes a
#            placeholder, and the library goes on as if it had been compiled
#   forbid   its arguments and its source are written to the directory PREFETCHD_NVCC_MISSES, and it fails
#   observe  the real nvcc runs with the same arguments, environment, input and output. Where the directory
#            PREFETCHD_NVCC_SPOOL can be written, it holds for each compile, by process: `.argv` (made at the
#            start), `.cu` (a copy of the source), `.end` (made at the end, the exit status); and `page`, which
#            the engine has mapped, begins with the process that compiled last
# In the other modes --version is answered by the real nvcc, PREFETCHD_REAL_NVCC, since its text enters the
# library's keys. Plain sh with builtins only, but for one cp: it starts in about a millisecond.

# More compiles than this are in the spool only where nobody reads it any more.
MOST_IN_SPOOL=256

is_real() {
    # Neither we nor a program that has led here once.
    [ -f "$1" ] && [ -x "$1" ] && ! [ "$1" -ef "$0" ] && ! [ "$1" -ef "$PREFETCHD_NVCC_NESTED" ]
}

find_real() {
    for real in "$PREFETCHD_REAL_NVCC" "$CUDA_HOME/bin/nvcc" "$CUDA_PATH/bin/nvcc"; do
        is_real "$real" && return
    done
    separators=$IFS IFS=:
    for directory in $PATH; do
        real=$directory/nvcc
        is_real "$real" && IFS=$separators && return
    done
    IFS=$separators real=/usr/local/cuda/bin/nvcc
    is_real "$real" && return
    echo "prefetchd: no real nvcc was found; set PREFETCHD_REAL_NVCC to its path" >&2
    exit 127
}

asks_version() {
    for argument in "$@"; do
        case $argument in
        --version | -V) return 0 ;;
        esac
    done
    return 1
}

has_room() {
    [ $# -le $MOST_IN_SPOOL ]
}

forward() {
    caught=$1
    # What runs in the background does not hear the two that a terminal sends, so it gets another.
    case $caught in
    INT | QUIT) kill -TERM "$child" ;;
    *) kill -"$caught" "$child" ;;
    esac 2>/dev/null
}

observe() {
    find_real
    entry=${PREFETCHD_NVCC_SPOOL:-/nowhere}/$$
    # What was called by the program it stands in for is part of a compile that is observed already.
    nested=$PREFETCHD_NVCC_NESTED
    export PREFETCHD_NVCC_NESTED="$real"
    if [ -n "$nested" ] || asks_version "$@" || ! has_room "${entry%/*}"/*.argv ||
        ! { printf '%s\0' "$@" >"$entry.argv"; } 2>/dev/null; then
        exec "$real" "$@"
    fi
    for argument in "$@"; do
        case $argument in
        */kernel.cu) cp -- "$argument" "$entry.cu" ;;
        esac
    done 2>/dev/null
    { printf '%08d' $$ 1<>"${entry%/*}/page"; } 2>/dev/null

    caught='' child=''
    for signal in HUP INT QUIT TERM; do
        trap "forward $signal" $signal
    done
    # sh gives a background process an empty input unless it is told otherwise, by another number even then.
    if { true 3<&0; } 2>/dev/null; then
        exec 3<&0
        "$real" "$@" <&3 3<&- &
    else
        "$real" "$@" &
    fi
    child=$!
    [ -z "$caught" ] || forward "$caught"
    wait $child
    status=$?
    # A signal to us ends the wait, not the child; its own status may still have to be fetched.
    gone=''
    while [ -n "$caught" ] && [ -z "$gone" ]; do
        kill -0 $child 2>/dev/null || gone=1
        wait $child
        again=$?
        [ $again -eq 127 ] || status=$again
    done
    { printf '%s' $status >"$entry.end"; } 2>/dev/null
    if [ -n "$caught" ]; then
        trap - "$caught"
        kill -"$caught" $$
    fi
    exit $status
}

if [ "$PREFETCHD_NVCC_MODE" = observe ]; then
    observe "$@"
fi

if asks_version "$@"; then
    unset LD_PRELOAD LD_LIBRARY_PATH
    exec "${PREFETCHD_REAL_NVCC:?prefetchd: the nvcc stand-in needs the path of the real nvcc}" --version
fi

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
