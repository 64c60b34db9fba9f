#!/usr/bin/env bash
# Starts python -m hvdtrain with horovodrun over Gloo, which needs no MPI: here, or on hosts by ssh.
#   launch/horovodrun.sh -np 4 digits --epochs 3
#   launch/horovodrun.sh --hosts node1:4,node2:4 cifar10
# python -m hvdtrain launch --help lists the options before the recipe; put the environment on PATH first.
exec python -m hvdtrain launch --run --gloo "$@"
