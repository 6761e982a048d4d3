"""Who has what to save beside the tables: the optimizer, the model, the user, the exchange."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.local_state import holds, to_arrays
from mpifleet.log import get_logger
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.random_states import RandomStates
from mpifleet.state_dicts import from_state, to_state
from mpifleet.states import State, StateProvider

OWN_NAMES = ("param_groups", "buffers", "execution", "progress", "random")


class ParamGroups:
    """See StateProvider: rates and other hyper-parameters, as schedules have changed them.

    A group that is of another update rule here keeps its own.
    """

    name = "param_groups"
    per_worker = False

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def state(self) -> State:
        """All that the groups hold but their parameters, and the name of each one's rule."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.groups()
        ]
        values = to_state("param group ", groups)
        return State({**values.facts, "rules": self._optimizer.rule_names}, values.arrays)

    def check(self, state: State) -> None:
        """See StateProvider."""
        saved, ours = from_state("state 'param_groups'", state), self._optimizer.groups()
        if not isinstance(saved, list) or len(saved) != len(ours):
            count = len(saved) if isinstance(saved, list) else "no"
            raise CheckpointError(
                f"the checkpoint has {count} param groups, the optimizer has {len(ours)}"
            )
        if not all(isinstance(group, dict) for group in saved):
            raise CheckpointError("state 'param_groups' is damaged: not every group is a dict")
        for number in self._of_our_rules(state):
            try:
                self._optimizer.hyper_of(number, {**ours[number], **saved[number]})
            except (ConfigError, TypeError, IndexError) as cause:
                raise CheckpointError(f"param group {number} cannot be taken: {cause}") from cause

    def restore(self, state: State) -> None:
        """See StateProvider. A tensor, as a rate may be, stays the same object."""
        saved, ours = from_state("state 'param_groups'", state), self._optimizer.groups()
        for number in self._of_our_rules(state):
            group = ours[number]
            for key, value in saved[number].items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].detach().copy_(value)
                else:
                    group[key] = value

    def differences(self, state: State) -> list[str]:
        """Which groups keep their own values, in words."""
        names, taken = self._optimizer.rule_names, self._of_our_rules(state)
        return [
            f"param group {number} was of rule {state.facts['rules'][number]}, now {name}: its "
            "rates are the script's"
            for number, name in enumerate(names)
            if number not in taken
        ]

    def _of_our_rules(self, state: State) -> list[int]:
        """The groups whose update rule has not changed."""
        ours = self._optimizer.rule_names
        theirs = state.facts.get("rules", ours)
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            raise CheckpointError(
                f"state 'param_groups' is damaged: rules {theirs!r:.100} for {len(ours)} groups"
            )
        return [number for number, name in enumerate(ours) if theirs[number] == name]


class Buffers:
    """See StateProvider: the model's buffers, which become each worker's own in training."""

    name = "buffers"
    per_worker = False

    def __init__(self, model: nn.Module | None) -> None:
        named = dict(model.named_buffers()) if model is not None else {}
        kept = model.state_dict().keys() if model is not None else ()
        self._buffers = {name: tensor for name, tensor in named.items() if name in kept}

    def state(self) -> State:
        """Those of the model's state_dict()."""
        arrays = {name: array.copy() for name, array in to_arrays(self._buffers).items()}
        return State({}, arrays)

    def check(self, state: State) -> None:
        """See StateProvider."""
        for name, tensor in self._buffers.items():
            saved, ours = state.arrays.get(name), tuple(tensor.shape)
            if saved is None or saved.shape != ours:
                found = "missing" if saved is None else f"{saved.shape}"
                raise CheckpointError(f"buffer {name!r} is {found} in the file, {ours} here")
            if not holds(tensor, saved.dtype):
                raise CheckpointError(
                    f"buffer {name!r} is {saved.dtype} in the file, {tensor.dtype} here"
                )

    def restore(self, state: State) -> None:
        """See StateProvider."""
        for name, tensor in self._buffers.items():
            tensor.detach().copy_(torch.from_numpy(state.arrays[name].copy()))


class Execution:
    """See StateProvider: how the job computes. Nothing to restore: what differs is said."""

    name = "execution"
    per_worker = False

    def __init__(self, mode: str, training_threads: int) -> None:
        self._facts = {
            "mode": mode,
            "torch_threads": torch.get_num_threads(),
            "training_threads": training_threads,
        }

    def state(self) -> State:
        """The exchange's mode and the numbers of threads; 0 training threads: not known yet."""
        return State(dict(self._facts))

    def check(self, state: State) -> None:
        """See StateProvider."""
        threads = state.facts.get("training_threads") or 0
        if not isinstance(threads, int):
            raise CheckpointError(
                f"state 'execution' is damaged: training_threads {threads!r} is no whole number"
            )

    def restore(self, state: State) -> None:
        """See StateProvider."""

    def differences(self, state: State) -> list[str]:
        """What was different where it was saved, in words."""
        return [
            f"{what.replace('_', ' ')} {theirs}, now {self._facts[what]}"
            for what, theirs in state.facts.items()
            if what in self._facts and self._facts[what] and theirs and self._facts[what] != theirs
        ]


