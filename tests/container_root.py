"""Runs the steps of launch/Dockerfile in a root folder, without Docker; as root, by hand, since it takes minutes.

    debootstrap --variant=minbase bookworm /tmp/root && python -m tests.container_root /tmp/root

The folder is what `FROM` names. At the end two ranks train in it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DOCKERFILE = REPO / "launch" / "Dockerfile"
AT_LAST = "horovodrun -np 2 python -m hvdtrain digits --max-steps 4 && test -s runs/*/summary.json"

IN_ROOT = """
set -e
for folder in dev proc sys; do mkdir -p "$1/$folder"; mount --rbind "/$folder" "$1/$folder"; done
exec chroot "$@"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile and its argument."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            name, _, argument = line.partition(" ")
            yield name, argument.strip()


class Root:
    """A root folder, and what Docker would remember of the image."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.workdir = "/"

    def run(self, command: str) -> None:
        """Run a command in the root; all that it mounts goes with it."""
        shell = f"cd {self.workdir} && {command}"
        words = ["unshare", "--mount", "sh", "-c", IN_ROOT, "sh", str(self.folder), "/bin/sh", "-c", shell]
        subprocess.run(words, env=self.environ, check=True)

    def copy(self, argument: str) -> None:
        *sources, target = argument.split()
        goal = self.folder / self.workdir.lstrip("/") / target
        for source in sources:
            if (REPO / source).is_dir():
                shutil.copytree(REPO / source, goal, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                goal.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPO / source, goal)

    def expand(self, text: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self.environ.get(found[1], ""), text)

    def take(self, name: str, argument: str) -> None:
        """Do what an instruction says."""
        print(f"== {name} {argument}", flush=True)
        if name == "RUN":
            self.run(argument)
        elif name == "COPY":
            self.copy(argument)
        elif name == "WORKDIR":
            self.workdir = argument
            (self.folder / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name in ("ENV", "ARG"):
            self.environ.update((key, self.expand(value)) for key, value in re.findall(r"(\w+)=(\S+)", argument))
        elif name not in ("FROM", "CMD"):
            raise ValueError(f"{name} is not known here.")


def main(folder: str) -> None:
    """Take all steps, then train."""
    root = Root(Path(folder))
    wheels = os.environ.get("HVDTRAIN_WHEELS")
    if wheels:  # spares the build
        shutil.copytree(wheels, root.folder / "wheels", dirs_exist_ok=True)
        root.environ["HVDTRAIN_WHEELS"] = "/wheels"
    for name, argument in instructions(DOCKERFILE.read_text()):
        root.take(name, argument)
    root.take("RUN", AT_LAST)


if __name__ == "__main__":
    main(sys.argv[1])
