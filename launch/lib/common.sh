# shellcheck shell=bash
# What every step of launch/setup.sh uses. Expects ROOT, LAUNCH and VENV.

STATE="$VENV/hvdtrain" # our own notes in the venv: stamps, logs, the lock
LOGS="$STATE/log"
WORK="$STATE/work"
job=

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# install_with APT_PACKAGES DNF_PACKAGES: the command that installs them on this machine
install_with() {
    if command -v apt-get >/dev/null; then
        printf 'sudo apt-get install %s' "$1"
    elif command -v dnf >/dev/null; then
        printf 'sudo dnf install %s' "$2"
    else
        printf "install %s with your system's package manager" "$1"
    fi
}

# run_job COMMAND...: in a process group of its own, so that an interrupted setup ends all that it started
run_job() {
    local code=0
    set -m
    "$@" </dev/null &
    job=$!
    set +m
    wait "$job" || code=$?
    job=
    return "$code"
}

# run_logged LOG COMMAND...: silent, unless it fails; then what matters of its output is shown
run_logged() {
    local log="$LOGS/$1"
    shift
    run_job "$@" >"$log" 2>&1 && return
    show_failure "$log" >&2
    return 1
}

# The first errors, which hold the cause but may be far up in a compiler's output, and the end.
show_failure() {
    grep -E -A 4 'CMake Error|fatal error|[Ee]rror: |ERROR: ' "$1" | head -n 20 || true
    printf '%s\n' "... the last lines:"
    tail -n 10 "$1"
}

stop_job() {
    if [ -n "$job" ]; then kill -TERM -- "-$job" 2>/dev/null || true; fi
}

# step "WHAT (how long)" FAILURE LOG COMMAND...
step() {
    local what="$1" failure="$2" log="$3" begin=$SECONDS
    shift 3
    say "$what"
    run_logged "$log" "$@" || die "$failure (the whole output: $LOGS/$log)"
    say "  done in $((SECONDS - begin)) s"
}

# One setup at a time in this working tree; the lock is the kernel's, so a killed setup leaves none behind.
take_lock() {
    mkdir -p "$STATE" 2>/dev/null || die "can't write to $VENV: chmod u+w $ROOT, or clone the repository where you may write"
    command -v flock >/dev/null || return 0
    exec 9>"$STATE/lock"
    flock -n 9 && return 0
    say "another setup is at work here: waiting for it"
    flock 9
}
