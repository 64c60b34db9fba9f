#!/usr/bin/env bash
# Sets everything up, then runs all checks and tests. The last lines say what was skipped, and why, what failed, and how many
# passed.
#   launch/test.sh                        before a change lands: about 20 minutes on 2 cores
#   launch/test.sh --all                  everything, in four hours: before a release, and before a change of what many share
#   launch/test.sh --all 1/2              its lint, types, unit tests and distributed checks; 2/2: the rest
#   launch/test.sh --gpu-build            compiles, links and loads Horovod with NCCL; needs no GPU
#   launch/test.sh --gpu                  trainings on a GPU beside the same on the CPU, and a table of both (docs/gpu.md)
#   launch/test.sh tests/unit -k mesh     only pytest, with these arguments
#   launch/test.sh --timings FILE ...     and writes the seconds of each test to FILE (python -m tests.report --table FILE)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --gpu-build ] && [ $# = 1 ]; then
    launch/setup.sh --test
    exec launch/lib/gpu_build.sh
fi

if [ "${1:-}" = --gpu ] && [ $# = 1 ]; then
    if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo 'test: nvidia-smi shows no GPU here: tests/gpu was not run'
        exit
    fi
    launch/setup.sh --test --gpu
    # shellcheck source=/dev/null
    . .venv/bin/activate
    exec python -m pytest -s tests/gpu
fi

timings=()
if [ "${1:-}" = --timings ] && [ $# -gt 1 ]; then
    timings=(--timings "$2")
    shift 2
fi

launch/setup.sh --test
# shellcheck source=/dev/null
. .venv/bin/activate
# shellcheck source=launch/lib/programs.sh
. launch/lib/programs.sh

# Several hundred processes start: none shall compile our sources anew.
unset PYTHONDONTWRITEBYTECODE

report="$(mktemp -d)" static=''
end() {
    [ -z "$static" ] || kill -- "-$static" 2>/dev/null || true
    rm -rf "$report"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# section NAME COMMAND...: a section that fails is noted, and the others still run
section() {
    printf '\n== %s\n' "$1"
    "${@:2}" || fail "$1"
}

# tests NAME PYTEST_ARGUMENT...: a hang shows where it hangs, by every thread's stack after so many seconds in one test
tests() {
    # shellcheck disable=SC2086  # a command in front of it, or nothing
    section "$1" ${with:-} python -m pytest -o faulthandler_timeout=920 --report "$report/$1.json" "${@:2}"
}

# Each of these keeps one core busy.
static() {
    section "lint" ruff check hvdtrain tests benchmarks examples
    section "format" ruff format --check hvdtrain tests benchmarks examples
    section "import contracts" lint-imports
    section "types" mypy
}

fail() { printf '%s\n' "$1" >>"$report/failed"; }

skip() { printf '%s\n' "$1" >>"$report/skipped"; }

# The unit tests once more, with the oldest Keras that setup.cfg allows and on the newest Python, in a venv of its own.
# Everything else is tested with the newest Keras, that of launch/requirements.txt.
oldest_keras_newest_python() {
    local python venv=build/python3.13 keras
    keras="$(sed -n 's/^ *keras>=\([0-9.]*\).*/\1/p' setup.cfg)"
    for python in python3.13 ~/.pyenv/versions/3.13.*/bin/python; do
        if "$python" -c 'import venv, ensurepip' 2>/dev/null; then break; fi
        python=''
    done
    if [ -z "$python" ]; then
        skip "python3.13 is not installed, and the unit tests did not run on it"
    elif "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet --no-deps --only-binary :all: \
        -r launch/requirements.txt -r launch/requirements-test.txt &&
        "$venv/bin/pip" install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat -e . &&
        PATH="$PWD/$venv/bin:$PATH" python -m hvdtrain setup; then
        local -x PATH="$PWD/$venv/bin:$PATH"
    else
        fail "setting up Python 3.13"
    fi
    with="launch/lib/overlay.sh keras-$keras keras==$keras.* --" tests "unit tests with Keras $keras" \
        -m "not extended" -n 3 tests/unit
}

finish() {
    printf '\n== summary\n'
    python -m tests.report "$report" "${timings[@]}"
    exit
}

which=(-m "not extended") half=''
if [ "${1:-}" = --all ] && [[ "${*:2}" =~ ^([12]/2)?$ ]]; then
    which=() half="${2:-}"
    ensure_programs sshd=openssh-server ssh=openssh-client ip=iproute2 ps=procps \
        shellcheck=shellcheck chromium=chromium slurmctld=slurm-wlm munged=munge \
        /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so=libpmix-dev
elif [ $# -gt 0 ]; then
    tests "pytest" "$@"
    finish
fi

# The ranks of a battery fill the machine; of commands and scripts, which wait a third of the time, three run at once.
battery=(tests/distributed/test_battery.py tests/distributed/test_worlds.py)
if [ "$half" != 2/2 ]; then
    # In a process group of its own, so that it can be ended.
    set -m
    static >"$report/static.log" 2>&1 &
    static=$!
    set +m
    tests "unit tests" "${which[@]}" -n 3 tests/unit
    wait "$static"
    static=''
    cat "$report/static.log"
    tests "distributed checks" "${which[@]}" "${battery[@]}"
fi
if [ "$half" != 1/2 ]; then
    tests "commands and scripts" "${which[@]}" -n 3 --dist loadgroup tests/entry tests/chaos tests/keras_io tests/distributed "${battery[@]/#/--ignore=}"
fi
if [ -z "${which[*]}" ] && [ "$half" != 1/2 ]; then
    tests "several hosts" tests/clusters
    section "exact resume" python -m tests.exact_resume
    oldest_keras_newest_python
    with="launch/lib/overlay.sh keras-hub -r launch/requirements-keras-hub.txt --" tests "KerasHub" tests/keras_hub
    with="launch/lib/overlay.sh extras -r launch/requirements-extras.txt --" tests "formats and trackers" tests/export tests/trackers
fi
finish
