"""A clone of the repository on a machine made of stubs, for the tests of launch/."""

import re
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
TOOLS = (
    "awk bash cat cp cut dirname env find flock getconf grep head id ln mkdir mv nproc rm sed sh sha256sum sleep sort "
    "tail timeout touch uname"
)

# Plays Python, pip and what pip installs. It notes each call, fails where its arguments hold $FAIL, and where they hold
# $HANG it waits until the file $CALLS.hanging, which it makes, is gone.
PYTHON = """
echo "python $*" >>"$CALLS"
if [ -n "${FAIL:-}" ]; then case "$*" in *"$FAIL"*) echo "error: the stub was told to fail"; exit 1 ;; esac; fi
if [ -n "${HANG:-}" ]; then case "$*" in *"$HANG"*)
    echo $$ >"$CALLS.hanging"
    while [ -e "$CALLS.hanging" ] && [ $SECONDS -lt 100 ]; do sleep 0.05; done ;;
esac; fi
packages="${0%/bin/*}/lib/python3.11/site-packages"
case "$*" in
*ensurepip*) echo "${VERSION:-3.11} ${PARTS:-whole}" ;;
*version_info*) echo "${VERSION:-3.11}" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "PATH=$3/bin:$PATH" >"$3/bin/activate" ;;
*requirements.txt*) mkdir -p "$packages/tensorflow-2.21.0.dist-info" ;;
"-P -m hvdtrain setup") cp "$STUBS/horovodrun" "${0%/*}" && echo "setup: ready" ;;
esac
"""
NOTHING_TO_DO = "python -P -m hvdtrain setup --quiet"
"""How the verb is called where the packages were in place: it says nothing if Horovod is, too."""

LAUNCHER = """
echo "${0##*/} $*" >>"$CALLS"
printf '<%s>' "$@"
if [ -n "${FAIL:-}" ]; then case "${0##*/} $*" in *"$FAIL"*) exit 1 ;; esac; fi
"""


class Machine:
    """A clone of the repository on a machine that has the tools it is given, and nothing else."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.stubs, self.root = folder, folder / "bin", folder / "stubs", folder / "repo"
        self.calls_file = folder / "calls"
        for made in (self.bin, self.stubs, self.root):
            made.mkdir()
        shutil.copytree(REPO / "launch", self.root / "launch")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(REPO / name, self.root)
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for tool in ("g++", "make", "patch", "apt-get"):
            self.has(tool, "exit 0")
        self.has("df", 'printf "Filesystem 1M-blocks Used Available\\nx 9 9 %s 1%% /\\n" "${FREE_MB:-90000}"')
        self.has("python3.11", PYTHON)
        self.has("horovodrun", LAUNCHER, self.stubs)

    def has(self, tool: str, script: str, folder: Path | None = None) -> None:
        """Put a stub on PATH."""
        path = (folder or self.bin) / tool
        path.unlink(missing_ok=True)
        # "x", since many of these are links to the real tools: never write through one
        with path.open("x") as file:
            file.write(f"#!{BASH}\n{script}\n")
        path.chmod(0o755)

    def lacks(self, tool: str) -> None:
        """Take a tool away."""
        (self.bin / tool).unlink()

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        """What a command on this machine sees."""
        own = {"PATH": self.bin, "HOME": self.folder, "STUBS": self.stubs, "CALLS": self.calls_file}
        return {name: str(value) for name, value in own.items()} | settings

    def start(self, *command: str, **settings: str) -> subprocess.Popen[str]:
        """Start launch/<command>."""
        argv = [BASH, str(self.root / "launch" / command[0]), *command[1:]]
        return subprocess.Popen(
            argv,
            env=self.environment(settings),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run launch/<command> to its end."""
        with self.start(*command, **settings) as process:
            out, err = process.communicate(timeout=200)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def setup(self, *arguments: str, **settings: str) -> str:
        """Run a setup that must succeed; return what it printed."""
        done = self.run("setup.sh", *arguments, **settings)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def refusal(self, **settings: str) -> str:
        """Run a setup that must fail; return its one line."""
        done = self.run("setup.sh", **settings)
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    def work(self) -> list[str]:
        """What was installed, built or launched since the last call of this."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [
            call
            for call in calls
            if re.match(r"python (-P )?-m |horovodrun ", call) and "--version" not in call and call != NOTHING_TO_DO
        ]