class Progress:
    """See StateProvider: the data position that the script gave. value: JSON-able, None for {}."""

    name = "progress"
    per_worker = False

    def __init__(self, value: Any = None) -> None:
        self.value = {} if value is None else value

    def state(self) -> State:
        """See StateProvider. Raises CheckpointError for keys that JSON would make text of."""
        if other := _other_key(self.value):
            raise CheckpointError(
                f"progress is not JSON-able: a dict in it has the key {other[0]!r}, which would "
                "come back as text; use text"
            )
        return State({"progress": self.value})

    def check(self, state: State) -> None:
        """See StateProvider."""
        if "progress" not in state.facts:
            raise CheckpointError("state 'progress' is damaged: it holds none")

    def restore(self, state: State) -> None:
        """See StateProvider."""
        self.value = state.facts["progress"]


def _other_key(value: Any) -> list[Any]:
    """The first key in a JSON-able value that is no text, alone in a list; else nothing."""
    if isinstance(value, dict):
        return [key for key in value if not isinstance(key, str)][:1] or _other_key(
            [*value.values()]
        )
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_other_key, value)), [])
    return []


class Registered:
    """See StateProvider: an object of the script that says and takes its state.

    get: gives it; put: takes it.
    """

    def __init__(
        self, name: str, per_worker: bool, get: Callable[[], Any], put: Callable[[Any], Any]
    ) -> None:
        self.name, self.per_worker = name, per_worker
        self._get, self._put = get, put

    def state(self) -> State:
        """See StateProvider."""
        try:
            value = self._get()
        except Exception as cause:
            raise CheckpointError(f"state {self.name!r} cannot be had: {cause!r}") from cause
        return to_state(f"state {self.name!r}: ", value)

    def check(self, state: State) -> None:
        """See StateProvider."""
        from_state(f"state {self.name!r}", state)

    def restore(self, state: State) -> None:
        """See StateProvider. Raises CheckpointError where the object does not take it."""
        value = from_state(f"state {self.name!r}", state)
        try:
            self._put(value)
        except Exception as cause:
            raise CheckpointError(f"state {self.name!r} was not taken: {cause!r}") from cause


class JobStates:
    """All that has a state in one session."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[Any, Registered]] = {}
        self.training_threads = 0
        self._expected_threads = 0

    def register(self, name: str, thing: Any, per_worker: bool) -> None:
        """Have `thing` saved and restored as `name`.

        Raises ConfigError for a name that is taken, or an object that cannot tell its state.
        """
        if not isinstance(name, str) or not name or "\0" in name or name in OWN_NAMES:
            raise ConfigError(
                f"register_state({name!r}, ...): use a text that is not empty and none of "
                f"{', '.join(OWN_NAMES)}"
            )
        known = self._registered.get(name)
        if known is not None and known[0] is not thing:
            raise ConfigError(f"register_state({name!r}, ...): the name is taken by another object")
        get, put = _access(name, thing)
        self._registered[name] = (thing, Registered(name, per_worker, get, put))

    def used_threads(self, num: int) -> None:
        """So many training threads are at work; says so where the resumed job had another."""
        self.training_threads = num
        if self._expected_threads and self._expected_threads != num:
            get_logger().warning(
                "%d training thread(s), the resumed job had %d: it goes on, but not bit for bit",
                num,
                self._expected_threads,
            )
        self._expected_threads = 0

    def expect_threads(self, num: int) -> None:
        """The resumed job had so many, 0 for not known."""
        self._expected_threads = num

    def providers(
        self, model: nn.Module | None, optimizer: DistributedOptimizer, mode: str, progress: Any
    ) -> list[StateProvider]:
        """In the order of restoring: random numbers last, since restoring might draw some."""
        registered = [provider for _, provider in self._registered.values()]
        return [
            ParamGroups(optimizer),
            Buffers(model),
            *registered,
            *optimizer.exchange.states(),
            Execution(mode, self.training_threads),
            Progress(progress),
            RandomStates(),
        ]


def _access(name: str, thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(thing, torch.Generator):
        return thing.get_state, thing.set_state
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    get, put = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    if not callable(get) or not callable(put):
        raise ConfigError(
            f"register_state({name!r}, {thing!r:.100}): use an object with state_dict() and "
            "load_state_dict(), a torch.Generator or a numpy Generator"
        )
    return get, put
