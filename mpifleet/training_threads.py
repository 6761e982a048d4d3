"""Several training threads in one worker: the parameters of one model, gradients of their own.

Recht et al. 2011, Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent.
"""

import copy
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mpifleet.errors import ConfigError
from mpifleet.exchange import Exchange
from mpifleet.launchenv import whole_number
from mpifleet.log import get_logger
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.thread_exchange import OtherThreadFailed, ThreadExchange, ThreadsRun, Turns

# How long to wait for the other threads once one has failed: they end at their next exchange.
END_S = 10.0
# Fleet's variable for the training threads of a worker.
CPU_NUM = "CPU_NUM"


@dataclass(frozen=True)
class TrainingThread:
    """What a training thread works with: its number, how many there are, its model and optimizer.

    The model shares parameters and buffers with the worker's own, and has its own gradients.
    """

    index: int
    num: int
    model: Any
    optimizer: DistributedOptimizer


Train = Callable[[TrainingThread], None]


class ThreadOptimizer(DistributedOptimizer):
    """A worker's optimizer for one thread's copy of the model.

    Rates and other hyper-parameters are the worker's; its param groups are copies, for looking at.
    """

    def __init__(
        self, whole: DistributedOptimizer, params: dict[int, nn.Parameter], exchange: Exchange
    ) -> None:
        # Not torch's own __init__: it would begin a state and hooks of its own.
        self.__dict__.update({k: v for k, v in vars(whole).items() if k != "step"})
        self._whole = whole
        self.param_groups = [
            {**group, "params": [params[id(p)] for p in group["params"]]}
            for group in whole.param_groups
        ]
        self._given = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        self._params = [[params[id(p)] for p in table] for table in whole._params]
        self._grads = [np.zeros_like(flat) for flat in whole._grads]
        self._present = [np.zeros_like(flags) for flags in whole._present]
        self._grad_views = self._views(self._grads)
        self.embeddings = [params[id(e.weight)].sparse_embedding for e in whole.embeddings]  # type: ignore[attr-defined]
        self.reroute(exchange)

    def hypers(self) -> tuple[np.ndarray, np.ndarray]:
        """See DistributedOptimizer."""
        return self._whole.hypers()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See DistributedOptimizer."""
        self._whole._opt_called = True  # type: ignore[attr-defined]  # for the worker's schedulers
        for group, given in zip(self.param_groups, self._given, strict=True):
            changed = [name for name in given if group[name] != given[name]]
            if changed:
                raise ConfigError(
                    f"{changed[0]!r} of a thread's optimizer was changed from {given[changed[0]]} "
                    f"to {group[changed[0]]}: rates and schedulers belong to the worker's own"
                )
        return super().step(closure)

    def load_state_dict(self, *_: Any) -> None:
        """Raises ConfigError: rates are the worker's."""
        raise ConfigError("load_state_dict() belongs to the worker's own optimizer")


def make_threads(
    exchange: Exchange,
    model: nn.Module | None,
    optimizer: DistributedOptimizer,
    num: int | None,
    merges: bool,
) -> list[TrainingThread]:
    """Threads that are not started: each a copy of the model that shares its values.

    num: else CPU_NUM, else 1; one thread works with the worker's own model.  merges: see Turns.
    Raises ConfigError for a number that cannot be, or without a model.
    """
    asked, given = "thread_num", num
    if num is None:
        asked, given = CPU_NUM, whole_number(os.environ, CPU_NUM)
        given = 1 if given is None else given
    try:
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if isinstance(given, bool) or count < 1:
        raise ConfigError(f"{asked}={given!r}; use a whole number of training threads, 1 or more")
    if model is None:
        raise ConfigError("fleet.run_threads(...) needs fleet.distributed_model(model)")
    if count == 1:
        return [TrainingThread(0, 1, model, optimizer)]
    _check_whole(model, optimizer)
    if count > (cores := len(os.sched_getaffinity(0))):
        get_logger().warning("%d training threads (%s) share %d core(s)", count, asked, cores)
    turns = Turns(exchange, optimizer.specs, count, merges)
    return [_make_thread(turns, index, count, model, optimizer) for index in range(count)]


