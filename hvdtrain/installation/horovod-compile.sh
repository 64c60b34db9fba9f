#!/bin/sh
# Runs the compiler for Horovod's build: horovod-compile.sh g++ ARGUMENTS...
#
# Horovod 0.28.1 is built from its sources as they are, but:
# - One file, xla_mpi_ops.cc (all-reduce inside XLA, for GPUs only), needs headers that TensorFlow's wheel no
#   longer ships. It is empty for TensorFlow versions before 2.6, so that is what this one file is told it has. A build
#   for GPUs compiles HVDTRAIN_GPU_SOURCE in its place, a function that the wheel lacks; its headers include two more
#   of TensorFlow's folders, below HVDTRAIN_TF_INCLUDE.
# - Gloo is built twice, and TensorFlow's part links the copy named compatible17_gloo. The other one, for
#   frameworks that are not built here, is left empty: that and no debug information (52 of the library's 54 MB)
#   take a third off the time.
# - Gloo's thread that receives asks again at once where the lock of a connection is taken, by a thread that sends. Where
#   it has taken the core from that one, it keeps it until the kernel's next tick, of 4 ms: sums of 1 MB took 9 ms
#   between 2 ranks on 2 cores. One line is added to its source: it yields, and they take 0.9 ms.
# nvcc, whose files these are not, is run as it is.
case "$1" in *nvcc) exec "$@" ;; esac
for argument; do
    shift
    case "$argument" in
    */xla_mpi_ops.cc)
        if [ -n "${HVDTRAIN_GPU_SOURCE:-}" ]; then
            external="$HVDTRAIN_TF_INCLUDE/external"
            set -- "$@" -I"$external/highwayhash" -I"$external/farmhash_archive/src" "$HVDTRAIN_GPU_SOURCE"
        else
            set -- "$@" -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 "$argument"
        fi
        ;;
    */compatible*gloo/gloo/transport/tcp/pair.cc)
        yielding="${TMPDIR:-/tmp}/gloo-pair-$$.cc"
        sed '/std::try_to_lock);$/,/return;/ s/return;/sched_yield();\n    return;/' "$argument" >"$yielding"
        grep -q sched_yield "$yielding" || { echo "horovod-compile.sh: another Gloo: $argument" >&2; exit 1; }
        set -- "$@" -include sched.h "$yielding"
        ;;
    */third_party/gloo/gloo/*.cc) set -- "$@" -x c++ /dev/null ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec "$@" -g0
