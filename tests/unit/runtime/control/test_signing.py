import os
import subprocess
import sys

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import Signer, key_file, secret_from_environment, secret_from_key_file

PLACE = {"purpose": "part", "sequence": 4, "sender": 2}


@pytest.fixture
def signer():
    return Signer(b"secret", "job 1")


def test_a_signed_message_opens(signer):
    assert signer.open(signer.sign(b"payload", **PLACE), **PLACE) == b"payload"


@pytest.mark.parametrize("moved", [{"purpose": "answer"}, {"sequence": 5}, {"sequence": 3}, {"sender": 1}], ids=str)
def test_a_replayed_or_moved_message_is_refused_and_its_sender_named(signer, moved):
    message = signer.sign(b"payload", **PLACE)
    with pytest.raises(LaunchError, match=f"rank {moved.get('sender', 2)} "):
        signer.open(message, **(PLACE | moved))


@pytest.mark.parametrize("other", [Signer(b"wrong", "job 1"), Signer(b"secret", "job 2")])
def test_another_secret_or_job_is_refused(signer, other):
    with pytest.raises(LaunchError, match="HVDTRAIN_JOB_SECRET"):
        other.open(signer.sign(b"payload", **PLACE), **PLACE)


def test_every_changed_byte_is_refused(signer):
    message = signer.sign(b"payload", **PLACE)
    for i in range(len(message)):
        changed = message[:i] + bytes([message[i] ^ 1]) + message[i + 1 :]
        with pytest.raises(LaunchError):
            signer.open(changed, **PLACE)


@pytest.mark.parametrize("length", [0, 5, 31])
def test_a_short_message_is_refused(signer, length):
    with pytest.raises(LaunchError):
        signer.open(b"x" * length, **PLACE)


def test_the_given_secret_is_used_as_it_is():
    assert secret_from_environment({"HVDTRAIN_JOB_SECRET": "abc"}) == b"abc"
    assert secret_from_environment({"HVDTRAIN_JOB_SECRET": ""}) is None
    assert secret_from_environment({}) is None


def test_a_key_file_is_made_private_and_used_again(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = secret_from_key_file("job", environ)
    path = key_file(environ)
    assert path == tmp_path / "config/hvdtrain/job.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret_from_key_file("job", environ) == first
    assert secret_from_key_file("another job", environ) != first
    assert path.read_bytes() not in first


def test_the_key_file_lies_in_the_home_folder_by_default(tmp_path):
    assert key_file({"HOME": str(tmp_path)}) == tmp_path / ".config/hvdtrain/job.key"


def test_ranks_that_make_the_key_at_once_agree(tmp_path):
    code = "from hvdtrain.runtime.control.signing import *; print(secret_from_key_file('job').hex())"
    environ = os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE) for _ in range(6)]
    assert len({rank.communicate(timeout=30)[0] for rank in ranks}) == 1
    assert os.listdir(tmp_path / "hvdtrain") == ["job.key"]


def test_a_key_that_others_can_read_is_refused(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret_from_key_file("job", environ)
    key_file(environ).chmod(0o640)
    with pytest.raises(LaunchError, match=r"0640.*chmod 600"):
        secret_from_key_file("job", environ)


def test_a_damaged_key_is_refused(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret_from_key_file("job", environ)
    key_file(environ).write_bytes(b"short")
    with pytest.raises(LaunchError, match=r"32 bytes\. Received: 5"):
        secret_from_key_file("job", environ)


def test_where_no_key_can_be_kept_the_message_says_what_to_set(tmp_path):
    (tmp_path / "hvdtrain").write_text("a file in its place")
    with pytest.raises(LaunchError, match="Set HVDTRAIN_JOB_SECRET"):
        secret_from_key_file("job", {"XDG_CONFIG_HOME": str(tmp_path)})
