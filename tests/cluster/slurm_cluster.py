"""A real two-node Slurm on one machine, started and stopped by the tests.

Two ``slurmd`` daemons with different node names share the machine; the MPI library sees two
nodes, so communication between them goes over TCP as on a real cluster.  Everything the daemons
write stands in one private folder, every port is chosen at run time, and ``SLURM_CONF`` points
into the folder: a Slurm that the machine may already have is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.processes import end_group, processes_of

NODE_ENV = Path(__file__).with_name("node_env.sh")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
NODES = ("n1", "n2")
# More than the machine may have: the tests ask for correctness, not speed, and Slurm refuses a
# job that wants more processors than its nodes declare.
CPUS_PER_NODE = 8
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0

SLURM_CONF = """\
ClusterName=mpifleet
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={scratch}/munge/socket
CredType=cred/munge
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=2
MinJobAge=60
SlurmdParameters=config_overrides
StateSaveLocation={scratch}/state
SlurmdSpoolDir={scratch}/spool-%n
TmpFS={scratch}/tmp-%n
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmdPidFile={scratch}/slurmd-%n.pid
SlurmctldLogFile={scratch}/slurmctld.log
SlurmdLogFile={scratch}/slurmd-%n.log
"""


def programs_missing() -> str:
    """Why this machine cannot run the two-node Slurm, or an empty string when it can."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=search) is None]
    if absent:
        return f"Slurm is not complete on this machine: {', '.join(absent)} not found"
    if os.geteuid() != 0:
        return "a private two-node Slurm needs root: its daemons start jobs for users"
    return ""


