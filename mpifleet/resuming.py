"""Fleet's public calls by which training goes on where it stopped; see `mpifleet.fleet`."""

from typing import Any

from mpifleet.checkpoint import Keep, gzip_level
from mpifleet.current import current
from mpifleet.paths import Named, path_of
from mpifleet.ps.saving import SaveOptions
from mpifleet.resume import Resumption


def save_checkpoint(
    dirname: Named,
    progress: Any = None,
    *,
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
    compression: str | None = None,
    driver: str | None = None,
) -> None:
    """Write everything from which `resume` goes on as if training had never stopped.

    Collective over workers, between two steps. Beside what save_persistables writes: the param
    groups' rates, the state of torch's, numpy's and Python's random numbers, buffers of every
    worker, what was given to register_state, and `progress`, this worker's data position: any JSON
    value, None for {}.  No step that a worker has made is missing and none is made until the tables
    are copied.  The other arguments are save_persistables'.  Raises CheckpointError on every
    worker; the earlier checkpoints then stay.
    """
    keep, level = Keep(keep_last, keep_every), gzip_level(compression)
    options = SaveOptions(wait, refuse_busy, keep, level=level, driver=driver)
    _resumption().save(path_of("dirname", dirname), progress, options)


def resume(dirname: Named) -> Any:
    """Bring back all that save_checkpoint wrote; gives this worker's progress.

    Collective over workers, after init_worker(). None where the directory has no checkpoint yet, so
    that one script starts and restarts.  Tables come back at any number of servers.  At another
    number of workers what is worker 0's goes to all, its progress too, and random numbers start
    anew; that, another number of threads and another mode are told in one warning.  Raises
    CheckpointError on every worker for a file that does not fit, before anything has changed.
    """
    return _resumption().resume(path_of("dirname", dirname))


def _resumption() -> Resumption:
    return Resumption(current().persistables(), current().states)


def register_state(name: str, thing: Any, *, per_worker: bool = False) -> None:
    """Have `thing` saved by save_checkpoint and restored by resume, under `name`.

    thing: has state_dict() and load_state_dict(), as schedulers have, or is a torch.Generator or a
    numpy Generator. Its state is made of None, booleans, numbers, text, lists, tuples, sets, dicts,
    torch tensors and numpy arrays: nothing is pickled.  Every worker registers the same names in
    the same order, and gets its own state back.  At another number of workers all take worker 0's,
    or none where it is per_worker. Raises ConfigError; what cannot be saved, save_checkpoint names.
    """
    current().states.register(name, thing, per_worker)
