"""Which version a push is computed from, where several look-ups came before it."""

import numpy as np

from mpifleet.ps.message import NO_VERSION
from mpifleet.ps.read_versions import ReadVersions


def versions(*values):
    return np.array(values, np.int64)


def test_the_oldest_of_several_tables_on_each_server():
    read = ReadVersions(3)
    read.took_rows(0, versions(5, 8, NO_VERSION))
    read.took_rows(1, versions(6, 7, NO_VERSION))
    assert read.rows_of_push().tolist() == [5, 7, NO_VERSION]


def test_the_last_look_up_of_a_table_counts():
    read = ReadVersions(1)
    read.took_rows(0, versions(2))
    read.took_rows(0, versions(9))
    assert read.rows_of_push().tolist() == [9]


def test_a_push_without_a_look_up_is_of_no_version():
    read = ReadVersions(2)
    read.took_rows(0, versions(2, 3))
    read.rows_of_push()
    assert read.rows_of_push().tolist() == [NO_VERSION, NO_VERSION]
    assert read.dense.tolist() == [NO_VERSION, NO_VERSION]
