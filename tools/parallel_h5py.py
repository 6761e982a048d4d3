""".venvs/parallel: an h5py that writes through HDF5's MPI driver, built here; wheels have none.

All else comes from .venvs/system, which stands behind it.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from tools.venvs import ROOT, SetUpError, prepare_built

PARALLEL = "parallel"
PACKAGE = "libhdf5-openmpi-dev"
# mpi4py is a wheel: built from source it takes minutes, and old versions gigabytes of memory.
_TOOLS = ["Cython>=3", "numpy", "packaging", "pkgconfig", "setuptools>=77.0.1", "mpi4py"]
_CHECK = "import h5py; assert h5py.get_config().mpi; import h5py.h5fd; h5py.h5fd.MPIO_COLLECTIVE"


def prepare_parallel() -> None:
    """Make it ready. Raises SetUpError where it cannot be built."""
    venv = ROOT / ".venvs" / PARALLEL
    # Without optimizing: building takes longer than all tests with it.
    env = {"HDF5_MPI": "ON", "CC": "mpicc", "CFLAGS": "-O0 -g0", **_debian_hdf5()}
    # pip would take for this one a wheel that it built without MPI before: no cache.
    build = ["--no-build-isolation", "--no-binary=h5py", "--no-deps", "--no-cache-dir", "h5py"]
    try:
        prepare_built(PARALLEL, [(["--upgrade", *_TOOLS], {}), (build, env)], _CHECK)
    except SetUpError as error:
        raise SetUpError(f"no h5py with MPI here, which needs {PACKAGE}: {error}") from error
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    behind = ROOT / ".venvs" / "system" / "lib" / version / "site-packages"
    own = venv / "lib" / version / "site-packages"
    text = f"import site; site.addsitedir({str(behind)!r})\n"
    (own / "zz_system.pth").write_text(text, encoding="utf-8")


def _debian_hdf5() -> dict[str, str]:
    """Where Debian has the HDF5 of Open MPI; empty elsewhere: h5py then asks pkg-config."""
    include = Path("/usr/include/hdf5/openmpi")
    library = Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")) / "hdf5" / "openmpi"
    if not (include.is_dir() and library.is_dir()):
        return {}
    return {"HDF5_INCLUDEDIR": str(include), "HDF5_LIBDIR": str(library)}