def _check_whole(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    inside = {id(param) for param in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    trained += [embedding.weight for embedding in optimizer.embeddings]
    outside = sum(id(param) not in inside for param in trained)
    if outside:
        raise ConfigError(
            f"fleet.run_threads(...): {outside} of the optimizer's parameters and tables are not "
            "in the model given to fleet.distributed_model(...), of which threads have copies"
        )


def _make_thread(
    turns: Turns, index: int, num: int, model: nn.Module, optimizer: DistributedOptimizer
) -> TrainingThread:
    exchange = ThreadExchange(turns, index)
    # Tables hook into their parameter, which must require a gradient for that.
    params = {id(p): nn.Parameter(p.data) for p in model.parameters()}
    shared: dict[int, Any] = {id(buffer): buffer.data for buffer in model.buffers()}
    shared |= {**params, id(optimizer.clock): exchange.clock}
    try:
        twin = copy.deepcopy(model, shared)
    except Exception as error:
        raise ConfigError(
            f"fleet.run_threads(...): the model cannot be copied for a thread: {error}"
        ) from error
    for param in model.parameters():
        params[id(param)].requires_grad_(param.requires_grad)
    return TrainingThread(index, num, twin, ThreadOptimizer(optimizer, params, exchange))


def run_threads(
    threads: list[TrainingThread],
    model: nn.Module,
    optimizer: DistributedOptimizer,
    train: Train,
    use: Callable[[Exchange], None],
) -> None:
    """Call train(thread) for each, in a thread of its own unless there is but one.

    use: what the worker uses as exchange from then on.  Returns when all have; their steps and time
    then count as the worker's: a step's time is a thread's.  Raises the first error of a thread,
    once the others have ended at their next exchange; where one has not within END_S, the worker
    cannot use its tables any more.
    """
    if len(threads) == 1:
        train(threads[0])
        return
    with _lent(threads, model, optimizer, use) as started:
        intra_op = torch.get_num_threads()
        started += _to_start(threads, train, max(1, intra_op // len(threads)))
        try:
            _run_together(threads, started)
        finally:
            torch.set_num_threads(intra_op)


@contextmanager
def _lent(
    threads: list[TrainingThread],
    model: nn.Module,
    optimizer: DistributedOptimizer,
    use: Callable[[Exchange], None],
) -> Iterator[list[threading.Thread]]:
    """The worker's own way to its tables is closed within, and comes back once all have ended.

    Gives a list for the threads that are started.
    """
    exchange, clock, closed = optimizer.exchange, optimizer.clock, ThreadsRun()
    hooks = [module.register_forward_pre_hook(_refuse) for module in model.modules()]
    optimizer.reroute(cast(Exchange, closed))
    use(cast(Exchange, closed))
    before = clock.enter("other")
    started: list[threading.Thread] = []
    try:
        yield started
    finally:
        clock.enter(before)
        for hook in hooks:
            hook.remove()
        if any(thread.is_alive() for thread in started):
            closed.has_straggler = True
            get_logger().error(
                "a training thread has not ended %.0f s after another failed: this worker cannot "
                "use its tables any more",
                END_S,
            )
        else:
            optimizer.reroute(exchange)
            use(exchange)
            for each in threads:
                clock.add(each.optimizer.clock.split())


def _to_start(threads: list[TrainingThread], train: Train, intra_op: int) -> list[threading.Thread]:
    def work(thread: TrainingThread) -> None:
        exchange = cast(ThreadExchange, thread.optimizer.exchange)
        try:
            torch.set_num_threads(intra_op)
            train(thread)
            exchange.leave(thread.optimizer.values)
        except OtherThreadFailed:
            pass
        except BaseException as error:
            exchange.fail(error)
        finally:
            exchange.clock.enter("other")

    # Daemons: a signal that ends the worker does not wait for them.
    return [
        threading.Thread(target=work, args=(thread,), name=f"training {thread.index}", daemon=True)
        for thread in threads
    ]


def _run_together(threads: list[TrainingThread], started: list[threading.Thread]) -> None:
    exchange = cast(ThreadExchange, threads[0].optimizer.exchange)
    try:
        for thread in started:
            thread.start()
        for thread in started:
            while thread.is_alive() and exchange.error is None:
                thread.join(0.05)
    except BaseException as error:
        exchange.fail(error)
        raise
    finally:
        until_s = time.monotonic() + END_S
        for thread in started:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()) if exchange.error else None)
    if exchange.error is not None:
        raise exchange.error


def _refuse(_model: nn.Module, _inputs: Any) -> None:
    """A forward pre-hook that keeps threads from training the worker's own model."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "fleet.run_threads(...): a training thread called the worker's own model; use "
            "thread.model, which has gradients of its own"
        )
