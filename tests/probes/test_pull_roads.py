"""Three roads to the same rows: load, indexed Get, served. All give exactly the same bytes.

10,000 random unique rows of 64 B out of 65,536, the last rank being the server.

Found: right on Open MPI 4.1.4 (osc/rdma, sm, pt2pt) and 5.0.11 (sm), 2 to 4 ranks. The load road
does not exist where osc is set to pt2pt alone: Allocate_shared raises MPI_ERR_INTERN on every rank;
`osc=sm,pt2pt` has both. Memory of a shared window is not 64-byte aligned (page + 264 on 4.1.4,
and each further rank exactly the asked size behind): who needs alignment pads by itself.
Building the indexed type costs more than the transfer: 1.8 ms from a numpy array, which mpi4py
reads element by element, 0.8 ms from a list, against 0.4 ms for the Get (10,000 rows, osc/sm).
"""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from words import memory_of, read_word, shared_or_skip, wait_until, write_word

NUM_ROWS, DIM, PULLED = 65_536, 16, 10_000
ROW_BYTES = 4 * DIM
LIMIT_S = 30.0
EMPTY, ASKED, SERVED = 0, 1, 2

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.timeout(2 * LIMIT_S)]


def rows_of(keys: np.ndarray) -> np.ndarray:
    """What row `key` holds, by formula: float32 [n, DIM], exact, different at every element."""
    elements = keys[:, None] * DIM + np.arange(DIM)
    return elements.astype(np.float32)  # below 2**24: no rounding


def keys_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).permutation(NUM_ROWS)[:PULLED]


def pull_by_load(win: MPI.Win, server: int, keys: np.ndarray) -> np.ndarray:
    memory, _ = win.Shared_query(server)
    table = torch.frombuffer(memory, dtype=torch.float32).view(NUM_ROWS, DIM)
    win.Lock(server, MPI.LOCK_SHARED)
    rows = torch.index_select(table, 0, torch.from_numpy(keys))
    win.Unlock(server)
    return rows.numpy()


def pull_indexed(win: MPI.Win, server: int, keys: np.ndarray) -> np.ndarray:
    row = MPI.FLOAT.Create_contiguous(DIM)
    picked = row.Create_indexed_block(1, keys.tolist()).Commit()
    rows = np.empty((keys.size, DIM), np.float32)
    win.Lock(server, MPI.LOCK_SHARED)
    win.Get(rows, server, [0, 1, picked])
    win.Unlock(server)
    picked.Free()
    row.Free()
    return rows


LANE_WORDS = 1 + PULLED + PULLED * ROW_BYTES // 8  # flag | keys | reply rows, in 8-byte words


def pull_served(mail: MPI.Win, server: int, lane: int, keys: np.ndarray) -> np.ndarray:
    start = lane * LANE_WORDS
    mail.Put(keys, server, [start + 1, keys.size, MPI.INT64_T])
    mail.Flush(server)  # the keys stand at the server before the flag does
    write_word(mail, server, ASKED, start)
    wait_until(lambda: read_word(mail, server, start) == SERVED, "reply", LIMIT_S)
    rows = np.empty((keys.size, DIM), np.float32)
    mail.Get(rows, server, [start + 1 + PULLED, rows.size, MPI.FLOAT])
    mail.Flush(server)
    return rows


def serve(mail: MPI.Win, server: int, lanes: int, table: np.ndarray) -> None:
    """Answer one request of each lane, gathering within the server's own memory."""
    words = memory_of(mail, np.int64)
    for lane in range(lanes):
        start = lane * LANE_WORDS
        wait_until(lambda at=start: read_word(mail, server, at) == ASKED, "request", LIMIT_S)
        mail.Sync()
        reply = words[start + 1 + PULLED : start + LANE_WORDS].view(np.float32)
        np.take(table, words[start + 1 : start + 1 + PULLED], 0, out=reply.reshape(PULLED, DIM))
        mail.Sync()
        write_word(mail, server, SERVED, start)


def agree(comm: MPI.Comm, pulled: np.ndarray | None) -> None:
    """All ranks fail together when one pulled other bytes than the formula's."""
    right = pulled is None or pulled.tobytes() == rows_of(keys_of(comm.rank)).tobytes()
    assert comm.allgather(right) == [True] * comm.size


def test_pull_by_load(comm):
    server = comm.size - 1
    win = shared_or_skip(comm, NUM_ROWS * ROW_BYTES if comm.rank == server else 0)
    if comm.rank == server:
        win.Lock(server, MPI.LOCK_EXCLUSIVE)
        memory_of(win, np.float32).reshape(NUM_ROWS, DIM)[:] = rows_of(np.arange(NUM_ROWS))
        win.Unlock(server)
    comm.Barrier()
    pulled = pull_by_load(win, server, keys_of(comm.rank)) if comm.rank != server else None
    agree(comm, pulled)
    win.Free()


def test_pull_indexed(comm):
    server = comm.size - 1
    table_bytes = NUM_ROWS * ROW_BYTES if comm.rank == server else 0
    win = MPI.Win.Allocate(table_bytes, ROW_BYTES, MPI.INFO_NULL, comm)
    if comm.rank == server:
        win.Lock(server, MPI.LOCK_EXCLUSIVE)
        memory_of(win, np.float32).reshape(NUM_ROWS, DIM)[:] = rows_of(np.arange(NUM_ROWS))
        win.Unlock(server)
    comm.Barrier()
    pulled = pull_indexed(win, server, keys_of(comm.rank)) if comm.rank != server else None
    agree(comm, pulled)
    win.Free()


def test_pull_served(comm):
    server, lanes = comm.size - 1, comm.size - 1
    lane_bytes = 8 * LANE_WORDS * lanes if comm.rank == server else 0
    mail = MPI.Win.Allocate(lane_bytes, 8, MPI.INFO_NULL, comm)
    if comm.rank == server:
        memory_of(mail, np.int64)[:] = EMPTY
    comm.Barrier()
    mail.Lock_all()
    pulled = None
    if comm.rank == server:
        serve(mail, server, lanes, rows_of(np.arange(NUM_ROWS)))
    else:
        pulled = pull_served(mail, server, comm.rank, keys_of(comm.rank))
    agree(comm, pulled)
    mail.Unlock_all()
    mail.Free()
