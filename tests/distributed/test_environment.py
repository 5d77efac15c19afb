"""Which launcher's variables are read, and what is wrong with others: xtrain/distributed/env.py."""

import os

import pytest
from ranks import clean_environment
from runs import python

from xtrain.distributed.env import ALONE, Launch, detect, first_host, meeting_file
from xtrain.errors import ConfigError

HAND = {"XTRAIN_RANK": "1", "XTRAIN_WORLD_SIZE": "4", "XTRAIN_STORE": "node1:4000"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node1-3@1", "TMPDIR": "/t",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "TMPDIR": "/t"}
SRUN = {
    "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
}  # fmt: skip


def test_table_of_launchers():
    me, parent = os.getuid(), os.getppid()
    torchrun = Launch("torchrun", 3, 4, 1, 2, "node0", (29400,), "", "job7@node0:29400", 2)
    agent = tuple(range(29401, 29417))
    expected = [
        ({}, ALONE),
        (HAND, Launch("by hand", 1, 4, 1, 4, "node1", (4000,), "", "by hand")),
        (
            {**HAND, "XTRAIN_STORE": "file:/x", "XTRAIN_TOKEN": "s"},
            Launch("by hand", 1, 4, 1, 4, "", (), "/x", "by hand", 0, "s"),
        ),
        (TORCHRUN, torchrun),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Launch("torchrun", 3, 4, 1, 2, "node0", agent, "", "job7@node0:29400", 2),
        ),
        (
            OPEN_MPI,
            Launch("Open MPI", 1, 2, 1, 2, "", (), f"/t/xtrain-{me}-prterun-node1-3_1", OPEN_MPI["PMIX_NAMESPACE"]),
        ),
        ({**OPEN_MPI, "MASTER_ADDR": "n"}, Launch("Open MPI", 1, 2, 1, 2, "n", (29500,), "", "prterun-node1-3@1")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, Launch("Open MPI", 1, 4, 1, 2, "", (), "", "prterun-node1-3@1")),
        (MPICH, Launch("MPICH", 0, 2, 0, 2, "", (), f"/t/xtrain-{me}-parent-{parent}", f"parent-{parent}")),
        (SRUN, Launch("srun", 5, 7, 1, 2, "gpu07", tuple(range(37710 - 9, 37710 + 7)), "", "77.1")),
    ]
    for variables, launch in expected[:-1]:
        assert detect(variables) == launch, variables
    found = detect(SRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 7, 1, 2)
    assert (found.host, len(found.ports), found.ports[0], found.run_id) == ("gpu07", 16, 20000 + 771, "77.1")
    # The first match wins; Slurm's variables are there without srun, and then have no step.
    assert detect({**SRUN, **MPICH, **OPEN_MPI, **TORCHRUN, **HAND}).launcher == "by hand"
    assert detect({**SRUN, **MPICH, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert detect({**SRUN, **MPICH, **OPEN_MPI}).launcher == "Open MPI"
    assert detect({**SRUN, **MPICH}).launcher == "MPICH"
    assert detect({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) == ALONE
    assert first_host("a-1,b") == "a-1" and first_host("n[3,5-7]") == "n3"
    assert meeting_file({}, "a/b") == f"/tmp/xtrain-{me}-a_b"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**HAND, "XTRAIN_RANK": "4"}, r"by hand: the rank must be in \[0, 4\), the world size, got 4"),
        ({**HAND, "XTRAIN_RANK": "-1"}, "by hand: XTRAIN_RANK must be a whole number, got '-1'"),
        ({**HAND, "XTRAIN_WORLD_SIZE": "0"}, "by hand: the world size must be at least 1, got 0"),
        ({"XTRAIN_WORLD_SIZE": "2"}, "by hand: XTRAIN_RANK must be set, got nothing"),
        (
            {**HAND, "XTRAIN_STORE": ""},
            "by hand: XTRAIN_STORE must be set to host:port, where rank 0 listens, or to file:PATH on one host, got "
            "nothing",
        ),
        ({**HAND, "XTRAIN_STORE": "node1"}, "by hand: XTRAIN_STORE must be host:port or file:PATH, got 'node1'"),
        ({**HAND, "XTRAIN_STORE": "n:70000"}, "by hand: XTRAIN_STORE must be host:port or file:PATH, got 'n:70000'"),
        (
            {**HAND, "XTRAIN_LOCAL_RANK": "2", "XTRAIN_LOCAL_WORLD_SIZE": "2"},
            r"by hand: the local rank must be in \[0, 2\), the local world size, got 2",
        ),
        (
            {**HAND, "XTRAIN_LOCAL_WORLD_SIZE": "5"},
            r"by hand: the local world size must be at most the world size \(4\), got 5",
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "torchrun: MASTER_ADDR must be set to the host of rank 0, got nothing"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, r"torchrun: MASTER_PORT must be a port in \[1, 65535\], got 0"),
        (
            {**TORCHRUN, "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "torchrun: MASTER_PORT must be less than 65535, for rank 0 listens behind it, got 65535",
        ),
        ({**TORCHRUN, "RANK": "x"}, "torchrun: RANK must be a whole number, got 'x'"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x3"},
            r"srun: SLURM_STEP_TASKS_PER_NODE must be counts such as 2\(x3\),1, got '2x3'",
        ),
    ],
)
def test_variables_that_are_wrong(variables, message):
    with pytest.raises(ConfigError, match=f"^distributed: {message}$"):
        detect(variables)


def test_one_process_pays_nothing():
    """No socket, no thread, no import of what opens them; what an engine has started alone is alone."""
    code = (
        "import sys, threading, xtrain as xt\n"
        "before = set(sys.modules)\n"
        "d = xt.distributed\n"
        "d.init()\n"
        "t = xt.arange(6).float()\n"
        "assert d.all_gather(t).shape == (1, 6) and d.all_reduce(t, 'max').tolist() == t.tolist()\n"
        "assert d.all_to_all(t).tolist() == d.reduce_scatter(t).tolist() == d.broadcast(t, 0).tolist() == t.tolist()\n"
        "assert d.gather_json({'a': 1}) == [{'a': 1}]\n"
        "d.barrier('here')\n"
        "assert (d.rank(), d.world_size(), d.local_rank(), d.local_world_size()) == (0, 1, 0, 1)\n"
        "print(d.launcher())\n"
        "new = set(sys.modules) - before\n"
        "assert not new & {'socket', 'selectors', 'hmac', 'hashlib', 'queue', 'mpi4py', 'pickle'}, new\n"
        "own = {m for m in sys.modules if m.startswith('xtrain.distributed')}\n"
        "assert own == {'xtrain.distributed'} | {f'xtrain.distributed.{m}' for m in ('agree', 'env', 'world')}, own\n"
        "assert threading.active_count() == 1\n"
        "d.shutdown()\n"
        "assert not d.is_initialized()\n"
    )
    for variables, launcher in (({}, "none"), ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "torchrun")):  # fmt: skip
        done = python("-c", code, env={**clean_environment(), **variables})
        assert (done.returncode, done.stdout) == (0, f"{launcher}\n"), done.stderr
