"""`python -m mpifleet`: the `mpifleet` command where its program is not on PATH."""

import sys

from mpifleet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
