"""Where a worker's time goes, phase by phase, measured always."""

import time

PHASES = ("data", "unique", "pull", "forward", "backward", "push", "wait", "other")
# With "mpifleet: rank 0 (worker 0): " before it, a line of 120 characters.
SUMMARY_WIDTH = 88


class StepClock:
    """Adds up the time spent in each phase of a training step; one phase at any moment.

    data: between step() and the next forward; unique: sorting and deduplicating ids; pull: reading
    rows and dense parameters; forward and backward: the model, the loss counted with forward; push:
    merging and sending gradients (in a single process: applying them); wait: for servers, and in
    sync mode for other workers; other: look-ups without gradients, for instance an evaluation.

    A change of phase costs about 0.1 us.  For one thread.
    """

    def __init__(self) -> None:
        self.phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since_s = time.perf_counter()
        self._steps = 0

    def enter(self, phase: str) -> str:
        """Be in `phase` from now on; returns the one before."""
        now_s, before = time.perf_counter(), self.phase
        self._seconds[before] += now_s - self._since_s
        self._since_s, self.phase = now_s, phase
        return before

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return self._steps

    def end_step(self) -> None:
        """A step is done; what comes now is the next one's data."""
        self.enter("data")
        self._steps += 1

    def add(self, split: "StepSplit") -> None:
        """Count what another clock has measured too, beside the time of this one."""
        for name, seconds in split.seconds.items():
            self._seconds[name] += seconds
        self._steps += split.steps

    def split(self) -> "StepSplit":
        """All that was measured so far."""
        self.enter(self.phase)
        return StepSplit(self._steps, dict(self._seconds))


class StepSplit:
    """Seconds by phase over a number of steps."""

    def __init__(self, steps: int, seconds: dict[str, float]) -> None:
        self.steps = steps
        self.seconds = seconds

    def since(self, earlier: "StepSplit") -> "StepSplit":
        """What was measured after an earlier look."""
        seconds = {name: value - earlier.seconds[name] for name, value in self.seconds.items()}
        return StepSplit(self.steps - earlier.steps, seconds)

    @property
    def step_s(self) -> float:
        """Seconds per step, without what was not part of one; 0 before the first."""
        if not self.steps:
            return 0.0
        return (sum(self.seconds.values()) - self.seconds["other"]) / self.steps

    def text(self, most: int = len(PHASES)) -> str:
        """For instance "step 9.21 ms: pull 4 %, forward 41 %, backward 43 %"; the `most` longest
        phases in the order of a step, those of at least half a percent.
        """
        if not self.step_s:
            return "no step yet"
        text = ", ".join(f"{name} {share} %" for name, share in self._shares(most))
        return f"step {1e3 * self.step_s:.2f} ms: {text}"

    def summary(self, width: int = SUMMARY_WIDTH) -> str:
        """For instance "1,200 steps of 9.21 ms: data 3, pull 14, forward 40, backward 43 %".

        width: characters it may have; where all phases are too many, the shortest are left out.
        """
        if not self.step_s:
            return "no step"
        for most in range(len(PHASES), 0, -1):
            shares = ", ".join(f"{name} {share}" for name, share in self._shares(most))
            text = f"{self.steps:,} steps of {1e3 * self.step_s:.2f} ms: {shares} %"
            if len(text) <= width:
                break
        return text

    def _shares(self, most: int) -> list[tuple[str, int]]:
        """The `most` longest phases and their percentages, in the order of a step; no zeros."""
        inside = {name: self.seconds[name] for name in PHASES if name != "other"}
        total = sum(inside.values())
        longest = sorted(inside, key=lambda name: -inside[name])[:most]
        shares = [(name, round(100 * inside[name] / total)) for name in inside if name in longest]
        return [(name, share) for name, share in shares if share]
