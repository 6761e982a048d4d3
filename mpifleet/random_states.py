"""Where the random numbers of a process stand: torch's, numpy's and Python's global ones."""

import random

import numpy as np
import torch

from mpifleet.errors import CheckpointError
from mpifleet.state_dicts import from_state, to_state
from mpifleet.states import State


class RandomStates:
    """See StateProvider: torch's CPU and CUDA generators, numpy's global one, Python's `random`.

    A device that was not there when it was saved, or is not here now, is left out.
    """

    name = "random"
    per_worker = True

    def state(self) -> State:
        """About 10 KB, and 16 bytes for each GPU."""
        version, words, gauss = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 -- scripts use it
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return to_state("the random states", state)

    def check(self, state: State) -> None:
        """See StateProvider."""
        found = from_state("state 'random'", state)
        for name, part in (("torch", torch.Tensor), ("numpy", dict), ("python", dict)):
            if not isinstance(found, dict) or not isinstance(found.get(name), part):
                raise CheckpointError(f"state 'random' is damaged: {name!r} is missing")

    def restore(self, state: State) -> None:
        """Raises CheckpointError where a generator does not take its state."""
        found = from_state("state 'random'", state)
        try:
            torch.set_rng_state(found["torch"])
            np.random.set_state(found["numpy"])  # noqa: NPY002
            python = found["python"]
            words = tuple(python["words"].tolist())
            random.setstate((python["version"], words, python["gauss"]))
            if torch.cuda.is_available():
                for device, words in enumerate(found.get("cuda", ())[: torch.cuda.device_count()]):
                    torch.cuda.set_rng_state(words, device)
        except (RuntimeError, TypeError, ValueError, KeyError) as cause:
            raise CheckpointError(f"state 'random' cannot be restored: {cause}") from cause
