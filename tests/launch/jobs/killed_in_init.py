"""Rank 1 is killed DELAY seconds after all ranks have begun to start MPI."""

import os
import signal
import sys
import time

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    rank = os.getpid()
    # A process of its own: no thread of this one may run while MPI_Init does.
    if os.fork() == 0:
        os.setsid()
        time.sleep(float(sys.argv[1]))
        os.kill(rank, signal.SIGKILL)
        os._exit(0)
MPI.Init_thread(MPI.THREAD_SERIALIZED)
time.sleep(600)
