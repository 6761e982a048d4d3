"""What tests and benchmarks need, made ready: `python3 -m tools.set_up NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.parallel_h5py import PARALLEL, prepare_parallel
from tools.prerequisites import install_system_packages
from tools.processes import exit_on_sigterm
from tools.venvs import SetUpError, prepare, prepare_listed

PACKAGES, PEERS = "packages", "peers"
# Rows are updated by compiled code in one, by torch in the other.
EXTRAS = {"system": "test,compiled", "wheel": "test,mpi"}
LIMIT_S = 1200.0
_CHECK = "import mpifleet, torch, mpi4py, h5py, xxhash, pytest, pytest_timeout"
_PEERS_LIST = "benchmarks/peers/requirements.txt"
_PEERS_CHECK = "import paddle.distributed.fleet"


def main(argv: Sequence[str] | None = None) -> int:
    """Make ready what the one argument names: system packages, or a virtual environment.

    "parallel" has an h5py with MPI, and "system" behind it.  "peers" holds the other projects that
    benchmarks compare with, which do not go together with the package's own dependencies.
    """
    names = list(sys.argv[1:] if argv is None else argv)
    known = (PACKAGES, PARALLEL, PEERS, *EXTRAS)
    if len(names) != 1 or names[0] not in known:
        print(f"{' '.join(names)!r}: name one of {', '.join(known)}", file=sys.stderr)
        return 2
    exit_on_sigterm()
    try:
        if names[0] == PACKAGES:
            install_system_packages()
        elif names[0] == PARALLEL:
            prepare_parallel()
        elif names[0] == PEERS:
            prepare_listed(PEERS, _PEERS_LIST, _PEERS_CHECK)
        else:
            prepare(names[0], EXTRAS[names[0]], _CHECK)
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
