"""What docs/trackers.md says of serving an exported model: the model answers over HTTP as it does in Keras."""

import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

import hvdtrain as package
from hvdtrain.data.digits import load_digits
from tests.entry.docs.pages import blocks_of
from tests.launching import Job, hvdtrain

PAGE = "docs/trackers.md"


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def answer(address, content=None):
    """Return what a server says, or None while it does not listen."""
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as said:
            return said.read().decode()
    except urllib.error.HTTPError as error:
        pytest.fail(error.read().decode())
    except OSError:
        return None


def test_an_exported_model_answers_over_http(tmp_path):
    for name in ("mlflow", "onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: see launch/lib/overlay.sh")
    # Programs of an overlay are beside its packages.
    programs = [f"{folder}/bin" for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    path = ":".join([*programs, os.environ["PATH"]])
    hvdtrain("none", 1, "digits", "--epochs", "2", "--run-dir", "run", "--plots", "False", cwd=tmp_path)
    export, write, serve = [
        command
        for block in blocks_of(PAGE, "bash")
        for command in block.commands
        if re.search("export|served", command)
    ]
    (script,) = (block for block in blocks_of(PAGE, "python") if block.file == "served.py")
    (tmp_path / script.file).write_text(script.text)
    for command in (export, write):
        Job([sys.executable, *command.split()[1:]], cwd=tmp_path).expect(timeout=300)
    port = str(free_port())
    served = [sys.executable, "-m", *serve.replace("5055", port).split()]
    images, _ = load_digits()
    images = (images[:20] * 16).astype(np.uint8)
    with Job(served, cwd=tmp_path, PATH=path) as server:
        server.wait(lambda: answer(f"http://127.0.0.1:{port}/ping") is not None)
        content = json.dumps({"inputs": {"pixels": images.tolist()}}).encode()
        said = answer(f"http://127.0.0.1:{port}/invocations", content)
        assert said is not None, server.text
    (shares,) = json.loads(said)["predictions"].values()
    loaded = package.load_run(tmp_path / "run")
    expected = loaded.model.predict(loaded.preprocess(images), verbose=0)
    expected = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, expected, atol=1e-5)
