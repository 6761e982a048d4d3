"""Counting memory: shared pages once, private ones at their peak."""

import mmap
import sys
import tempfile
import time

import numpy as np
import pytest

from benchmarks.process_memory import (
    PERIOD_S,
    PrivatePeak,
    new_bytes,
    private_of,
    shared_bytes,
    shared_of,
)
from benchmarks.ps_memory import formula_bytes, memory_figures

SMAPS = """\
7f00-7f10 rw-s 00000000 00:1b 13717                      /dev/shm/one of two words (deleted)
Rss:                  80 kB
Pss:                  40 kB
Pss_Dirty:             8 kB
VmFlags: rd wr sh mr mw me ms
7f10-7f20 rw-p 00000000 00:00 0
Pss:                1000 kB
7f20-7f30 r--s 00001000 00:1b 13717                      /dev/shm/one of two words (deleted)
Pss:                   2 kB
7f30-7f40 rw-s 00000000 00:1b 13718                      /dev/shm/other
Pss:                   4 kB
7f40-7f50 r-xp 00000000 08:01 99                         /usr/lib/some.so
Pss:                 500 kB
"""
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_shares_of_shared_files_add_up_and_private_maps_do_not_count():
    assert shared_of(SMAPS) == {("00:1b", "13717"): 42 * 1024, ("00:1b", "13718"): 4 * 1024}


def test_only_files_that_were_not_mapped_before_are_new():
    now = shared_of(SMAPS)
    assert new_bytes({("00:1b", "13718"): 0}, now) == 42 * 1024
    assert new_bytes(now, now) == 0


def test_private_memory_is_what_no_file_stands_behind():
    assert private_of("VmRSS:\t  900 kB\nRssAnon:\t  700 kB\nRssShmem:\t 100 kB\n") == 700 * 1024
    with pytest.raises(ValueError, match="RssAnon"):
        private_of("VmRSS:\t  900 kB\n")


@linux
def test_touched_pages_of_a_shared_map_count_and_others_do_not():
    before = shared_bytes()
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * MIB)
        with mmap.mmap(file.fileno(), 8 * MIB) as memory:
            memory[: 2 * MIB] = bytes(2 * MIB)
            counted = new_bytes(before, shared_bytes())
    # A file system may map a few pages around those that were touched.
    assert 2 * MIB <= counted < 3 * MIB


@linux
def test_a_passing_peak_is_seen():
    with PrivatePeak() as peak:
        start = peak.peak_bytes
        passing = np.ones(32 * MIB, np.uint8)
        time.sleep(20 * PERIOD_S)
        del passing
    assert 31 * MIB <= peak.peak_bytes - start < 48 * MIB


def test_the_formula_counts_values_and_state_in_float32():
    assert formula_bytes(1_000, 2) == 12_000 + 268_435_456


def test_the_figure_compares_windows_and_private_memory_with_the_formula():
    formula = 4 * (1_000_001 * 10 + 431_202) * 3 + 268_435_456
    whole, windows, private = memory_figures("sync", 15, 200 * MIB, formula - 199 * MIB)
    assert whole.name == "memory of a server of 15 workers, sync"
    assert (whole.value, whole.met) == (round(formula / MIB + 1, 1), False)
    assert whole.against == f"table + state + 256 MiB = {round(formula / MIB, 1)} MiB"
    assert (windows.value, windows.met) == (200.0, None)
    assert private.value == round(formula / MIB - 199, 1)
