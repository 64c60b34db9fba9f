#!/usr/bin/env bash
# Sets everything up, then runs all checks and tests, up to the first that fails.
#   launch/test.sh                        everything: before a change lands (under 30 minutes on 2 cores)
#   launch/test.sh --quick                lint, types, contracts, unit tests and the checks on 2 ranks under MPI (Gloo
#                                         where there is no MPI) that compile fast: for every day (under 6 minutes)
#   launch/test.sh tests/unit -k mesh     only pytest, with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh --test
# shellcheck source=/dev/null
. .venv/bin/activate

# Several hundred processes start: none shall compile our sources anew.
unset PYTHONDONTWRITEBYTECODE

# A hang shows where it hangs: every thread's stack after so many seconds in one test.
run_pytest() { python -m pytest -o faulthandler_timeout=920 --durations=12 --durations-min=5 "$@"; }

check() {
    printf '\n== %s\n' "$1"
    shift
    "$@"
}

quick=
if [ "${1:-}" = --quick ] && [ $# = 1 ]; then
    quick=yes
elif [ $# -gt 0 ]; then
    run_pytest "$@"
    exit
fi

check "lint" ruff check --config launch/ruff.toml hvdtrain tests benchmarks
check "format" ruff format --check --config launch/ruff.toml hvdtrain tests benchmarks
# Each of these two keeps one core busy.
check "types" mypy &
check "import contracts" lint-imports --config setup.cfg
wait $!
# Two at a time, and three of the commands, which wait a third of the time; the batteries fill the machine.
check "unit tests" run_pytest -n 2 tests/unit
if [ -n "$quick" ]; then
    check "2 ranks" run_pytest -m quick tests/distributed
    exit
fi
check "distributed tests" run_pytest tests/distributed
check "entry tests" run_pytest -n 3 --dist loadgroup tests/entry
