#!/usr/bin/env bash
# Makes .venv with everything that hvdtrain needs; see --help.
set -Eeuo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
LAUNCH="$ROOT/launch"
VENV="$ROOT/.venv"
# shellcheck source=launch/lib/common.sh
. "$LAUNCH/lib/common.sh"
# shellcheck source=launch/lib/python.sh
. "$LAUNCH/lib/python.sh"

# Measured: 3.1 GB at the peak, 2.7 GB in the end; pip keeps its downloads (0.6 GB) elsewhere. With CUDA: estimated.
NEED_MB=4000
NEED_MB_CUDA=12000
tests='' gpu='' python='' version='' quiet=--quiet

usage() {
    cat <<'END'
Usage: launch/setup.sh [--test] [--gpu | --no-gpu]

Makes .venv: installs the pinned dependencies, then runs python -m hvdtrain setup, which builds Horovod
against the installed TensorFlow and checks that 2 ranks really reduce. Needs Linux, Python 3.11 to 3.13, g++, make
and patch; no root. About 4 minutes on 2 cores; a call that finds all of it in place returns at once.

  --test    also installs what launch/test.sh needs
  --gpu     TensorFlow with CUDA's libraries, and Horovod with NCCL; needs no GPU here, as on a login node.
            By itself where nvidia-smi shows a GPU. Later calls keep to it.
  --no-gpu  for CPUs, whatever nvidia-smi shows; kept to as well
  -h        shows this

Environment:
  PYTHON            the Python to make the venv of. Else the first that fits of python3.11, python3,
                    python3.12, python3.13 (every change is tested on 3.11).
  HVDTRAIN_MPI      auto (the default): the system's MPI where mpicxx and mpirun are on PATH, else Open MPI
                    from PyPI in the venv. system, pypi: only this one. none: Horovod with Gloo alone.
  HOROVOD_CUDA_HOME the CUDA toolkit that compiles Horovod's kernels; else nvcc on PATH, or NVIDIA's from PyPI
  HVDTRAIN_WHEELS   where built Horovod wheels are kept (default: ~/.cache/hvdtrain/wheels).
END
}

parse() {
    while [ $# -gt 0 ]; do
        case "$1" in
        --test) tests=yes ;;
        --gpu) gpu=nccl ;;
        --no-gpu) gpu=none ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die "unknown argument $1: see launch/setup.sh --help" ;;
        esac
        shift
    done
}

# --- is there anything to do? -------------------------------------------------------------------------------

# What the packages depend on. A stamp that holds the same text says: all of them are in place.
packages_key() (
    cd "$LAUNCH"
    printf 'home %s\ngpu %s\npython %s\n' "$ROOT" "$(gpu_choice)" "$(python_version "${PYTHON:-$VENV/bin/python}")"
    sha256sum requirements.txt requirements-cuda.txt setup.sh lib/*.sh ../setup.cfg ../pyproject.toml
)

test_key() {
    packages_key
    sha256sum "$LAUNCH/requirements-test.txt"
}

# up_to_date STAMP KEY: and nobody has since put another TensorFlow into the venv
up_to_date() {
    [ -e "$STATE/$1" ] && [ ! -e "$STATE/installing" ] && "$VENV/bin/python" -I -S -c '' 2>/dev/null &&
        [ "$(cat "$STATE/$1")" = "$("$2")" ] && is_installed tensorflow
}

is_installed() {
    local version
    version="$(sed -n "s/^$1==//p" "$LAUNCH/requirements.txt")"
    compgen -G "$VENV/lib/python3*/site-packages/$1-$version.dist-info" >/dev/null
}

packages_done() {
    up_to_date stamp packages_key || return 1
    [ -z "$tests" ] || up_to_date stamp-test test_key
}

write_stamp() {
    "$2" >"$STATE/$1.part"
    mv -f "$STATE/$1.part" "$STATE/$1"
}

