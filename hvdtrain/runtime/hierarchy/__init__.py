"""Sums in two levels: inside each host first, then between the hosts.

A ring over all ranks sends 2 (n - 1) / n of a tensor out of each host, n being the number of ranks. Here the ranks of a
host add up one slice each, exchange it with the ranks that hold the same slice on the other hosts, and gather the whole
again: with h hosts, 2 (h - 1) / h of the tensor leaves a host, whatever the number of its ranks. Between 2 hosts with 2
ranks each that is two thirds.

Hosts may have different numbers of ranks. Each has as many bridges, ranks that hold a slice, as the smallest has ranks.

grid.py     the ranks of each host, and who exchanges with other hosts
sums.py     the sum itself
"""
