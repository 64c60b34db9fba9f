#!/usr/bin/env bash
# Starts python -m hvdtrain with the mpirun on PATH: Open MPI 4 or 5, MPICH or Intel MPI, each with its own flags, ranks
# bound to no cores (hvdtrain divides them itself) and the environment passed on to other hosts.
#   launch/mpirun.sh -np 4 digits --epochs 3                         4 ranks here
#   launch/mpirun.sh --hosts node1:4,node2:4 cifar10                 8 ranks on two hosts
#   launch/mpirun.sh --launcher-args "--mca btl_tcp_if_include eth0" --hosts ... cifar10
# python -m hvdtrain launch --help lists the options before the recipe; put the environment on PATH first.
exec python -m hvdtrain launch --run --mpi "$@"
