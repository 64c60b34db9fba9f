"""The series of patches itself, and whether the Horovod that the other tests run on was built with it."""

import importlib.metadata
import re
import subprocess
import sys
import warnings

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime import horovod_patches
from hvdtrain.runtime.horovod_patches import difference, installed_hashes, patched_version, series, series_hashes
from tests.entry.docs.pages import ROOT

HEADER = re.compile(r"[A-Z][^\n]{10,90}[^\n.]\n\nWhy: .+?\n\nFault: .+?\n\nUpstream: .+?\n\ndiff --git ", re.DOTALL)
STOCK: dict[str, str] = {}
"""Of a Horovod without patches."""


@pytest.mark.parametrize("path", series(), ids=lambda path: path.stem)
def test_a_patch_says_why_and_the_documentation_lists_it(path):
    assert HEADER.match(path.read_text()), "title, Why, Fault, Upstream, each a paragraph"
    assert path.name in (ROOT / "docs" / "horovod.md").read_text()


def test_patches_are_numbered_in_order():
    numbers = [int(path.name[:4]) for path in series()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_installed_horovod_has_the_series():
    pytest.importorskip("horovod", reason="Horovod is not installed")
    assert installed_hashes() == series_hashes(), "run launch/setup.sh"
    assert importlib.metadata.version("horovod") == patched_version()
    version = subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"], capture_output=True)
    assert version.stdout.decode().strip() == patched_version()


def test_differences_are_named():
    names = list(series_hashes())
    assert difference(series_hashes()) is None
    assert difference(STOCK) == f"lacks {len(names)} ({names[0]} to {names[-1]})"
    assert difference(series_hashes() | {names[3]: "0"}) == f"has another version of {names[3]}"
    some = {name: digest for name, digest in series_hashes().items() if name not in names[1:3]}
    assert difference(some | {"0099-own": "0"}) == f"lacks 2 ({names[1]}, {names[2]}), has, besides, 0099-own"


def test_a_horovod_without_them_is_warned_about_once_by_rank_0(monkeypatch):
    pytest.importorskip("horovod", reason="Horovod is not installed")
    monkeypatch.setattr(horovod_patches, "installed_hashes", lambda: STOCK)
    with pytest.warns(UserWarning, match=r"needs, Horovod \S+ lacks \d+ \(0001-.*Run: python -m hvdtrain setup"):
        horovod_patches.warn_if_unpatched()
    place = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    for name, value in {**place, **store, "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        horovod_patches.warn_if_unpatched()


def test_a_patch_without_which_a_job_cannot_start_is_required(monkeypatch):
    pytest.importorskip("horovod", reason="Horovod is not installed")
    horovod_patches.require_patch("store-token", "The store")
    monkeypatch.setattr(horovod_patches, "installed_hashes", lambda: STOCK)
    with pytest.raises(LaunchError, match=r"The store needs .*patch store-token .*Received: Horovod \S+ without it\."):
        horovod_patches.require_patch("store-token", "The store")
