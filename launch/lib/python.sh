# shellcheck shell=bash
# Finding a Python, and the venv made of it.

# Prints "3.11 whole", or "3.11 bare" where the parts that make a venv are not installed.
PROBE='import sys
try:
    import ensurepip, venv
    parts = "whole"
except ImportError:
    parts = "bare"
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], parts))'

supported() { case "$1" in 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac }

# Sets python (the command) and version, or dies with the reason.
find_python() {
    local candidate found bare='' seen='' candidates=(python3.11 python3 python3.12 python3.13)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        # a name on PATH may be a shim for a Python that is not there: ask it
        found="$("$candidate" -c "$PROBE" 2>/dev/null)" || continue
        version="${found% *}"
        if ! supported "$version"; then
            seen="${seen:-$candidate is $version}"
        elif [ "${found#* }" = bare ]; then
            bare="${bare:-$version}"
        else
            python="$candidate"
            return
        fi
    done
    no_python "$bare" "$seen"
}

no_python() {
    local bare="$1" seen="$2" get
    if [ -n "$bare" ]; then
        die "Python $bare has no venv and ensurepip modules: $(install_with "python$bare-venv" "python$bare")"
    fi
    get="$(install_with "python3.11 python3.11-venv" "python3.11")"
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13${seen:+ ($seen)}: unset it, or $get"
    fi
    die "Python 3.11, 3.12 or 3.13 is missing${seen:+ ($seen)}: $get"
}

# python_version PYTHON: "3.11", or failure
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Why the venv that is there can't be used; nothing if it can.
venv_defect() {
    local has
    if [ ! -e "$VENV/bin" ]; then
        echo new
    elif ! has="$(python_version "$VENV/bin/python")"; then
        echo "its Python is gone"
    elif ! supported "$has"; then
        echo "it holds Python $has"
    elif [ -n "${PYTHON:-}" ] && [ "$has" != "$version" ]; then
        echo "it holds Python $has, and PYTHON=$PYTHON is $version"
    elif [ -e "$STATE/home" ] && [ "$(cat "$STATE/home")" != "$ROOT" ]; then
        echo "it was moved here from $(cat "$STATE/home")"
    elif [ -e "$STATE/installing" ]; then
        echo "an installation in it was cut short"
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "it holds no pip"
    fi
}

# Leaves a venv that can be used; makes one where there is none.
ensure_venv() {
    local defect
    if [ -n "${PYTHON:-}" ]; then find_python; fi
    defect="$(venv_defect)"
    if [ -n "$defect" ]; then
        if [ -z "$version" ]; then find_python; fi
        if [ "$defect" != new ]; then say "making .venv anew: $defect"; fi
        # all but our notes, which hold the lock
        find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$STATE" -exec rm -rf {} +
        need_disk
        step "creating .venv with Python $version (10 s)" "the venv can't be created" venv.log "$python" -m venv "$VENV"
        rm -f "$STATE/installing"
        printf '%s\n' "$ROOT" >"$STATE/home"
    fi
    version="$(python_version "$VENV/bin/python")"
    if [ "$version" != 3.11 ]; then say "Python $version: untested, 3.11 is what hvdtrain is tested on"; fi
}

# To be run by step or run_logged. The venv is marked while pip writes to it: a killed pip leaves half a package.
pip_install() {
    touch "$STATE/installing"
    # the user's own settings of pip stay in force, but for --user, which a venv refuses
    PIP_USER=0 TMPDIR="$WORK" "$VENV/bin/python" -m pip install --disable-pip-version-check \
        --progress-bar off "$@" || return 1
    rm "$STATE/installing"
}
