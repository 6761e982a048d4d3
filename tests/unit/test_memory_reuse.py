"""Large blocks are reused once asked for, and only then."""

import sys

import pytest

from tests.python_process import run_python

PROGRAM = """
import resource, sys
import numpy as np
from mpifleet.memory_reuse import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else "untouched")
def step():
    blocks = [np.ones(1 << 18) for _ in range(8)]  # 2 MiB each, dropped together as in backward
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how, **environment):
    said = run_python("-c", PROGRAM, how, **environment).split()
    return said[0], int(said[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_blocks_that_were_freed_cost_no_page_faults():
    _, usual = faults("leave")
    said, kept = faults("keep")
    assert said == "True"
    assert usual > 1000
    assert kept < usual / 20


def test_a_choice_in_the_environment_stands():
    said, _ = faults("keep", MALLOC_TOP_PAD_="1000")
    assert said == "False"
