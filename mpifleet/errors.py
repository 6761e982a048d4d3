"""Every error the package raises on purpose."""


class FleetError(RuntimeError):
    """Base of all errors raised by mpifleet."""


class ConfigError(FleetError, ValueError):
    """Something the user wrote cannot work: the message names the value and the valid ones."""


class NotAvailable(ConfigError):
    """A known setting whose feature does not exist in this version."""


class TableError(FleetError):
    """A table was used as it must not be: shapes, dtypes, before start or after stop."""


class KeyRangeError(TableError, IndexError):
    """A key outside [0, num_rows): the message names key, table and bound."""


class StallError(FleetError):
    """Another rank did not do its part within the allowed time."""


class LaunchError(FleetError):
    """The launch and MPI disagree, or the job cannot be started."""


class NonFiniteGradient(FleetError, ArithmeticError):
    """A pushed gradient holds NaN or infinity: the message names worker, table and step."""


class CheckpointError(FleetError):
    """A checkpoint cannot be written or read."""


class DataError(FleetError, ValueError):
    """A line of input is broken: the message names file and line."""
