"""`launch`: print, or run, the command that starts a job's ranks where this is."""

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path

from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import run_here
from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.devices import count_cores
from hvdtrain.runtime.launch.command import LaunchCommand, LaunchPlanner
from hvdtrain.runtime.launch.gpus import count_gpus
from hvdtrain.runtime.launch.hosts import parse_hosts, read_hostfile
from hvdtrain.runtime.launch.request import LaunchRequest
from hvdtrain.runtime.launch.tools import Tools
from hvdtrain.runtime.launchers import SECRET_VARIABLE, detect_environment
from hvdtrain.runtime.logs import LOGGER

_DESCRIPTION = """\
Prints the command that starts several processes of `python -m hvdtrain ARGS`, or of a script of your own, in the place
where it is called: horovodrun or mpirun on machines of your own, srun in a Slurm allocation, mpiexec in a PBS job,
jsrun in an LSF job. Only the command goes to standard output, and the reasons for it to standard error.
"""


def main(argv: list[str]) -> int:
    """Print or run the command, and return the exit code; once the command runs, there is no return."""
    own, arguments = _split(argv)

    def parse() -> argparse.Namespace:
        return _parser()[0].parse_args(own)

    return run_here(parse, lambda options: _launch(options, arguments))


def _parser() -> tuple[Parser, list[argparse.Action]]:
    """Return the parser and its options, but for --help."""
    usage = "%(prog)s [options] [ARGS of python -m hvdtrain ... | SCRIPT.py ...]"
    parser = Parser("launch", _DESCRIPTION, usage=usage)
    hosts = parser.add_mutually_exclusive_group()
    controller = parser.add_mutually_exclusive_group()
    options = [
        parser.add_argument(
            "-np",
            type=positive,
            metavar="N",
            help="number of ranks (default: every slot of the hosts or of the scheduler's job; else one per GPU, or 2)",
        ),
        hosts.add_argument("--hosts", metavar="H1:N,H2:N", help="hosts, and how many ranks each takes"),
        hosts.add_argument(
            "--hostfile", metavar="FILE", help="the same in a file: `h1 slots=2` or `h1:2` on each line"
        ),
        controller.add_argument("--gloo", action="store_true", help="exchange over Gloo, without MPI"),
        controller.add_argument("--mpi", action="store_true", help="exchange over MPI, started by its own launcher"),
        parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots"),
        parser.add_argument("--host-discovery-script", metavar="FILE", help="elastic: a program that prints the hosts"),
        parser.add_argument("--min-np", type=positive, metavar="N", help="elastic: fewest ranks"),
        parser.add_argument("--max-np", type=positive, metavar="N", help="elastic: most ranks"),
        parser.add_argument("--launcher-args", default="", metavar="'...'", help="further flags of the launcher"),
        parser.add_argument("--run", action="store_true", help="run the command in place of printing it"),
    ]
    return parser, options


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of `launch`, and what follows them."""
    takes_value = {"-h": False, "--help": False}
    takes_value |= {flag: not isinstance(each.nargs, int) for each in _parser()[1] for flag in each.option_strings}
    at = 0
    while at < len(argv):
        flag, equals, _ = argv[at].partition("=")
        if flag not in takes_value:
            break
        at += 2 if takes_value[flag] and not equals else 1
    return argv[:at], argv[at + 1 :] if argv[at : at + 1] == ["--"] else argv[at:]


def _launch(options: argparse.Namespace, arguments: list[str]) -> int:
    request = _request(options, arguments)
    environment = detect_environment()
    if environment.size > 1 or environment.launcher not in ("none", "srun"):
        raise ConfigError(
            f"launch starts the launcher itself. Received: a start by {environment.launcher}. Start it once, without."
        )
    processors = os.sched_getaffinity(0)
    planner = LaunchPlanner(
        environ=os.environ,
        tools=Tools(),
        cores=count_cores(processors),
        gpus=count_gpus(os.environ),
        root=os.geteuid() == 0,
    )
    command = planner.plan(request)
    for note in command.notes:
        LOGGER.info(note)
    if not options.run:
        print(command.shown())
        return 0
    _run(command)
    return 0


def _request(options: argparse.Namespace, arguments: list[str]) -> LaunchRequest:
    hosts = read_hostfile(Path(options.hostfile)) if options.hostfile else ()
    return LaunchRequest(
        arguments=tuple(arguments),
        ranks=options.np,
        hosts=parse_hosts(options.hosts) if options.hosts else hosts,
        controller="gloo" if options.gloo else "mpi" if options.mpi else "auto",
        oversubscribe=options.oversubscribe,
        discovery=options.host_discovery_script,
        min_ranks=options.min_np,
        max_ranks=options.max_np,
        extra=tuple(shlex.split(options.launcher_args)),
    )


def _run(command: LaunchCommand) -> None:
    """Become the command."""
    environ = dict(os.environ)
    if command.secret:
        environ[SECRET_VARIABLE] = secrets.token_hex(32)
    LOGGER.info(shlex.join(command.words))
    sys.stdout.flush()
    try:
        os.execvpe(command.words[0], list(command.words), environ)
    except OSError as error:
        raise LaunchError(f"{command.words[0]} cannot be started ({error.strerror}).") from error
