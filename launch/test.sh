#!/usr/bin/env bash
# Sets everything up, then runs all checks and tests, up to the first that fails.
#   launch/test.sh                        before a change lands (about an hour on 2 cores)
#   launch/test.sh --all                  and what takes long, or is near to what the others show (another 20 minutes)
#   launch/test.sh --gpu-build            compiles, links and loads Horovod with NCCL; needs no GPU
#   launch/test.sh tests/unit -k mesh     only pytest, with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh --test
# shellcheck source=/dev/null
. .venv/bin/activate
# shellcheck source=launch/lib/programs.sh
. launch/lib/programs.sh

# Several hundred processes start: none shall compile our sources anew.
unset PYTHONDONTWRITEBYTECODE

# A hang shows where it hangs: every thread's stack after so many seconds in one test.
run_pytest() { python -m pytest -o faulthandler_timeout=920 --durations=12 --durations-min=5 "$@"; }

check() {
    printf '\n== %s\n' "$1"
    shift
    "$@"
}

if [ "${1:-}" = --gpu-build ] && [ $# = 1 ]; then
    exec launch/lib/gpu_build.sh
fi

which=(-m "not extended")
if [ "${1:-}" = --all ] && [ $# = 1 ]; then
    which=()
elif [ $# -gt 0 ]; then
    run_pytest "$@"
    exit
fi

ensure_programs sshd=openssh-server ssh=openssh-client ip=iproute2 nft=nftables ps=procps \
    shellcheck=shellcheck slurmctld=slurm-wlm munged=munge \
    /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so=libpmix-dev
check "lint" ruff check --config launch/ruff.toml hvdtrain tests benchmarks
check "format" ruff format --check --config launch/ruff.toml hvdtrain tests benchmarks
# Each of these two keeps one core busy.
check "types" mypy &
check "import contracts" lint-imports --config setup.cfg
wait $!
# Two at a time, and three of the launches of a command or script, which wait a third of the time; the batteries fill
# the machine.
check "unit tests" run_pytest -n 2 tests/unit
check "distributed checks" run_pytest "${which[@]}" tests/distributed/test_battery.py
# What a launcher or a watchdog ends after seconds wants a machine of its own.
signals=(tests/distributed/test_hang.py tests/entry/test_interrupts.py tests/entry/test_preemption.py
    tests/entry/test_elastic.py tests/chaos)
check "commands and scripts" run_pytest "${which[@]}" -n 3 --dist loadgroup tests/entry tests/distributed \
    --ignore tests/distributed/test_battery.py "${signals[@]/#/--ignore=}"
check "signals and hangs" run_pytest "${which[@]}" "${signals[@]}"
check "several hosts" run_pytest tests/clusters