class SlurmCluster:
    """Two Slurm nodes named ``n1`` and ``n2``; ``start()``, use, ``stop()``.

    Attributes: ``scratch``, the private folder; ``environment``, what a child needs to speak to
    this cluster and to no other.
    """

    def __init__(self) -> None:
        # Not pytest's tmp_path: munge's socket must fit into 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="mpifleet-slurm-"))
        self.scratch.chmod(0o755)
        self.shared_memory = Path("/dev/shm") / self.scratch.name
        self.shared_memory.mkdir()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = _clean_environment() | {
            "SLURM_CONF": str(self.scratch / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
            "MPIFLEET_TEST_SHM": str(self.shared_memory),
        }

    def start(self) -> None:
        """Starts the daemons and returns when both nodes are idle; on failure stops them again."""
        try:
            self._write_configuration()
            self._start_munge()
            self._daemon("slurmctld", ["slurmctld", "-D"])
            for node in NODES:
                (self.scratch / f"spool-{node}").mkdir()
                (self.scratch / f"tmp-{node}").mkdir()
                self._daemon(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
            self._wait_until("both nodes are idle", self._idle)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends jobs, daemons and every process of the cluster, and removes its folder.

        Raises RuntimeError when a process survives SIGKILL.
        """
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self._control(["scancel", "--signal=KILL", "--state=RUNNING", "--user=root"])
        for name in reversed(self._daemons):
            end_group(self._daemons[name], STOP_LIMIT_S)
        self._daemons.clear()
        deadline = time.monotonic() + STOP_LIMIT_S
        while left := processes_of(self.scratch):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of the stopped cluster are left: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for folder in (self.scratch, self.shared_memory):
            shutil.rmtree(folder, ignore_errors=True)

    def srun(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        nodes: int = 2,
        ntasks_per_node: int = 2,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Runs `args` as one MPI job step of nodes * ntasks_per_node ranks and returns its result.

        The ranks start through ``node_env.sh``, which keeps the two nodes' shared memory apart.
        env: set beside the cluster's own variables.  timeout: seconds; past it the step is
        cancelled and subprocess.TimeoutExpired raised, with what it had printed.
        """
        command = ["srun", *self.step_options(nodes, ntasks_per_node), *options]
        return self._run([*command, str(NODE_ENV), *map(os.fspath, args)], env, timeout)

    def sbatch(
        self,
        script: str | os.PathLike[str],
        *args: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Submits `script` with its arguments, waits for the job's end, returns its exit status.

        Asks for the end itself: ``sbatch --wait`` looks after 2, 10, 42 s only.
        """
        begun_s = time.monotonic()
        command = ["sbatch", "--parsable", *options, os.fspath(script), *args]
        result = self._run(command, env, timeout)
        if result.returncode == 0:
            job = result.stdout.strip()
            result.returncode = self._status_of_job(job, begun_s + timeout)
        return result

    def _status_of_job(self, job: str, until_s: float) -> int:
        """The exit status of a batch job once it has ended; past until_s it is cancelled."""
        while True:
            said = self._control(["scontrol", "show", "job", "--oneliner", job])
            words = dict(word.partition("=")[::2] for word in said.split())
            if words.get("JobState") not in UNFINISHED:
                status, signal_number = map(int, words["ExitCode"].split(":"))
                return 128 + signal_number if signal_number else status
            if time.monotonic() > until_s:
                self._control(["scancel", "--signal=KILL", "--full", job])
                raise subprocess.TimeoutExpired(f"batch job {job}", until_s, said)
            time.sleep(0.1)

    def step_options(self, nodes: int = 2, ntasks_per_node: int = 2) -> list[str]:
        """The ``srun`` options of a job step, for tests that start ``srun`` themselves."""
        tasks = nodes * ntasks_per_node
        return [
            f"--nodes={nodes}",
            f"--ntasks={tasks}",
            f"--ntasks-per-node={ntasks_per_node}",
            "--mpi=pmix",
            "--kill-on-bad-exit=1",
            "--overlap",
        ]

    def _run(
        self, command: list[str], env: Mapping[str, str] | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment | dict(env or {})
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                self._control(["scancel", "--signal=KILL", "--user=root"])
                end_group(process, STOP_LIMIT_S)
                out, err = process.communicate()
                raise subprocess.TimeoutExpired(command, timeout, out, err) from None
            except BaseException:
                end_group(process, STOP_LIMIT_S)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _write_configuration(self) -> None:
        ports = list(_free_ports(1 + len(NODES)))
        (self.scratch / "state").mkdir()
        text = SLURM_CONF.format(scratch=self.scratch, controller_port=ports[0])
        for node, port in zip(NODES, ports[1:], strict=True):
            text += (
                f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 "
                f"Port={port} CPUs={CPUS_PER_NODE} State=UNKNOWN\n"
            )
        text += f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=60 State=UP\n"
        (self.scratch / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        folder = self.scratch / "munge"
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket_path = folder / "socket"
        self._daemon(
            "munged",
            [
                "munged",
                "--foreground",
                f"--key-file={key}",
                f"--socket={socket_path}",
                f"--pid-file={folder / 'pid'}",
                f"--log-file={folder / 'log'}",
                f"--seed-file={folder / 'seed'}",
            ],
        )
        self._wait_until("munge's socket is there", socket_path.exists)

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.scratch / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.scratch,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _idle(self) -> bool:
        result = self._control(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        return result.split() == [word for node in NODES for word in (node, "idle")]

    def _control(self, command: list[str]) -> str:
        """Standard output of one short control command."""
        return subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=20,
            check=False,
        ).stdout

    def _wait_until(self, what: str, condition: object) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():  # type: ignore[operator]
            ended = {n: p.returncode for n, p in self._daemons.items() if p.poll() is not None}
            if ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"waited for: {what}; daemons that ended: {ended}; logs:\n{self._logs()}"
                )
            time.sleep(0.05)

    def _logs(self) -> str:
        files = [*self.scratch.glob("*.log"), *self.scratch.glob("*.out")]
        return "\n".join(f"{f.name}: {f.read_text(errors='replace')[-2000:]}" for f in files)


def _clean_environment() -> dict[str, str]:
    """Our environment without what an outer Slurm, PMIx or MPI launcher put there."""
    foreign = ("SLURM", "SLURMD", "SRUN_", "SBATCH_", "PMIX_", "PMI_", "OMPI_", "OPAL_", "PRTE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def _free_ports(count: int) -> Iterator[int]:
    """Port numbers that nobody listened on a moment ago; all are held while they are chosen."""
    with contextlib.ExitStack() as held:
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            yield probe.getsockname()[1]
