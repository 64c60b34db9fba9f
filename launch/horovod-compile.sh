#!/bin/sh
# Runs the compiler for Horovod's build: horovod-compile.sh g++ ARGUMENTS...
#
# Horovod 0.28.1 is built from its unmodified sources. One file of it, xla_mpi_ops.cc (all-reduce inside
# XLA, for GPUs only), needs headers that TensorFlow's wheel no longer ships. It is empty for TensorFlow
# versions before 2.6, so that is what this one file is told it has; all others see the real version.
for argument in "$@"; do
    case "$argument" in
    */xla_mpi_ops.cc) exec "$@" -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 ;;
    esac
done
exec "$@"
