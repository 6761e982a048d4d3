"""The `mpifleet` command."""
