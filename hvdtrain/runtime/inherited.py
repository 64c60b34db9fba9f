"""Variables of a launcher that this process has inherited, and that name the rank of another process or of no job."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.config.errors import LoneRanksError

_FAMILIES = ("OMPI_", "PMIX_", "PMI_")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_OF_USER = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")

_SERVER = re.compile(r";tcp[46]?://.*:(\d+)$")
"""Where the address of the launcher's PMIx server ends, as in `1807155200.0;tcp4://127.0.0.1:35297`."""
_LISTENS = "0A"
"""TCP_LISTEN in /proc/net/tcp."""

_WITHOUT = 'unset "${!OMPI_@}" "${!PMIX_@}" "${!PMI_@}" in bash'


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a child that is not a rank: without the variables of MPI's launchers, if there are any."""
    if not any(name in environ for name in _RANKS):
        return dict(environ)
    return {name: value for name, value in environ.items() if name in _OF_USER or not name.startswith(_FAMILIES)}


def refuse_ended_launcher(environ: Mapping[str, str], proc: Path = Path("/proc/net")) -> None:
    """Check that the launcher that the environment speaks of still runs.

    MPI_Init would wait for its PMIx server, or abort. Where the system does not show who listens, nothing is refused.

    Args:
        proc: folder of the system's tables of TCP sockets.

    Raises:
        LoneRanksError: nobody listens at the server's address: the job has ended.
    """
    servers = {name: value for name, value in environ.items() if name.startswith("PMIX_SERVER_URI")}
    ports = {int(match[1]) for value in servers.values() if (match := _SERVER.search(value))}
    listening = set()
    for table in (proc / "tcp", proc / "tcp6"):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, *_ in (line.split() for line in lines):
            if state == _LISTENS:
                listening.add(int(local.rpartition(":")[2], 16))
    if not ports or not listening or ports & listening:
        return
    name, value = next(iter(servers.items()))
    raise LoneRanksError(
        "The job whose variables this process has inherited has ended: nobody listens at the address of its launcher. "
        f"Received: PMIX_RANK={environ.get('PMIX_RANK')}, {name}={value}. Open a new shell, or {_WITHOUT}.",
        rank=0,
    )


def claim_rank(environ: Mapping[str, str]) -> None:
    """Check that no other process has been the rank that the environment speaks of, and claim it for this one.

    The claim is a file in the launcher's folder for the job, which it removes with the job. A child of a rank meets it,
    and so does a second program in a shell that is a rank. MPI_Init of either aborts; where the first process still
    runs, the ranks of its job then wait in MPI_Finalize forever.

    Raises:
        LoneRanksError: another process has claimed it.
    """
    folder, rank = environ.get("PMIX_SERVER_TMPDIR"), environ.get("PMIX_RANK", "")
    if folder is None or not rank.isdecimal():
        return
    claim, own = Path(folder, f"hvdtrain-rank-{rank}"), str(os.getpid())
    try:
        with claim.open("x") as file:
            file.write(own)
        return
    except FileExistsError:
        first = claim.read_text()
    except OSError:  # another user's folder, or one that this container does not show
        return
    if first != own:
        raise LoneRanksError(
            f"Rank {rank} of this job is process {first}, and MPI takes one process for each rank: this one, which has "
            "inherited the variables of the launcher, would abort and could end the job. Start each program by mpirun "
            "or srun, or without these variables: subprocess.run(…, env={k: v for k, v in os.environ.items() if not "
            f"k.startswith({_FAMILIES})}}), or {_WITHOUT}.",
            rank=0,
        )
