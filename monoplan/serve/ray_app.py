"""The same application under Ray Serve: replicas, routing between them and autoscaling are Ray's.

    serve run monoplan.serve.ray_app:application model=path/to/model replicas=2 num_cpus=8

Options are those of `monoplan serve`: model, dtype, target, name, streams, queue, cache_tokens, max_body, api_key,
embeddings; and replicas (a number, or least-most: Ray then chooses by load), num_cpus and num_gpus of each replica,
ranks that share the model of a replica, and the launcher that starts them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ray import serve

from monoplan.ir.errors import ArgumentError, did_you_mean

DEFAULTS: Mapping[str, Any] = {
    "model": None, "dtype": "auto", "target": "cpu", "name": None, "streams": 32, "queue": 256, "cache_tokens": None,
    "max_body": 4 << 20, "api_key": None, "replicas": "1", "num_cpus": 1, "num_gpus": 0,
    "ranks": 1, "launcher": "mpirun", "embeddings": "mean",
}  # fmt: skip
_NUMBERS = {"streams": int, "queue": int, "cache_tokens": int, "max_body": int, "num_cpus": float, "num_gpus": float}
_NUMBERS |= {"ranks": int}


def application(args: Mapping[str, Any]) -> Any:
    """A Ray Serve application, as `serve run` and `serve.run` take it."""
    given = _checked(args)
    given["api_key"] = given["api_key"] or os.environ.get("MONOPLAN_API_KEY")

    def build() -> Any:  # runs in each replica, which may be on another machine
        from monoplan.serve.ray_app import replica

        return replica(given)

    least, _, most = str(given["replicas"]).partition("-")
    scale: dict[str, Any] = {"num_replicas": int(least)}
    if most:
        scale = {"autoscaling_config": {"min_replicas": int(least), "max_replicas": int(most)}}
        scale["autoscaling_config"]["target_ongoing_requests"] = given["streams"]
    actor: dict[str, Any] = {"num_cpus": given["num_cpus"], "num_gpus": given["num_gpus"]}
    if given["ranks"] > 1:
        ranks = f"{given['launcher']} -n {given['ranks']} {sys.executable} -m monoplan.serve.ray_rank"
        actor["runtime_env"] = {"py_executable": ranks}
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name="monoplan",
        ray_actor_options=actor,
        max_ongoing_requests=given["streams"] + given["queue"],
        **scale,
    )
    return deployment.bind()


def replica(given: Mapping[str, Any]) -> Any:
    """The ASGI application of one replica, with an engine of its own."""
    from monoplan.cli.serve import model_name
    from monoplan.serve.app import make_app

    engine = _engine(given, None if given["ranks"] == 1 else _group(given)).start()
    requests = given["streams"] + given["queue"]
    name = model_name(given["name"], engine.lm)
    return make_app(engine, name, api_key=given["api_key"], max_body=given["max_body"], requests=requests)


def follow() -> None:
    """A rank of a replica other than 0, which has the options."""
    group = _group(None)
    _engine(group.share(None), group).follow()


def _group(given: Mapping[str, Any] | None) -> Any:
    """The ranks of a replica; `given`: this is rank 0, and tells the others its options."""
    from monoplan.runtime.ranks.comm import mpi

    group = mpi()
    if given is not None:
        group.share(given)
    return group


def _engine(given: Mapping[str, Any], group: Any) -> Any:
    import monoplan
    from monoplan.cli.common import find_model
    from monoplan.models.auto import AutoLlamaModel
    from monoplan.serve.engine import Engine

    path = find_model(given["model"])
    model = AutoLlamaModel.from_pretrained(path, dtype=given["dtype"], device=given["target"])
    # Ray says by OMP_NUM_THREADS how many threads a replica has.
    llm = monoplan.compile(model, target=given["target"], tp=group)
    sizes = {name: given[name] for name in ("streams", "queue", "cache_tokens")}
    return Engine(llm, **sizes, pooling=given["embeddings"])


def _checked(args: Mapping[str, Any]) -> dict[str, Any]:
    """All options, with numbers made of texts: a command line has no others."""
    for name in args:
        if name not in DEFAULTS:
            fix = did_you_mean(name, DEFAULTS) or f"options are: {', '.join(DEFAULTS)}"
            raise ArgumentError(f"there is no option {name!r:.60}", fix=fix)
    given = {**DEFAULTS, **args}
    for name, kind in _NUMBERS.items():
        try:
            given[name] = None if given[name] is None else kind(given[name])
        except (TypeError, ValueError):
            raise ArgumentError(f"{name} must be a number, got {given[name]!r:.60}") from None
    if not all(part.isdigit() for part in str(given["replicas"]).split("-", 1)):
        raise ArgumentError(f"replicas must be a number, or two with - between them, got {given['replicas']!r:.60}")
    return given
