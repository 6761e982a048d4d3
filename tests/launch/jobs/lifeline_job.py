"""A job that holds a lifeline over mpi4py; each rank does what the command line says.

Usage: lifeline_job.py RANK:ACTION ... ; other ranks wait inside MPI for a message that never comes.
Prints "ready RANK PID" on every rank, after all ranks hold their lifelines.
"""

import ctypes
import os
import sys
import time

import numpy as np

from mpifleet.launchenv import LOG_DIR
from mpifleet.lifeline import (
    Address,
    Hub,
    Lifeline,
    RankSegments,
    install_excepthook,
    listen_host,
)
from mpifleet.mpi import load_mpi
from mpifleet.ranklog import redirect


def main() -> None:
    MPI = load_mpi()
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    node_comm = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node_comm.size == size
    hub = Hub.open(listen_host(one_node)) if rank == 0 and size > 1 else None
    address = world.bcast(hub.address if hub else None)
    roles = [f"worker {r}" for r in range(size - 1)] + ["server 0"] if size > 1 else ["worker 0"]
    role, index = roles[rank].split()
    log_dir = os.environ.get(LOG_DIR)
    voice = redirect(role, int(index), rank, log_dir) if log_dir else None
    line = Lifeline.connect(
        Address(*address) if address else None,
        rank=rank,
        size=size,
        role=roles[rank],
        roles=roles,
        stall_report_s=float(os.environ.get("STALL_REPORT_S", "60")),
        stall_end_s=float(os.environ.get("STALL_END_S", "600")),
        hub=hub,
        voice=voice,
    )
    install_excepthook(line)
    node_comm.Barrier()
    segments = RankSegments(node_comm.size)
    if node_comm.allreduce(segments.complete, op=MPI.LAND):
        segments.hide()
    # Windows as a parameter server holds them: their files are what must not be left behind.
    shared = MPI.Win.Allocate_shared(1 << 20, 1, comm=node_comm)
    window = MPI.Win.Allocate(1 << 20, 1, comm=node_comm)
    world.Barrier()
    print(f"ready {rank} {os.getpid()}\n", end="", flush=True)
    world.Barrier()
    action = dict(word.split(":") for word in sys.argv[1:]).get(str(rank), "wait")
    if action == "raise":
        raise ValueError("no such thing\nsecond line")
    if action == "exit":
        sys.exit(3)
    if action == "sleep":
        time.sleep(600)
    if action == "busy":
        while True:
            np.ones(100_000).sum()
    if action == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(f"child {rank} {child}\n", end="", flush=True)
    if action not in ("finish", "late"):
        world.Recv(np.empty(1), source=(rank + 1) % size, tag=9)
    shared.Free()
    window.Free()
    world.Barrier()
    segments.restore(node_comm.rank)
    if action == "late":
        time.sleep(600)
    # Not MPI.Finalize(), which keeps the interpreter's lock while it waits for the other ranks:
    # the lifeline's thread must see the death of one of them.
    ctypes.CDLL(MPI.__file__).MPI_Finalize()
    line.goodbye()


main()
