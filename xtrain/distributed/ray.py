"""Training on the processes of a Ray cluster: pip install 'xtrain[ray]'. They meet as others do."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from typing import Any

from .._types import is_whole
from ..errors import ConfigError, PeerError


def train(config: Mapping[str, Any], workers: int = 2, gpu: bool = False) -> dict[str, Any]:
    """Train with `config`, {dotted option name: value}, on `workers` Ray processes of one CPU each, with gpu=True also
    one GPU; return rank 0's {"directory", "step"}. Joins the cluster that ray.init has joined, or starts one.

    Relative paths of config are those of this process's working directory, which all hosts must see. Ctrl-C stops all
    ranks after the same step, which is saved, where a worker is on this host; a second one ends them at once. An error
    of a rank is raised here; what others then say of it is not. ConfigError without Ray, or for more workers than the
    cluster has room for; ValueError for other numbers.
    """
    if not is_whole(workers) or workers < 1:
        raise ValueError(f"train: workers must be a whole number of at least 1, got {workers!r}")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("distributed: Ray is missing: pip install 'xtrain[ray]'") from None
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=True)
    actors: list[Any] = []
    try:
        resource = "GPU" if gpu else "CPU"
        room = int(ray.cluster_resources().get(resource, 0))
        if room < workers:
            raise ConfigError(
                f"distributed: Ray: workers must be at most the cluster's {resource}s ({room}), got {workers}"
            )
        actor = ray.remote(num_cpus=1, num_gpus=int(gpu), max_restarts=0)(_Worker)
        actors = [actor.remote() for _ in range(workers)]
        places = ray.get([one.place.remote() for one in actors])
        store, token = f"{places[0][1]}:{places[0][2]}", secrets.token_hex(16)
        waiting = []
        for rank, one in enumerate(actors):
            host = [other for other, place in enumerate(places) if place[0] == places[rank][0]]
            variables = {
                "XTRAIN_LAUNCHER": "Ray",
                "XTRAIN_RANK": str(rank), "XTRAIN_WORLD_SIZE": str(workers), "XTRAIN_LOCAL_RANK": str(host.index(rank)),
                "XTRAIN_LOCAL_WORLD_SIZE": str(len(host)), "XTRAIN_STORE": store, "XTRAIN_TOKEN": token,
            }  # fmt: skip
            waiting.append(one.train.remote(dict(config), variables, os.getcwd()))
        here = [place[3] for place in places if place[0] == ray.get_runtime_context().get_node_id()]
        results: list[Any] = []
        errors: list[Exception] = []
        asked = False
        while waiting:
            try:
                results.append(ray.get(waiting[0]))
            except KeyboardInterrupt:
                if asked or not here:
                    raise
                asked = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(here[0], signal.SIGUSR1)  # the ranks agree on the step
                continue
            except Exception as error:
                errors.append(error)
            del waiting[0]
        if asked:
            raise KeyboardInterrupt from next(iter(errors), None)
        if errors:  # the first that is no consequence of another
            raise next((error for error in errors if not _is_consequence(error, ray)), errors[0])
        return results[0]
    finally:
        for one in actors:
            ray.kill(one)
        if started:
            ray.shutdown()


def _is_consequence(error: Exception, ray: Any) -> bool:
    return isinstance(error, (PeerError, ray.exceptions.RayActorError))


class _Worker:
    """A rank, in a process of Ray's."""

    def place(self) -> tuple[str, str, int, int]:
        """This host's name for Ray, its address, a free port, and the process's number."""
        ray: Any = importlib.import_module("ray")
        with socket.create_server(("", 0)) as free:
            return (
                ray.get_runtime_context().get_node_id(),
                ray.util.get_node_ip_address(),
                free.getsockname()[1],
                os.getpid(),
            )

    def train(self, config: dict[str, Any], variables: dict[str, str], folder: str) -> dict[str, Any]:
        os.environ.update(variables)
        os.chdir(folder)
        # By name: training is above this package, which a worker's process alone has to know.
        trainer = importlib.import_module("xtrain.train").Trainer(config)
        trainer.run()
        importlib.import_module("xtrain.distributed").shutdown()
        return {"directory": os.fspath(trainer.directory.absolute()), "step": trainer.step}
