"""A real Slurm on this one machine, for as long as a benchmark or a test needs it.

It runs the daemons `munged`, `slurmctld` and `slurmd` of the system's own packages, as root, with
all their files in one folder. It does not touch a Slurm that is already configured here. On Debian
and Ubuntu, the packages are installed by:

    apt-get install --no-install-recommends slurm-wlm munge
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
# Time for the node to become idle, and for a daemon to exit.
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
# Slots for jobs. They are more than the cores of a small machine, since the jobs sleep most of the
# time; `config_overrides` makes Slurm believe the number.
SLOTS = 8
# A requeued job waits as long as a job's credential is valid, by default two minutes.
_CREDENTIAL_SECONDS = 10

# `urgent` takes the node from the jobs of `normal`, which Slurm then requeues. Before it kills
# them, it sends SIGTERM and waits for `GraceTime`. `KillWait` is the same at the time limit.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
JobRequeue=1
NodeName={host} CPUs={slots} State=UNKNOWN
PartitionName=normal Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def why_no_slurm() -> str | None:
    """Return why no Slurm can be started here, or None if one can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"Slurm is not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "Slurm can be started only by root"
    return None


@contextmanager
def one_node_slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run a Slurm of one node, and yield the environment in which its commands work.

    At the end, all jobs are cancelled and the daemons are stopped.

    Args:
        folder: An empty folder for configuration, state and logs. Its path must be short, since the
            path of a socket may have at most 107 characters.

    Raises:
        RuntimeError: If the node does not become idle. The message has the end of the logs.
    """
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            slots=SLOTS,
            credential_seconds=_CREDENTIAL_SECONDS,
            controller_port=_free_port(),
            node_port=_free_port(),
        )
    )
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (_munged(folder), ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("wb") as output:
                daemons.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            _wait_for(folder, command[0], environment)
        yield environment
    finally:
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "--user=root"], env=environment, check=False
        )
        subprocess.run(["scancel", "--user=root"], env=environment, check=False)
        _wait_until_no_job_runs(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _munged(folder: Path) -> list[str]:
    """Write a key for `munged`, which authenticates the messages, and return its command."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--socket={folder}/munge.socket", f"--key-file={key}"]
    files += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed", "log")]
    # It refuses a socket in a folder that others may not enter, unless it is told to.
    return ["munged", "--foreground", "--force", *files]


def _wait_for(folder: Path, daemon: str, environment: Mapping[str, str]) -> None:
    """Wait until a daemon answers."""
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(folder, daemon, environment):
        if time.monotonic() > deadline:
            logs = sorted(folder.glob("*.log")) + sorted(folder.glob("*.out"))
            ends = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
            raise RuntimeError(f"{daemon} does not answer\n{ends}")
        time.sleep(0.2)


def _answers(folder: Path, daemon: str, environment: Mapping[str, str]) -> bool:
    """Return whether a daemon does what it is for."""
    if daemon == "munged":
        return (folder / "munge.socket").exists()
    command = {
        "slurmctld": ["scontrol", "ping"],
        "slurmd": ["sinfo", "--noheader", "--format=%T", "--partition=normal"],
    }[daemon]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wanted = {"slurmctld": " is UP", "slurmd": "idle"}[daemon]
    return wanted in result.stdout


def _wait_until_no_job_runs(environment: Mapping[str, str]) -> None:
    """Wait until `squeue` lists no job, or until no more time is left."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        jobs = subprocess.run(
            ["squeue", "--noheader"], env=environment, capture_output=True, text=True, check=False
        )
        if not jobs.stdout.strip():
            return
        time.sleep(0.2)


def _path() -> str:
    """Return the search path with the folders of daemons, which not every user has."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
