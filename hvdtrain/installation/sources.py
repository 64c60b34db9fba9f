"""Horovod's sources: the release on the package index, checked by its hash, with the series of patches applied."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.pip import Pip
from hvdtrain.installation.steps import say
from hvdtrain.runtime.horovod_patches import HOROVOD, RECORD, series, series_hashes

SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of horovod-0.28.1.tar.gz."""

_RECORD = '''\
"""The patches that were applied to these sources, in order, by the beginning of the SHA-256 of their diffs."""

PATCHES = {}
'''


def patched_sources(work: Path, environ: Mapping[str, str], pip: Pip) -> Path:
    """Fetch Horovod's sources, apply the patches, and return their folder.

    Args:
        work: folder that they are unpacked in.
        environ: environment variables of the build; its tools must be on PYTHONPATH.
        pip: of the environment.

    Raises:
        SetupError: they can't be fetched, are other ones, or a patch does not apply.
    """
    archive = pip.fetch_sources("horovod", HOROVOD, sha256=SHA256, folder=work / "sdist", environ=environ)
    shutil.unpack_archive(archive, work)
    sources = work / f"horovod-{HOROVOD}"
    say(f"applying {len(series())} patches to Horovod {HOROVOD}")
    for patch in series():
        apply_patch(patch, sources)
    hashes = pformat(series_hashes(), sort_dicts=False)
    (sources / "horovod" / RECORD).write_text(_RECORD.format(hashes))
    return sources


def apply_patch(patch: Path, sources: Path) -> None:
    """Apply one patch: each hunk at the line that it names, and with the lines that it expects.

    Raises:
        SetupError: it does not apply; the message names it.
    """
    words = ("-p1", "--batch", "--forward", "--fuzz=0", "--directory", str(sources), "--input", str(patch))
    done = subprocess.run(
        ("patch", *words),
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0 or "(offset" in done.stdout:
        raise SetupError(f"The patch {patch.name} does not apply to {sources}:\n{done.stdout.rstrip()}")
