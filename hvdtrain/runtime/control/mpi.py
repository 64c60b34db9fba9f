"""The control channel over MPI, by mpi4py, on a communicator of its own.

It lives beside Horovod in one process: whoever comes first initialises MPI, both need MPI_THREAD_MULTIPLE.
All sends and receives are non-blocking and polled with short sleeps: MPI's own waiting would burn the core,
and could not end after a timeout. Only bytes are sent, by mpi4py's upper-case methods: the others pickle.
"""

import contextlib
import ctypes
import hmac
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.compat.horovod import bind_mpi_at_once, load_mpi_library
from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.control.channel import end_process, flush_output
from hvdtrain.runtime.control.rooted import RootedChannel
from hvdtrain.runtime.control.signing import KEY_BYTES, Signer, secret_from_environment
from hvdtrain.runtime.inherited import claim_rank
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import LOGGER

_LONGEST_VERSION = 8192
"""MPI_MAX_LIBRARY_VERSION_STRING of all MPIs."""

_OPEN_MPI, _MPICH = "Open MPI", "MPICH"
_FAMILIES = {"mpirun": _OPEN_MPI, "horovodrun": _OPEN_MPI, "mpiexec": _MPICH, "mpirun_rsh": _MPICH}
"""The MPI of a launcher; MPICH's ABI is also that of Intel, Cray and MVAPICH."""


def load_mpi(environment: Environment, communicator: Any = None) -> Any:
    """Return mpi4py's MPI module, initialised and checked against what the launcher said.

    `communicator` is that of all ranks, where it is not COMM_WORLD.

    Raises:
        LaunchError: mpi4py is missing, or MPI was initialised without threads.
        LoneRanksError: MPI counts other ranks than the launcher.
    """
    try:
        # TensorFlow exports the functions of the hwloc that it holds. An MPI that is loaded before it, and whose own
        # hwloc functions are looked up later, would hand its topology to TensorFlow's and crash in MPI_Finalize.
        bind_mpi_at_once(os.RTLD_NOW | os.RTLD_GLOBAL)
        prepare_mpi(environment)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{environment.launcher} started this job over MPI, but mpi4py cannot be loaded ({error}). "
            "Run: python -m hvdtrain setup"
        ) from error
    everyone = communicator or MPI.COMM_WORLD
    told, seen = (environment.rank, environment.size), (everyone.rank, everyone.size)
    if told != seen:
        library = _short(MPI.Get_library_version())
        raise LoneRanksError(
            f"{environment.launcher} started this process as rank {told[0]} of {told[1]}, but MPI ({library}) sees "
            f"rank {seen[0]} of {seen[1]}: the launcher belongs to another MPI than the one that mpi4py loads, or "
            "lacks its plugin (srun --mpi=pmix). Each would train a model of its own. Start them with its own mpirun, "
            "or with horovodrun --gloo; with another MPI, build Horovod for it: python -m hvdtrain setup --mpi system.",
            rank=environment.local_rank,
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, which Horovod and hvdtrain need side by side. "
            "Import hvdtrain first, or initialise mpi4py with its default threads."
        )
    return MPI


def prepare_mpi(environment: Environment, environ: Mapping[str, str] = os.environ) -> None:
    """Check, before MPI_Init, that the job's launcher, this process and the MPI library belong together.

    MPI_Init would abort without a word about the cause, wait forever, or make each process a job of its own.

    Raises:
        LoneRanksError: they do not.
    """
    if environment.controller != "mpi":
        return
    claim_rank(environ)
    library = _library()
    if library is None:
        return
    family, version = library
    wanted = _FAMILIES.get(environment.launcher)
    if wanted not in (None, family):
        raise LoneRanksError(
            f"{environment.launcher} belongs to {wanted} (or an MPI like it), and Python loads {version}: they do "
            f"not work together. Start the ranks with the mpirun of {family}, or horovodrun --gloo; to use {wanted}, "
            "build Horovod for it: python -m hvdtrain setup --mpi system.",
            rank=environment.local_rank,
        )
    number = environ.get("PMI_FD", "")  # a child started by Python's subprocess lacks this connection to the launcher
    if family == _MPICH and number.isdecimal() and not os.path.exists(f"/proc/self/fd/{number}"):
        raise LoneRanksError(
            "The launcher did not start this process, which has inherited the variables of a rank, but not the rank's "
            f"connection to the launcher. Received: PMI_RANK={environ.get('PMI_RANK')}, PMI_FD={number}, which is "
            'closed. To train in one process, unset "${!PMI_@}" in bash; a script between mpiexec and python must keep '
            "file descriptors open (subprocess: close_fds=False).",
            rank=0,
        )
    if family == _OPEN_MPI and environment.launcher == "srun" and "PMIX_RANK" not in environ:
        _refuse_open_mpi_without_pmi(environment, version)
    of_launcher = environ.get("OMPI_VERSION", "")
    if environment.rank == 0 and of_launcher and f"v{of_launcher.partition('.')[0]}." not in version:
        LOGGER.warning(f"mpirun is Open MPI {of_launcher}, Python loads {version}: they may not work together.")