# --- what must be there before we begin ---------------------------------------------------------------------

# Neither CMake's search for MPI nor PATH can hold them.
need_plain_path() {
    case "$ROOT" in
    *[[:space:]:]*) die "the path $ROOT has a space or a colon in it, and Horovod can't be built there: mv it to a path without" ;;
    esac
}

# Asked before anything is downloaded.
need_tools() {
    local tool
    for tool in "${CXX:-g++}" make patch; do
        # shellcheck disable=SC2086  # CXX may hold arguments
        set -- $tool
        command -v "$1" >/dev/null || die "$1 is missing: $(install_with "g++ make patch" "gcc-c++ make patch")"
    done
}

# What was asked for, now or in an earlier call; else what the machine has.
gpu_choice() {
    if [ -n "$gpu" ]; then
        echo "$gpu"
    elif [ -e "$STATE/gpu" ]; then
        cat "$STATE/gpu"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo nccl
    else
        echo none
    fi
}

for_gpu() { [ "$(gpu_choice)" = nccl ]; }

need_disk() {
    local free need="$NEED_MB"
    if for_gpu; then need="$NEED_MB_CUDA"; fi
    free="$(df -Pm "$ROOT" | awk 'NR == 2 { print $4 }')"
    [ "$free" -ge "$need" ] ||
        die "$ROOT has $free MB free and .venv needs $need: free some, or clone the repository to a larger disk"
}

# --- the steps ----------------------------------------------------------------------------------------------

install_packages() {
    local files=(-r "$LAUNCH/requirements.txt") how_long="500 MB to download, 1 to 5 minutes"
    if for_gpu; then
        files+=(-r "$LAUNCH/requirements-cuda.txt")
        how_long="with CUDA's libraries: 3 GB to download, 5 to 15 minutes"
    fi
    if is_installed tensorflow; then how_long="mostly there already"; fi
    step "installing TensorFlow and the other packages ($how_long)" "a package can't be installed" packages.log \
        pip_install --no-deps --only-binary :all: "${files[@]}"
    # By a line in a .pth file: beside a clone called hvdtrain, Python would take its folder for the package otherwise.
    run_logged hvdtrain.log pip_install --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$ROOT" ||
        die "hvdtrain can't be installed (the whole output: $LOGS/hvdtrain.log)"
}

make_environment() {
    rm -f "$STATE/stamp" "$STATE/stamp-test"
    need_plain_path
    need_tools
    ensure_venv
    install_packages
    write_stamp stamp packages_key
}

add_test_packages() {
    step "installing the test packages (10 s)" "a test package can't be installed" packages-test.log \
        pip_install --no-deps --only-binary :all: -r "$LAUNCH/requirements-test.txt"
    write_stamp stamp-test test_key
}

ensure_packages() {
    if packages_done; then return; fi
    quiet=''
    take_lock
    rm -rf "$WORK"
    mkdir -p "$WORK" "$LOGS"
    # asked again: the setup that we may have waited for did it
    up_to_date stamp packages_key || make_environment
    [ -z "$tests" ] || up_to_date stamp-test test_key || add_test_packages
    rm -rf "$WORK"
}

main() {
    parse "$@"
    [ "$(uname -s)" = Linux ] || die "$(uname -s) is not supported: run it on Linux, or on Windows in WSL 2"
    trap stop_job EXIT
    trap 'die "stopped at ${BASH_SOURCE[0]##*/}:$LINENO, where $BASH_COMMAND failed"' ERR
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    ensure_packages
    if [ -n "$gpu" ]; then echo "$gpu" >"$STATE/gpu"; fi
    HVDTRAIN_GPU="${HVDTRAIN_GPU:-$(gpu_choice)}"
    export HVDTRAIN_GPU
    # shellcheck disable=SC2086  # quiet is a flag or nothing
    run_job "$VENV/bin/python" -P -m hvdtrain setup $quiet || exit
}

main "$@"
