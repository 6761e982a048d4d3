"""Breaths between slices of work: cheap ones, and a look at MPI soon enough."""

from mpifleet.ps.breath import LOOK_S, Breath


def test_a_look_is_made_when_the_last_one_is_long_enough_ago():
    now_s, done = [7.0], []
    breath = Breath(lambda: done.append("beat"), lambda: done.append("look"), lambda: now_s[0])
    breath()
    assert not done, "just made"
    for _ in range(4):
        now_s[0] += 0.5 * LOOK_S
        breath()
    assert done == ["beat", "look"] * 2
    now_s[0] += 3 * LOOK_S
    breath()
    breath()
    assert done == ["beat", "look"] * 3
