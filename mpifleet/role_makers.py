"""Fleet's ways to say how roles are found."""

from dataclasses import dataclass

from mpifleet.errors import ConfigError, NotAvailable


@dataclass(frozen=True)
class PaddleCloudRoleMaker:
    """Roles from the launch; the default of fleet.init()."""

    is_collective: bool = False


@dataclass(frozen=True)
class MPISymmetricRoleMaker:
    """Fleet's MPI heritage: two ranks on every node, even rank = server, odd rank = worker."""


RoleMaker = PaddleCloudRoleMaker | MPISymmetricRoleMaker


def is_symmetric(role_maker: RoleMaker | None, is_collective: bool) -> bool:
    """Whether even ranks are servers. Raises ConfigError or NotAvailable for what cannot be."""
    if is_collective or getattr(role_maker, "is_collective", False):
        raise NotAvailable(
            "is_collective=True: collective training is not available in this version"
        )
    if role_maker is not None and not isinstance(role_maker, RoleMaker):
        raise ConfigError(
            f"role_maker={role_maker!r}; use PaddleCloudRoleMaker() or MPISymmetricRoleMaker()"
        )
    return isinstance(role_maker, MPISymmetricRoleMaker)
