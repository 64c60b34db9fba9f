"""What glibc does with freed memory, in processes of their own: its settings last as long as a process."""

import json
import os
import platform
import subprocess
import sys

import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.malloc import own_setting

PAGES = 64 * 256

FAULTS = """
import ctypes, resource

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]

def faults_of_reuse(blocks=64, size=1 << 20):
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [libc.malloc(size) for _ in range(blocks)]
        for block in held:
            ctypes.memset(block, 1, size)
        for block in held:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
"""Counts the page faults of touching blocks that were allocated, touched and freed before."""

PROGRAM = """
import json, sys, threading
from hvdtrain.runtime.malloc import choose_malloc

def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

malloc = choose_malloc(sys.argv[1])
large = in_thread(lambda: faults_of_reuse(2, 40 << 20))
print(json.dumps([malloc, faults_of_reuse(), in_thread(faults_of_reuse), large]))
"""


def printed(program, *arguments, **environ):
    """The JSON that a Python program prints, in an environment that says nothing of memory but `environ`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", FAULTS + program, *arguments]
    done = subprocess.run(command, env=plain | environ, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def reused(choice, **environ):
    """What holds, and the page faults of using it again on the main and another thread.

    The last are those of large blocks: 80 MiB, where the others are 64.
    """
    return printed(PROGRAM, choice, **environ)


def test_freed_memory_is_used_again_without_page_faults():
    about, main, thread, large = reused("keep")
    assert about == "glibc, which keeps freed memory"
    assert main < PAGES / 100
    assert thread < PAGES / 20
    takes_large = tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 35)
    assert (large < PAGES / 20) == takes_large


def test_by_its_own_settings_glibc_fetches_every_page_again():
    about, main, thread, large = reused("system")
    assert about == "glibc at its own settings"
    assert min(max(main, thread), large) > PAGES * 0.9


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_MMAP_THRESHOLD_": "65536"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7:glibc.malloc.mmap_threshold=65536"},
    ],
)
def test_what_the_environment_says_of_memory_holds(environ):
    about, main, thread, large = reused("keep", **environ)
    assert about.startswith("glibc, as ")
    assert about.endswith("=65536 has it")
    assert min(main, thread, large) > PAGES * 0.9, "each block is mapped, and unmapped again"


@pytest.mark.parametrize(
    "environ",
    [{}, {"MALLOC_ARENA_MAX": "2"}, {"MALLOC_TOP_PAD_": ""}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}],
)
def test_settings_of_something_else_do_not_count(environ):
    assert own_setting(environ) is None


def test_another_allocator_is_left_alone(tmp_path):
    source = tmp_path / "other.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t size) { return __libc_malloc(size); }\n"
    )
    library = tmp_path / "libother.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    about, *_ = reused("keep", LD_PRELOAD=str(library))
    assert about == "libother.so in place of glibc, at its own settings"


def test_a_session_keeps_memory(session):
    assert (session.malloc == "glibc, which keeps freed memory") == (own_setting(os.environ) is None)


@pytest.mark.extended
def test_a_session_leaves_memory_to_the_system_if_told_to():
    program = "import hvdtrain; hvdtrain.init(malloc='system')\n"
    assert printed(program + "print(faults_of_reuse())") > PAGES * 0.9


@pytest.mark.extended
def test_a_horovod_script_keeps_memory():
    pytest.importorskip("horovod", reason="Horovod's face needs Horovod")
    program = "import hvdtrain.horovod as hvd; hvd.init()\n"
    assert printed(program + "print(faults_of_reuse())") < PAGES / 100


def test_a_mistake_names_the_choices():
    with pytest.raises(ConfigError, match=r"^malloc must be one of keep, system\. Received: 'jemalloc'\."):
        RuntimeConfig(malloc="jemalloc")