def _refuse_open_mpi_without_pmi(environment: Environment, version: str) -> None:
    """Check that Open MPI can join the ranks of `srun --mpi=pmi2`: few builds of Open MPI 4 can, and none of 5."""
    info = shutil.which("ompi_info", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if info is None:
        return
    components = subprocess.run([info, "--parsable"], capture_output=True, text=True, check=False).stdout
    if "mca:" in components and not any(f"mca:pmix:{pmi}:" in components for pmi in ("s1", "s2", "cray")):
        raise LoneRanksError(
            f"srun started the ranks with PMI, as srun --mpi=pmi2 does, and {version} was built without it: MPI_Init "
            "would abort. Use srun --mpi=pmix, if srun --mpi=list shows it, or mpirun inside the allocation, or "
            "python -m hvdtrain launch, which chooses.",
            rank=environment.rank,
        )


def _library() -> tuple[str, str] | None:
    """Return family and version of the MPI library that mpi4py loads; None where that cannot be told."""
    try:
        library = load_mpi_library()
        text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    family = _OPEN_MPI if hasattr(library, "ompi_mpi_comm_self") else _MPICH
    return family, _short(text.value.decode(errors="replace"))


def _short(version: str) -> str:
    """Return name and number of a library's version, which may fill many lines."""
    return " ".join(version.splitlines()[0].split(",")[0].replace("Version:", " ").split())


_TAGS = 16_384  # MPI guarantees tags up to 32,767; the exchanges' own wrap around at half of that
_LOBBY_TAG = _TAGS
_FAILURE_TAG = _TAGS + 1
_BOARD_TAG = _TAGS + 2
_SECONDS_TO_REPORT = 1.0


class MpiTransport:
    """Point-to-point messages of one communicator."""

    pauses = 0.001, 0.005
    others_may_write = False

    def __init__(self, mpi: Any, communicator: Any, lobby: bool = False) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._lobby = lobby
        self._rank: int = communicator.Get_rank()
        self._size: int = communicator.Get_size()
        self._unsent: list[tuple[Any, bytes]] = []  # with their bytes, which MPI reads until they are sent
        self._sending = threading.Lock()
        self._posted: dict[int, bytes] = {}
        self._taking_posts = threading.Lock()

    def send(self, sequence: int, message: bytes) -> None:
        self._send(message, 0, self._tag(sequence))

    def received(self, sequence: int, ranks: Collection[int], wait: int = 0) -> Iterable[tuple[int, bytes]]:
        return self.arrived(self._tag(sequence))

    def publish(self, sequence: int, message: bytes, ranks: Collection[int], *, final: bool = True) -> None:
        for rank in ranks:
            self._send(message, rank, self._tag(sequence))

    def published(self, sequence: int, wait: int = 0) -> bytes | None:
        return self._receive(0, self._tag(sequence))[1]

    def finish(self, sequence: int, deadline: float) -> None:
        # A long message leaves only while its sender calls MPI.
        self._push(deadline)

    def send_failure(self, message: bytes) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._send(message, rank, _FAILURE_TAG)
        self._push(time.monotonic() + _SECONDS_TO_REPORT)

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        self.posted()  # the watchdog looks all the time: posts that nobody reads do not pile up within MPI
        came: dict[int, bytes] = {}
        for rank, message in self.arrived(_FAILURE_TAG):
            came.setdefault(rank, message)
        return came

    def post(self, message: bytes) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._send(message, rank, _BOARD_TAG)
        self._still_unsent()

    def posted(self) -> dict[int, bytes]:
        # Of each rank the last one that came.
        with self._taking_posts:
            self._posted.update(self.arrived(_BOARD_TAG))
            return dict(self._posted)

    def abort(self, code: int) -> NoReturn:
        """End all processes of the job."""
        if self._mpi.Is_initialized() and not self._mpi.Is_finalized():
            flush_output()
            # As Open MPI's MPI_Abort after its banner of nine lines, which would hide what this rank said.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                library = ctypes.CDLL(None)
                world = ctypes.addressof(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world"))
                library.ompi_mpi_abort(ctypes.c_void_p(world), ctypes.c_int(code))
            self._mpi.COMM_WORLD.Abort(code)
        end_process(code)

    def close(self) -> None:
        """See off what is not sent yet; the communicator stays, since freeing it would wait for all ranks."""
        self._push(time.monotonic() + _SECONDS_TO_REPORT)

    def _tag(self, sequence: int) -> int:
        return _LOBBY_TAG if self._lobby else sequence % _TAGS

    def _send(self, message: bytes, rank: int, tag: int) -> None:
        request = self._communicator.Isend([message, self._mpi.BYTE], rank, tag)
        with self._sending:
            self._unsent.append((request, message))

    def _push(self, deadline: float) -> None:
        """Let MPI send what is not sent yet, until ``deadline`` at most."""
        while self._still_unsent() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _still_unsent(self) -> bool:
        with self._sending:
            self._unsent = [(request, kept) for request, kept in self._unsent if not request.Test()]
            return bool(self._unsent)

    def arrived(self, tag: int) -> Iterator[tuple[int, bytes]]:
        """Yield sender and text of every message that is here, in each sender's order."""
        while True:
            rank, message = self._receive(self._mpi.ANY_SOURCE, tag)
            if message is None:
                return
            yield rank, message

    def _receive(self, source: int, tag: int) -> tuple[int, bytes | None]:
        """Return a message and its sender, or None for the message if there is none."""
        status = self._mpi.Status()
        found = self._communicator.Improbe(source, tag, status)
        if found is None:
            return source, None
        buffer = bytearray(status.Get_count(self._mpi.BYTE))
        found.Recv([buffer, self._mpi.BYTE])
        return status.Get_source(), bytes(buffer)


def open_mpi(
    environment: Environment,
    *,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    communicator: Any = None,
) -> RootedChannel:
    """Initialise MPI where nobody has, and open the channel.

    The ranks find one another by unsigned messages, with which rank 0 also hands out the secret that it
    draws: MPI's transport is the launcher's, and as safe as that makes it. With HVDTRAIN_JOB_SECRET set, that
    one is needed as well. `communicator` is that of all ranks, where it is not COMM_WORLD.

    Raises:
        LaunchError: a rank is missing, the secrets differ, mpi4py is missing, or MPI counts other ranks than
            the launcher.
    """
    mpi, deadline = load_mpi(environment, communicator), time.monotonic() + timeout
    everyone = communicator or mpi.COMM_WORLD
    rank, size = environment.rank, environment.size
    lobby = MpiTransport(mpi, everyone, lobby=True)
    greeting = RootedChannel(lobby, Signer(b"", ""), rank, size)
    drawn = secrets.token_bytes(KEY_BYTES) if rank == 0 else b""
    drawn = greeting.exchange(drawn, timeout=timeout)[0]
    given = secret_from_environment(environ)
    secret = hmac.digest(given, drawn, "sha256") if given else drawn
    duplicate, request = everyone.Idup()
    while not request.Test():
        if time.monotonic() > deadline:
            raise LaunchError("MPI could not duplicate its communicator in time: a rank hangs in MPI.")
        time.sleep(0.001)
    room = MpiTransport(mpi, duplicate)
    channel = RootedChannel(room, Signer(secret, environment.job_id), rank, size)
    channel.barrier(max(1.0, deadline - time.monotonic()))
    return channel
