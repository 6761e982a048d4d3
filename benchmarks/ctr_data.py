"""The samples of the click-through benchmark: generated once per seed, as arrays and as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import multislot
from mpifleet.data.criteo_synthetic import TEST_PART, synthetic_samples, teacher_probability
from mpifleet.data.one_at_a_time import one_at_a_time
from mpifleet.data.samples import Samples
from mpifleet.metrics import AUC

DIRECTORY = Path(".data") / "ctr-benchmark"
TRAIN_ROWS, TEST_ROWS = 200_000, 20_000
QUICK_TRAIN_ROWS, QUICK_TEST_ROWS = 20_000, 4_000
MAKE_LIMIT_S = 600.0


@dataclass(frozen=True)
class CtrData:
    """Where the samples of one seed are.

    text: MultiSlot text per worker of a job, all together the training samples.
    """

    directory: Path

    @property
    def train(self) -> Path:
        """Training samples as one MultiSlot text file."""
        return self.directory / "train.txt"

    @property
    def test(self) -> Path:
        """Held-out samples as MultiSlot text."""
        return self.directory / "test.txt"

    def load(self, name: str) -> Samples:
        """The samples "train" or "test", whole, in memory."""
        with np.load(self.directory / f"{name}.npz") as arrays:
            return Samples(arrays["labels"], arrays["dense"], arrays["ids"])

    def teacher_auc(self, seed: int) -> float:
        """AUC of the teacher itself on the held-out samples."""
        test = self.load("test")
        metric = AUC()
        metric.update(teacher_probability(test, seed), test.labels)
        return metric.compute()


def prepare(seed: int, quick: bool = False) -> CtrData:
    """Make the files of a seed unless they are there."""
    train, test = (QUICK_TRAIN_ROWS, QUICK_TEST_ROWS) if quick else (TRAIN_ROWS, TEST_ROWS)
    data = CtrData(DIRECTORY.resolve() / f"{train}-seed{seed}")
    if not _whole(data):
        with one_at_a_time(data.directory, MAKE_LIMIT_S):
            if not _whole(data):
                _write(data, "train", synthetic_samples(train, seed))
                _write(data, "test", synthetic_samples(test, seed, TEST_PART))
    return data


def _whole(data: CtrData) -> bool:
    return (data.directory / "test.npz").exists()


def _write(data: CtrData, name: str, samples: Samples) -> None:
    samples = multislot.rounded(samples)
    multislot.write(data.directory / f"{name}.txt", samples)
    # Renamed into place last: a file that is there is whole.
    unfinished = data.directory / f".{name}.npz"
    with open(unfinished, "wb") as stream:
        np.savez(stream, **samples._asdict())
    unfinished.replace(data.directory / f"{name}.npz")
