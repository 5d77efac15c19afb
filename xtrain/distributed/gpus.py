"""Which GPU a rank computes on. The GPUs of all ranks are of one kind, and each has one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import _C, cuda
from ..errors import ConfigError
from . import agree
from .choice import joins_gpus
from .env import Launch
from .store import ranks_text

if TYPE_CHECKING:
    from .host import HostPlane


def choose(link: HostPlane, resolve: Callable[[], str], launch: Launch) -> str:
    """The device of this rank. resolve: names a device, where "cuda" leaves the choice to this function; its error on
    one rank is raised on all. Every rank must call it. ConfigError where a GPU is missing; and see `check`.
    """
    found: list[str] = []

    def find() -> None:
        name = resolve()
        found.append(_own(cuda.device_count(), launch) if name == "cuda" else name)

    agree.all_or_none(link, find)
    check(link, _C.device(found[0]))
    return found[0]


def _own(count: int, launch: Launch) -> str:
    if count == 1:  # as srun and Ray have it: each rank sees its own; `check` finds one that others see too
        return "cuda"
    if launch.local_world_size > count and joins_gpus():
        raise ConfigError(
            f"device must have a GPU for each of the {launch.local_world_size} ranks of this host, got {count}; "
            "XTRAIN_PLANE=host lets ranks share one"
        )
    return f"cuda:{launch.local_rank % count}"


def join(link: HostPlane, device: _C.device) -> None:
    """Check the devices of all ranks, once, and let their bytes go from GPU to GPU where XTRAIN_PLANE does not say
    otherwise. Every rank must call it. ConfigError as from `check`, and where NCCL is missing or its versions differ.
    """
    check(link, device)
    if device.type == "cuda" and joins_gpus() and link.gpus is None:
        from .nccl import NcclPlane

        link.gpus = NcclPlane(link, device)


def check(link: HostPlane, device: _C.device) -> None:
    """ConfigError on every rank where ranks compute on devices of different kinds, or with other libraries, or where
    two share a GPU. XTRAIN_PLANE=host or mpi lets them share one, for tests. Every rank must call it.
    """
    facts, uuid = {"device": device.type}, ""
    if device.type == "cuda":
        square = _C.full((16, 16), 1, _C.float32, device)
        square.matmul(square)  # the first product finds cuBLAS
        about = _C.cuda_info(device)
        uuid = about["uuid"]
        facts |= {
            "driver": about["driver"],
            "kernels for": about["built_for"],
            "name of the GPU": about["name"],
            "plane of GPUs": "nccl" if joins_gpus() else "that of hosts",
            "version of CUDA": about["runtime"],
            "version of cuBLAS": about["blas"].split(",")[0],
        }
    agree.check_same(link, facts, "")
    if not uuid or not joins_gpus():
        return
    users: dict[str, list[int]] = {}
    for rank, one in enumerate(agree.gather_json(link, uuid, "names of GPUs")):
        users.setdefault(one, []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            raise agree.on_all_ranks(
                ConfigError(
                    f"distributed: every rank must have a GPU of its own, got one for {ranks_text(ranks)}; "
                    "XTRAIN_PLANE=host lets ranks share one"
                )
            )
