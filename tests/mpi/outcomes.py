"""Outcomes of all ranks, gathered before anything is asserted, so that all ranks fail together."""

from mpifleet import mpi


def together(comm, *facts):
    """Whether all facts hold on all ranks. Collective."""
    with mpi.serial:
        return all(comm.allgather(all(facts)))


def raised(error, call, *arguments, **options):
    """The message of `error` as raised by the call, "" when it was not."""
    try:
        call(*arguments, **options)
    except error as caught:
        return str(caught)
    return ""
