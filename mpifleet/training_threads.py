"""Several training threads in one worker: the parameters of one model, gradients of their own.

Recht et al. 2011, Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent.
"""

import copy
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mpifleet.errors import ConfigError
from mpifleet.exchange import Exchange
from mpifleet.launchenv import whole_number
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

    Its step() is torch's to the eye; rates and other hyper-parameters are those of the worker's.
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
        self._params = [[params[id(p)] for p in table] for table in whole._params]
        self._grads = [np.zeros_like(flat) for flat in whole._grads]
        self._present = [np.zeros_like(flags) for flags in whole._present]
        self._grad_views = self._views(self._grads)
        self.embeddings = [params[id(e.weight)].sparse_embedding for e in whole.embeddings]  # type: ignore[attr-defined]
        self.reroute(exchange)

    def hypers(self) -> tuple[np.ndarray, np.ndarray]:
        """See DistributedOptimizer."""
        return self._whole.hypers()


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
    asked = "thread_num"
    if num is None:
        asked, num = CPU_NUM, whole_number(os.environ, CPU_NUM)
        num = 1 if num is None else num
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ConfigError(f"{asked}={num!r}; use a whole number of training threads, 1 or more")
    if model is None:
        raise ConfigError("fleet.run_threads(...) needs fleet.distributed_model(model)")
    if num == 1:
        return [TrainingThread(0, 1, model, optimizer)]
    turns = Turns(exchange, optimizer.specs, num, merges)
    return [_make_thread(turns, index, num, model, optimizer) for index in range(num)]


def _make_thread(
    turns: Turns, index: int, num: int, model: nn.Module, optimizer: DistributedOptimizer
) -> TrainingThread:
    exchange = ThreadExchange(turns, index)
    params = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    shared |= {**params, id(optimizer.clock): exchange.clock}
    twin = copy.deepcopy(model, shared)
    return TrainingThread(index, num, twin, ThreadOptimizer(optimizer, params, exchange))


def run_threads(
    threads: list[TrainingThread], optimizer: DistributedOptimizer, train: Train
) -> None:
    """Call train(thread) for each, in a thread of its own unless there is but one.

    Returns when all have; their steps and time then count as the worker's: a step's time is a
    thread's.  Raises the first error of a thread, the others having ended at their next exchange.
    """
    if len(threads) == 1:
        train(threads[0])
        return
    model, exchange, clock = optimizer.model, optimizer.exchange, optimizer.clock
    assert model is not None
    refusing = model.register_forward_pre_hook(_refuse)
    optimizer.reroute(cast(Exchange, ThreadsRun()))
    before = clock.enter("other")
    try:
        _run_together(threads, train)
    finally:
        optimizer.reroute(exchange)
        refusing.remove()
        clock.enter(before)
        for thread in threads:
            clock.add(thread.optimizer.clock.split())


def _run_together(threads: list[TrainingThread], train: Train) -> None:
    errors: list[BaseException] = []
    intra_op = max(1, torch.get_num_threads() // len(threads))

    def work(thread: TrainingThread) -> None:
        exchange = cast(ThreadExchange, thread.optimizer.exchange)
        try:
            torch.set_num_threads(intra_op)  # a new thread would take as many as there are cores
            train(thread)
            exchange.leave(thread.optimizer.values)
        except OtherThreadFailed:
            pass
        except BaseException as error:
            errors.append(error)
            exchange.fail()

    # Daemons: a signal that ends the worker does not wait for them.
    started = [
        threading.Thread(target=work, args=(thread,), name=f"training {thread.index}", daemon=True)
        for thread in threads
    ]
    for thread in started:
        thread.start()
    for thread in started:
        while thread.is_alive() and not errors:
            thread.join(0.05)
    for thread in started:
        thread.join(END_S if errors else None)
    if errors:
        raise errors[0]


def _refuse(_model: nn.Module, _inputs: Any) -> None:
    """A forward pre-hook that keeps threads from training the worker's own model."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "fleet.run_threads(...): a training thread called the worker's own model; use "
            "thread.model, which has gradients of its own"
        )
