"""The only place that imports mpi4py.MPI: thread level and transport are chosen first.

The level is fixed before any strategy exists. Parameter-server jobs ask for SERIALIZED, because
Open MPI 4's two-sided windows between nodes refuse MULTIPLE. MPIFLEET_THREAD_LEVEL overrides.
Under SERIALIZED every MPI call of the package is made while holding `serial`.
"""

import ctypes
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from mpifleet.errors import ConfigError
from mpifleet.launchenv import read_launch_env, transport_defaults

LEVELS = ("single", "funneled", "serialized", "multiple")

serial = threading.RLock()
"""Process-wide: held around every MPI call, from the first to the last call of an epoch."""


def load_mpi() -> ModuleType:
    """Import mpi4py.MPI, start MPI and return the module.

    The library is asked for its name first, so that the transport settings fit it. Where the
    script started MPI before, its level and transport stand: `inter_node_advice` says what follows.
    Raises ConfigError for an unknown thread level in the environment.
    """
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(_wanted_level(MPI))
        return MPI
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    for name, value in transport_defaults(read_launch_env(), version).items():
        os.environ.setdefault(name, value)
    MPI.Init_thread(_wanted_level(MPI))
    return MPI


def _wanted_level(mpi: ModuleType) -> int:
    name = "MPIFLEET_THREAD_LEVEL"
    if name not in os.environ:
        name = "MPI4PY_RC_THREAD_LEVEL"
    wanted = os.environ.get(name, "serialized").lower()
    if wanted not in LEVELS:
        raise ConfigError(f"{name}={wanted!r} is no thread level; use one of {', '.join(LEVELS)}")
    return int(getattr(mpi, f"THREAD_{wanted.upper()}"))


def check_threads_allowed() -> None:
    """Raise ConfigError where MPI was started for calls from the main thread alone."""
    from mpi4py import MPI

    if (level := thread_level(MPI)) in ("single", "funneled"):
        raise ConfigError(
            f"MPI was started with thread level {level}, which keeps training threads from using "
            "it; use MPIFLEET_THREAD_LEVEL=serialized"
        )


def abort_on_error(mpi: ModuleType) -> Callable[[], None]:
    """Until the returned function is called, an uncaught exception on this rank aborts the job.

    A rank that failed before the lifeline is up would wait in MPI_Finalize for the others, and
    they for it.
    """
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        earlier(kind, error, trace)
        rank = mpi.COMM_WORLD.rank
        print(f"mpifleet: rank {rank} (starting) failed: {kind.__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = earlier

    sys.excepthook = hook
    return undo


def finalize(mpi: ModuleType) -> None:
    """End MPI, waiting for the other ranks without holding the interpreter's lock.

    MPI.Finalize() holds it, and threads that watch the job would stand still meanwhile. Collective.
    """
    if mpi.Is_finalized():
        return
    call = _library_call(mpi, "MPI_Finalize")
    if call is None:
        mpi.Finalize()
    else:
        call()


def thread_level(mpi: ModuleType) -> str:
    """The level MPI really gives, as one of LEVELS."""
    names = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return names[mpi.Query_thread()]


def library(mpi: ModuleType) -> str:
    """Name and version of the MPI library, for instance "Open MPI 4.1.4"."""
    vendor, version = mpi.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def inter_node_advice(mpi: ModuleType) -> str:
    """What to change when a window between nodes cannot be made."""
    level = thread_level(mpi)
    advice = (
        f"{library(mpi)} offers no one-sided component for a window between nodes "
        f"at thread level {level.upper()}. "
    )
    if level == "multiple":
        advice += (
            "The script imported mpi4py.MPI before fleet.init(): call fleet.init() first, "
            "or set MPI4PY_RC_THREAD_LEVEL=serialized"
        )
    else:
        advice += "Check the transport settings"
    wanted = transport_defaults(read_launch_env(), mpi.Get_library_version())
    if wanted:
        advice += " together with " + " ".join(f"{k}={v}" for k, v in sorted(wanted.items()))
    return advice


def mpi_type(mpi: ModuleType, dtype: np.dtype) -> Any:
    """The predefined MPI datatype of a numpy dtype.

    Raises ConfigError for a dtype without one (float16 and bfloat16 among them).
    """
    wanted = np.dtype(dtype)
    # mpi4py has a name for float16, MPI libraries have no type behind it.
    if wanted == np.float16 or wanted.char not in mpi._typedict:
        raise ConfigError(f"no MPI datatype for {wanted}")
    return mpi._typedict[wanted.char]


def indexed_rows(mpi: ModuleType, row: Any, rows: np.ndarray) -> Any:
    """A datatype that picks `rows` (int64 [n], below 2^31) of a table of committed type `row`.

    Handed to the library as memory: 0.14 ms for 10,000 rows where mpi4py, which reads a sequence
    number by number, takes 0.5 ms; that is the fallback.  Not committed; the caller frees it.
    """
    displacements = np.ascontiguousarray(rows, np.int32)
    call = _library_call(mpi, "MPI_Type_create_indexed_block")
    picked = mpi.Datatype()
    if call is not None:
        # Open MPI's handles are pointers, MPICH's are ints.
        is_pointer = mpi._sizeof(mpi.Datatype) == ctypes.sizeof(ctypes.c_void_p)
        handle = ctypes.c_void_p if is_pointer else ctypes.c_int
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, handle, ctypes.c_void_p]
        base = handle.from_address(mpi._addressof(row))
        place = mpi._addressof(picked)
        if call(displacements.size, 1, displacements.ctypes.data, base, place) == mpi.SUCCESS:
            return picked
    return row.Create_indexed_block(1, displacements.tolist())


def gather_json(comm: Any, value: Any) -> list[Any]:
    """Every rank's JSON-able `value`, by rank. Collective. Nothing is pickled."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with serial:
        sizes = np.empty(comm.size, np.int64)
        comm.Allgather(np.array([text.size], np.int64), sizes)
        starts = np.cumsum(sizes) - sizes
        whole = np.empty(int(sizes.sum()), np.uint8)
        comm.Allgatherv(text, [whole, sizes.tolist(), starts.tolist(), _byte()])
    parts = zip(starts.tolist(), sizes.tolist(), strict=True)
    return [json.loads(whole[start : start + size].tobytes()) for start, size in parts]


def bcast_json(comm: Any, value: Any, root: int = 0) -> Any:
    """The root's JSON-able `value` on every rank. Collective. Nothing is pickled."""
    text = json.dumps(value).encode() if comm.rank == root else b""
    with serial:
        size = np.array([len(text)], np.int64)
        comm.Bcast(size, root)
        whole = np.zeros(int(size[0]), np.uint8)
        whole[: len(text)] = np.frombuffer(text, np.uint8)
        comm.Bcast(whole, root)
    return json.loads(whole.tobytes())


@functools.cache
def _library_call(mpi: ModuleType, name: str) -> Any:
    """A function of the MPI library itself, None where it cannot be found."""
    assert mpi.__file__ is not None
    return getattr(ctypes.CDLL(mpi.__file__), name, None)


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
