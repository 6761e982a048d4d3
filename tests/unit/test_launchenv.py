"""The launch as the environment tells it, for every launcher's real set of variables."""

import pytest

from mpifleet.errors import ConfigError, LaunchError
from mpifleet.launchenv import (
    LaunchEnv,
    check_size,
    read_launch_env,
    requested_role,
    requested_servers,
    transport_defaults,
)

OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_HOSTNAME": "a1",
    "PMIX_RANK": "5",
}
OPENMPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "a1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURMD_NODENAME": "n4",
    "PMIX_RANK": "6",
}
OMPI_4_LIBRARY = "Open MPI v4.1.4, package: Debian, ident: 4.1.4, May 26, 2022"
OMPI_5_LIBRARY = "Open MPI v5.0.11, package: wheel"


def test_a_plain_shell_is_no_launch():
    assert read_launch_env({"HOME": "/"}) == LaunchEnv("none")


def test_openmpi_4():
    assert read_launch_env(OPENMPI_4) == LaunchEnv("mpirun-openmpi", 5, 8, 1, 4, 2, "a1", "4")


def test_openmpi_5():
    env = read_launch_env(OPENMPI_5)
    assert env == LaunchEnv("mpirun-openmpi", 1, 2, 1, 2, 1, "a1", "5.0.11")
    assert env.several_nodes is False


def test_hydra_tells_several_nodes_by_its_local_size():
    env = read_launch_env(HYDRA)
    assert env == LaunchEnv("mpich", 3, 4, 1, 2)
    assert env.several_nodes is True


def test_srun_reads_the_tasks_of_its_own_node():
    env = read_launch_env(SRUN)
    assert env == LaunchEnv("srun", 6, 7, 0, 1, 4, "n4")
    assert read_launch_env({**SRUN, "SLURM_NODEID": "0"}).local_size == 2


def test_mpirun_inside_a_slurm_step_wins():
    assert read_launch_env({**SRUN, **OPENMPI_4}).launcher == "mpirun-openmpi"
    assert read_launch_env({**SRUN, **HYDRA}).launcher == "mpich"


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_shell_in_an_allocation_without_srun_is_no_launch(step):
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert read_launch_env(environ) == LaunchEnv("none")


def test_another_pmix_server_is_unknown():
    env = read_launch_env({"PMIX_RANK": "2"})
    assert (env.launcher, env.rank, env.size) == ("unknown", 2, None)


def test_a_broken_number_names_its_variable():
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE='two'"):
        read_launch_env({**OPENMPI_5, "OMPI_COMM_WORLD_SIZE": "two"})


def test_requested_servers():
    assert requested_servers({}) == (None, None)
    environ = {"MPIFLEET_SERVER_NUM": "0", "MPIFLEET_WORKER_NUM": "3"}
    assert requested_servers(environ) == (0, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MPIFLEET_SERVER_NUM", "-1"),
        ("MPIFLEET_SERVER_NUM", "1.5"),
        ("MPIFLEET_WORKER_NUM", "0"),
        ("MPIFLEET_WORKER_NUM", "many"),
    ],
)
def test_requested_servers_names_variable_and_value(name, value):
    with pytest.raises(ConfigError) as raised:
        requested_servers({name: value})
    assert name in str(raised.value)
    assert value in str(raised.value)


def test_requested_role():
    assert requested_role({}) is None
    assert requested_role({"MPIFLEET_ROLE": "Server"}) == "server"
    with pytest.raises(ConfigError, match=r"'boss'.*server and worker"):
        requested_role({"MPIFLEET_ROLE": "boss"})


def test_transport_of_openmpi_4_on_two_nodes():
    expected = {"OMPI_MCA_osc": "sm,pt2pt", "OMPI_MCA_pml": "ob1"}
    assert transport_defaults(read_launch_env(OPENMPI_4), cores=64) == expected
    assert transport_defaults(read_launch_env(SRUN), OMPI_4_LIBRARY, cores=64) == expected


def test_transport_needs_nothing_elsewhere():
    assert transport_defaults(LaunchEnv("none"), "MVAPICH 3") == {}
    assert transport_defaults(read_launch_env(SRUN), cores=64) == {}


def test_more_ranks_than_cores_yield():
    one_node_4 = LaunchEnv("mpirun-openmpi", size=4, local_size=4, mpi_version="4")
    osc = {"OMPI_MCA_osc": "sm,pt2pt"}
    assert transport_defaults(one_node_4, cores=4) == osc
    crowded = {**osc, "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert transport_defaults(one_node_4, cores=2) == crowded


def test_openmpi_5_leaves_ucx_out():
    assert transport_defaults(read_launch_env(SRUN), OMPI_5_LIBRARY, cores=64) == {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_abort_delay": "2",
    }
    assert transport_defaults(read_launch_env(OPENMPI_5), cores=2) == {"OMPI_MCA_osc": "^ucx"}


def test_a_launcher_whose_version_is_no_number_gets_no_settings():
    env = read_launch_env(OPENMPI_5 | {"OMPI_VERSION": "main"})
    assert env.mpi_version == "main"
    assert transport_defaults(env, cores=2) == {}


def test_mpich_with_two_netmods_takes_ofi():
    both = "MPICH Version: 5.0.2\nMPICH Device: ch4:ofi,ucx\n"
    ucx_only = "MPICH Version: 5.0.2\nMPICH Device: ch4:ucx\n"
    assert transport_defaults(LaunchEnv("mpich"), both) == {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    assert transport_defaults(LaunchEnv("mpich"), ucx_only) == {}


def test_check_size():
    env = read_launch_env(SRUN)
    check_size(env, 7)
    check_size(LaunchEnv("none"), 1)
    with pytest.raises(LaunchError, match=r"srun started 7 ranks, but MPI sees 1.*--mpi=pmix"):
        check_size(env, 1, OMPI_5_LIBRARY)
    with pytest.raises(LaunchError, match=r"mpirun started 2 ranks.*bound to MPICH.*mpiexec of"):
        check_size(read_launch_env(OPENMPI_5), 1, "MPICH Version: 5.0.2\nMPICH Device: ch4")
