#!/bin/sh
# Starts one rank of a job on the two-node test cluster.
#
# The two nodes are one machine, so Open MPI's shared-memory files of both would meet under the same
# names in /dev/shm and /tmp.  Each node gets folders of its own; everything else is as on real nodes.
# MPIFLEET_TEST_SHM: where the folders stand (the cluster object makes, names and removes it).
set -eu
if [ -n "${SLURMD_NODENAME:-}" ] && [ -n "${MPIFLEET_TEST_SHM:-}" ]; then
    node_shm="$MPIFLEET_TEST_SHM/$SLURMD_NODENAME"
    mkdir -p "$node_shm"
    export OMPI_MCA_btl_vader_backing_directory="$node_shm"
    export OMPI_MCA_osc_sm_backing_directory="$node_shm"
    export OMPI_MCA_osc_rdma_backing_directory="$node_shm"
    export OMPI_MCA_shmem_mmap_backing_file_base_dir="$node_shm"
    export OMPI_MCA_orte_tmpdir_base="$node_shm"
    # Both nodes share the cores of one machine: who waits must give its core away.
    export OMPI_MCA_mpi_yield_when_idle=1
fi
exec "$@"
