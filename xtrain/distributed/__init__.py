"""Several processes that train one model: `torchrun --nproc-per-node 2 SCRIPT`, mpirun, srun, or variables by hand.

    import xtrain as xt
    xt.distributed.init()
    print(xt.distributed.rank(), xt.distributed.all_reduce(xt.ones(3)))

Sums are made in one fixed order, so that they have the same bits for every number of processes: see
docs/how-to/distributed.md. A process alone needs no `init`, opens no socket and starts no thread.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .step import DataParallel
    from .world import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather_json,
        init,
        is_initialized,
        launcher,
        local_rank,
        local_world_size,
        rank,
        reduce_scatter,
        shutdown,
        world_size,
    )
else:
    _HOMES = {
        name: f".world:{name}"
        for name in (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "barrier",
            "broadcast",
            "gather_json",
            "init",
            "is_initialized",
            "launcher",
        )
        + ("local_rank", "local_world_size", "rank", "reduce_scatter", "shutdown", "world_size")
    }
    _HOMES["DataParallel"] = ".step:DataParallel"
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "DataParallel", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather_json", "init",
    "is_initialized", "launcher", "local_rank", "local_world_size", "rank", "reduce_scatter", "shutdown", "world_size",
]  # fmt: skip
