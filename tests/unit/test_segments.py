"""Shared-memory segments of ranks: known by name, removed where they are left."""

from __future__ import annotations

from pathlib import Path

from mpifleet.lifeline.segments import RankSegments, is_segment, unlink_segments


def test_segments_are_known_by_name():
    for name in ("vader_segment.h.0.1f.0", "sm_segment.h.0.1f.0", "osc_sm.h.1f.0.3", "mpich_shm_x"):
        assert is_segment(f"/dev/shm/{name}")
        assert is_segment(f"/dev/shm/node/{name}")
        assert not is_segment(f"/tmp/{name}")
    for name in ("sem.mine", "torch_1_2", "psm_abc", "my_vader_segment"):
        assert not is_segment(f"/dev/shm/{name}")


def test_unlink_segments_skips_what_is_gone(tmp_path):
    here = tmp_path / "a"
    here.touch()
    assert unlink_segments([str(here), str(tmp_path / "b")]) == [str(here)]
    assert not here.exists()


def test_rank_segments_of_a_process_without_mpi():
    segments = RankSegments(2)
    assert not segments.complete
    segments.restore(0)
    assert not [path for path in segments.paths if Path(path).exists()]
