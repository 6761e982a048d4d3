"""Which home is chosen without trying: forced, on one node, and on MPIs known to be bad."""

from types import SimpleNamespace

import pytest

from mpifleet.ps import selftest
from mpifleet.ps.selftest import choose_home, known_bad


def mpi_of(vendor, *version):
    return SimpleNamespace(get_vendor=lambda: (vendor, version))


def roles_of(one_node):
    return SimpleNamespace(one_node=one_node)


@pytest.fixture(params=[False, True], ids=["no fabric", "fabric"])
def fabric(request, monkeypatch):
    monkeypatch.setattr(selftest, "_has_fabric", lambda: request.param)
    return request.param


@pytest.mark.parametrize("version", [(4, 1, 4), (4, 0, 0), (5, 0, 10), (5, 0, 0)])
def test_open_mpi_needs_a_fabric_between_nodes(fabric, version):
    why = known_bad(mpi_of("Open MPI", *version))
    assert why.startswith(f"Open MPI {version[0]} without a fabric: ") != fabric
    assert bool(why) != fabric


@pytest.mark.parametrize(
    ("vendor", "version"), [("Open MPI", (6, 0, 0)), ("Open MPI", (3, 1, 0)), ("MPICH", (4, 1, 0))]
)
def test_others_are_tried(fabric, vendor, version):
    assert known_bad(mpi_of(vendor, *version)) == ""


@pytest.mark.parametrize("wanted", ["node", "world"])
@pytest.mark.parametrize("one_node", [False, True])
def test_a_forced_home_is_taken_without_asking(wanted, one_node):
    assert choose_home(None, roles_of(one_node), wanted) == (wanted, "set by strategy.table_home")


def test_one_node_has_the_node_home():
    home, reason = choose_home(None, roles_of(True), "auto")
    assert (home, reason) == ("node", "all ranks are on one node")


def test_a_known_bad_mpi_is_never_tried(monkeypatch):
    monkeypatch.setattr(selftest, "_has_fabric", lambda: False)
    monkeypatch.setattr(selftest, "_reads_are_one_sided", lambda *_: pytest.fail("was tried"))
    home, reason = choose_home(mpi_of("Open MPI", 4, 1, 4), roles_of(False), "auto")
    assert home == "node"
    assert "target inside MPI" in reason


@pytest.mark.parametrize(("is_good", "expected"), [(True, "world"), (False, "node")])
def test_the_trial_decides_elsewhere(monkeypatch, is_good, expected):
    monkeypatch.setattr(selftest, "_reads_are_one_sided", lambda *_: is_good)
    home, reason = choose_home(mpi_of("MPICH", 4, 1, 0), roles_of(False), "auto")
    assert home == expected
    assert "owner" in reason


class Request:
    """Completes at the nth test."""

    def __init__(self, after):
        self.left = after

    def Test(self):
        self.left -= 1
        return self.left <= 0


def test_a_trial_has_a_deadline():
    assert selftest._completes([], 0)
    assert selftest._completes([Request(3)], within_s=5)
    assert not selftest._completes([Request(10**9)], within_s=0.01)
