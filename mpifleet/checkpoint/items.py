"""Members of HDF5 groups and shapes of datasets, as a reader that trusts nothing needs them."""

from __future__ import annotations

from typing import Any

import h5py

from mpifleet.checkpoint.layout import is_numeric


def shape_of(item: Any) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a dataset. Raises TypeError where it is none, or not one of numbers."""
    if not isinstance(item, h5py.Dataset) or not is_numeric(item.dtype):
        raise TypeError(f"{item!r} is not an array of numbers")
    return tuple(item.shape), str(item.dtype)


def by_name(parent: h5py.Group) -> dict[str, h5py.Group]:
    """Groups of entries by the entries' names, in the order of writing."""
    members = [group for _, group in members_of(parent)]
    groups = sorted(members, key=lambda group: int(group.attrs["index"]))
    return {str(group.attrs["name"]): group for group in groups}


def members_of(group: h5py.Group) -> list[tuple[str, Any]]:
    """Names and members, all at once.

    Not by a loop over items(): that holds h5py's lock between its turns, and where an error ends
    the loop, whichever thread collects the garbage gives the lock back, and waits for ever.
    """
    return list(group.items())
