"""Which versions of the tables a worker's next push is computed from."""

import numpy as np

from mpifleet.ps.message import NO_VERSION


class ReadVersions:
    """What this worker read last, as counts of updates that were in each server's tables.

    dense: int64 [num_servers], of the last pull of all dense tables.
    """

    def __init__(self, num_servers: int) -> None:
        self.dense = np.full(num_servers, NO_VERSION, np.int64)
        self._rows: dict[int, np.ndarray] = {}

    def beside(self) -> "ReadVersions":
        """The same dense parameters, rows of its own."""
        other = ReadVersions(self.dense.size)
        other.dense = self.dense
        return other

    def add_rows_of(self, other: "ReadVersions") -> None:
        """Take over which rows another one has taken: of each table the older versions."""
        taken, other._rows = other._rows, {}
        for table, versions in taken.items():
            own = self._rows.get(table, versions)
            both = (own != NO_VERSION) & (versions != NO_VERSION)
            older = np.where(both, np.minimum(own, versions), np.maximum(own, versions))
            self._rows[table] = older

    def took_rows(self, table: int, versions: np.ndarray) -> None:
        """A look-up got rows of these versions, int64 [num_servers], NO_VERSION where of none."""
        self._rows[table] = versions

    def rows_of_push(self) -> np.ndarray:
        """The oldest version among the rows taken since the last call, int64 [num_servers].

        Of several look-ups of one table the last one counts: the ones before were an evaluation's.
        NO_VERSION for a server of which no row was taken.
        """
        newest = np.iinfo(np.int64).max
        oldest = np.full_like(self.dense, newest)
        for versions in self._rows.values():
            np.minimum(oldest, versions, out=oldest, where=versions != NO_VERSION)
        self._rows = {}
        return np.where(oldest == newest, NO_VERSION, oldest)
