"""Who this process is among the processes of a run: read from the variables of whatever started it.

Nothing here opens a socket or imports what does: a process alone pays nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError, shown

AGENT_PORTS = 16  # behind MASTER_PORT, where torchrun itself listens on that one
_MPI_PORT = 29500  # where MASTER_ADDR is given without a port


@dataclass(frozen=True)
class Launch:
    """One process of a run.

    host, ports: where rank 0 listens, on the first of the ports that is free. file: in place of both, a file in which
    rank 0 publishes its port, for processes of one host. run_id, restart: which run, and which start of it. token: the
    secret that all processes share; empty where the environment has none.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str = ""
    ports: tuple[int, ...] = ()
    file: str = ""
    run_id: str = ""
    restart: int = 0
    token: str = ""


ALONE = Launch("none", 0, 1, 0, 1)


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """The first of these that has set its variables: by hand, torchrun, Open MPI, MPICH, srun; else ALONE. ConfigError
    for a variable that is missing or out of range.
    """
    env = os.environ if environ is None else environ
    if "XTRAIN_RANK" in env or "XTRAIN_WORLD_SIZE" in env:  # either: a process that lacks one must not run alone
        return _checked(_by_hand(env))
    for marks, read in _LAUNCHERS:
        if all(name in env for name in marks):
            return _checked(read(env))
    return ALONE


def _checked(launch: Launch) -> Launch:
    for name, value, size_name, size in (
        ("rank", launch.rank, "world size", launch.world_size),
        ("local rank", launch.local_rank, "local world size", launch.local_world_size),
    ):
        if size < 1:
            raise ConfigError(f"distributed: {launch.launcher}: the {size_name} must be at least 1, got {size}")
        if not 0 <= value < size:
            raise ConfigError(
                f"distributed: {launch.launcher}: the {name} must be in [0, {size}), the {size_name}, got {value}"
            )
    if launch.local_world_size > launch.world_size:
        raise ConfigError(
            f"distributed: {launch.launcher}: the local world size must be at most the world size "
            f"({launch.world_size}), got {launch.local_world_size}"
        )
    return launch


def _need(env: Mapping[str, str], name: str, launcher: str, why: str = "") -> str:
    if not env.get(name):
        raise ConfigError(f"distributed: {launcher}: {name} must be set{why}, got nothing")
    return env[name]


def _int(env: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _need(env, name, launcher)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"distributed: {launcher}: {name} must be a whole number, got {shown(text)}")
    return int(text)


def _port(env: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    port = _int(env, name, launcher, default)
    if not 1 <= port <= 65535:
        raise ConfigError(f"distributed: {launcher}: {name} must be a port in [1, 65535], got {port}")
    return port


def _by_hand(env: Mapping[str, str]) -> Launch:
    name = env.get("XTRAIN_LAUNCHER", "by hand")  # Ray's ranks get these variables, too
    rank, size = _int(env, "XTRAIN_RANK", name), _int(env, "XTRAIN_WORLD_SIZE", name)
    local, locals_ = _int(env, "XTRAIN_LOCAL_RANK", name, rank), _int(env, "XTRAIN_LOCAL_WORLD_SIZE", name, size)
    run, token = env.get("XTRAIN_RUN_ID", "by hand"), env.get("XTRAIN_TOKEN", "")
    me = (name, rank, size, local, locals_)
    if size == 1:
        return Launch(*me)
    store = _need(env, "XTRAIN_STORE", name, " to host:port, where rank 0 listens, or to file:PATH on one host")
    if store.startswith("file:"):
        return Launch(*me, file=store[5:], run_id=run, token=token)
    host, _, port = store.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"distributed: by hand: XTRAIN_STORE must be host:port or file:PATH, got {shown(store)}")
    return Launch(*me, host=host.strip("[]"), ports=(int(port),), run_id=run, token=token)


def _torchrun(env: Mapping[str, str]) -> Launch:
    name = "torchrun"
    rank, size = _int(env, "RANK", name), _int(env, "WORLD_SIZE", name)
    me = (name, rank, size, _int(env, "LOCAL_RANK", name, 0), _int(env, "LOCAL_WORLD_SIZE", name, 1))
    if size == 1:
        return Launch(*me)
    host = _need(env, "MASTER_ADDR", name, " to the host of rank 0")
    port = _port(env, "MASTER_PORT", name)
    ports = (port,)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens on MASTER_PORT
        if port == 65535:
            raise ConfigError(
                f"distributed: {name}: MASTER_PORT must be less than 65535, for rank 0 listens behind it, got {port}"
            )
        ports = tuple(range(port + 1, min(port + AGENT_PORTS, 65535) + 1))
    restart = _int(env, "TORCHELASTIC_RESTART_COUNT", name, 0)
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}@{host}:{port}"
    return Launch(*me, host=host, ports=ports, run_id=run, restart=restart, token=env.get("XTRAIN_TOKEN", ""))


