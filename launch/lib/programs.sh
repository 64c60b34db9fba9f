# shellcheck shell=bash
# Programs of the system that some tests need; those that are missing are skipped, and say what is missing.

# ensure_programs PROGRAM=PACKAGE...: installs the packages of those programs, or files, that are missing, quietly, as root with apt, in a
# container. Elsewhere a package with a service would start it: there it is for the machine's owner to install.
ensure_programs() {
    local pair packages=()
    for pair in "$@"; do
        [ -e "${pair%%=*}" ] || PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%=*}" >/dev/null ||
            packages+=("${pair#*=}")
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && command -v apt-get >/dev/null; then
        printf 'test: installing %s for the tests\n' "${packages[*]}"
        install_by_apt "${packages[@]}" >/dev/null 2>&1 && return
    fi
    printf 'test: %s: not installed, tests that need them are skipped\n' "${packages[*]}"
}

install_by_apt() {
    export DEBIAN_FRONTEND=noninteractive
    timeout 300 apt-get install -qq -y --no-install-recommends "$@" && return
    timeout 120 apt-get update -qq && timeout 300 apt-get install -qq -y --no-install-recommends "$@"
}
