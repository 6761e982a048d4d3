"""Who becomes a server: tables of nodes and counts, without MPI."""

from collections import Counter

import pytest

from mpifleet.errors import ConfigError
from mpifleet.roles import Role, default_num_servers, from_labels, place, place_symmetric

S, W = Role.SERVER, Role.WORKER


def letters(roles):
    return "".join("S" if role is S else "w" for role in roles)


def nodes_of(text):
    """ "001122" as numbers of nodes."""
    return [int(letter) for letter in text]


@pytest.mark.parametrize(
    ("nodes", "num_servers", "expected"),
    [
        ("0", 0, "w"),
        ("00", 1, "wS"),
        ("000", 1, "wwS"),
        ("000", 2, "wSS"),
        ("0000", 2, "wwSS"),
        ("0011", 1, "wSww"),
        ("0011", 2, "wSwS"),
        ("0011", 3, "wSSS"),
        ("0101", 2, "wwSS"),  # ranks dealt out over the nodes one by one
        ("001122", 3, "wSwSwS"),
        ("001122", 4, "wSwSSS"),
        ("0001", 2, "wSSw"),  # a node with one rank keeps its worker while another has room
        ("0001", 3, "wSSS"),
        ("0111", 2, "wwSS"),
        ("00001111", 3, "wwSSwwwS"),
        ("00001111", 6, "wSSSwSSS"),
    ],
)
def test_servers_take_the_last_ranks_of_each_node(nodes, num_servers, expected):
    assert letters(place(nodes_of(nodes), num_servers)) == expected


@pytest.mark.parametrize("nodes", ["00", "000", "0011", "0101", "001122", "00001111", "0001112"])
def test_rank_0_is_a_worker_whenever_each_node_can_keep_one(nodes):
    numbers = nodes_of(nodes)
    spare = sum(count - 1 for count in Counter(numbers).values())
    for num_servers in range(1, spare + 1):
        roles = place(numbers, num_servers)
        assert roles[0] is W
        assert roles.count(S) == num_servers
        workers = {node for node, role in zip(numbers, roles, strict=True) if role is W}
        assert workers == set(numbers), "every node keeps a worker"
        per_node = Counter(node for node, role in zip(numbers, roles, strict=True) if role is S)
        with_room = [per_node[n] for n, free in Counter(numbers).items() if per_node[n] < free - 1]
        assert max(per_node.values()) - min(with_room, default=num_servers) <= 1, "evenly"


@pytest.mark.parametrize("size", range(2, 9))
def test_every_possible_count_of_servers(size):
    for num_servers in range(1, size):
        roles = place([0] * size, num_servers)
        assert roles == [W] * (size - num_servers) + [S] * num_servers


@pytest.mark.parametrize(
    ("nodes", "num_servers", "message"),
    [
        ("0", 1, "1 servers among 1 ranks leave no room; start at least 2 ranks"),
        ("00", 0, r"0 servers among 2 ranks leave no room; use 1\.\.1"),
        ("00", 2, r"2 servers among 2 ranks leave no room; use 1\.\.1"),
        ("0011", 4, r"4 servers among 4 ranks leave no room; use 1\.\.3"),
        ("0011", -1, r"-1 servers among 4 ranks leave no room; use 1\.\.3"),
        ("0011", 100, r"100 servers among 4 ranks leave no room; use 1\.\.3"),
    ],
)
def test_counts_that_leave_no_room(nodes, num_servers, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        place(nodes_of(nodes), num_servers)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("0", 0),
        ("00", 1),
        ("000", 1),
        ("01", 1),
        ("0011", 2),
        ("0001", 2),
        ("012", 1),
        ("001122", 3),
    ],
)
def test_one_server_per_node_by_default(nodes, expected):
    assert default_num_servers(nodes_of(nodes)) == expected
    place(nodes_of(nodes), expected)


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_symmetric_roles_are_those_of_fleet(num_nodes):
    nodes = [node for node in range(num_nodes) for _ in range(2)]
    assert letters(place_symmetric(nodes)) == "Sw" * num_nodes


@pytest.mark.parametrize(
    ("nodes", "node", "count"), [("0", 0, 1), ("000", 0, 3), ("00111", 1, 3), ("0012", 1, 1)]
)
def test_symmetric_roles_need_two_ranks_on_every_node(nodes, node, count):
    with pytest.raises(
        ConfigError, match=f"2 ranks on every node; node {node} has {count} of {len(nodes)}"
    ):
        place_symmetric(nodes_of(nodes))


def test_labels_decide():
    assert from_labels(["worker", "server", "SERVER", "Worker"]) == [W, S, S, W]
    assert from_labels(["worker"]) == [W]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["worker", "serer"], "rank 1: unknown role 'serer'; use 'server', 'worker'"),
        (["worker", ""], "rank 1: unknown role ''; use 'server', 'worker'"),
        (["worker", "worker"], "none of the 2 ranks is a server"),
        (["server"] * 3, "none of the 3 ranks is a worker"),
        (["server"], "none of the 1 ranks is a worker"),
    ],
)
def test_labels_that_cannot_be(labels, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        from_labels(labels)