def _mpi(env: Mapping[str, str], me: Launch, job: str) -> Launch:
    """The processes of one host meet in a file; those of several need MASTER_ADDR, or mpi4py."""
    values = (me.launcher, me.rank, me.world_size, me.local_rank, me.local_world_size)
    token = env.get("XTRAIN_TOKEN", "")
    if me.world_size == 1:
        return me
    if env.get("MASTER_ADDR"):
        port = _port(env, "MASTER_PORT", me.launcher, _MPI_PORT)
        return Launch(*values, host=env["MASTER_ADDR"], ports=(port,), run_id=job, token=token)
    if me.world_size == me.local_world_size:
        return Launch(*values, file=meeting_file(env, job), run_id=job, token=token)
    return Launch(*values, run_id=job, token=token)  # neither: mpi4py tells the others where rank 0 listens


def _open_mpi(env: Mapping[str, str]) -> Launch:
    name = "Open MPI"
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local, locals_ = (_int(env, f"OMPI_COMM_WORLD_{part}", name) for part in names)
    me = Launch(name, rank, size, local, locals_)
    return _mpi(env, me, env.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}")


def _mpich(env: Mapping[str, str]) -> Launch:
    name = "MPICH"
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    rank, size, local, locals_ = (_int(env, part, name) for part in names)
    me = Launch(name, rank, size, local, locals_)
    return _mpi(env, me, f"parent-{os.getppid()}")  # MPICH gives a job no name


def meeting_file(env: Mapping[str, str], job: str) -> str:
    """Where rank 0 of an MPI job on one host publishes its port: named by user and job."""
    return os.path.join(env.get("TMPDIR") or "/tmp", f"xtrain-{os.getuid()}-{re.sub(r'[^A-Za-z0-9._-]', '_', job)}")


def _slurm(env: Mapping[str, str]) -> Launch:
    name = "srun"
    rank, size = _int(env, "SLURM_PROCID", name), _int(env, "SLURM_STEP_NUM_TASKS", name)
    node, local = _int(env, "SLURM_NODEID", name, 0), _int(env, "SLURM_LOCALID", name)
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE")
    counts = _tasks_per_node(tasks) if tasks else [size]
    me = Launch(name, rank, size, local, counts[node] if node < len(counts) else counts[-1])
    if size == 1:
        return me
    job, step = env.get("SLURM_JOB_ID", "0"), env["SLURM_STEP_ID"]
    digits = re.sub(r"\D", "", f"{job}{step}") or "0"
    host = env.get("MASTER_ADDR") or first_host(_need(env, "SLURM_STEP_NODELIST", name, " to the step's nodes"))
    port = 20000 + int(digits) % 20000
    ports = tuple(range(port, port + AGENT_PORTS))
    values = (name, rank, size, local, me.local_world_size)
    restart = _int(env, "SLURM_RESTART_COUNT", name, 0)
    return Launch(
        *values, host=host, ports=ports, run_id=f"{job}.{step}", restart=restart, token=env.get("XTRAIN_TOKEN", "")
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"distributed: srun: SLURM_STEP_TASKS_PER_NODE must be counts such as 2(x3),1, got {shown(text)}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: "gpu[07-09,12],login" has gpu07."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ConfigError(f"distributed: srun: SLURM_STEP_NODELIST must name hosts, got {shown(nodes)}")
    return match[1] + (match[2] or "")


# The variables by which a launcher is known, and the function that reads them; the first match wins. Slurm sets its
# variables without srun, too, but for SLURM_STEP_ID.
_LAUNCHERS = (
    (("RANK", "WORLD_SIZE"), _torchrun),
    (("OMPI_COMM_WORLD_RANK",), _open_mpi),
    (("PMI_RANK", "PMI_SIZE"), _mpich),
    (("SLURM_STEP_ID", "SLURM_PROCID"), _slurm),
)
