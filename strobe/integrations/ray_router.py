"""Ray Serve: which replica answers a request.

Ray copies this module's code into its processes, so that classes to compare by identity must be in
others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from strobe.integrations.forwarding import ForwardedRequest

logger = logging.getLogger(__name__)

_routers: Any = import_module("ray.serve.request_router")
_less_busy: Any = import_module("ray.serve._private.request_router").PowerOfTwoChoicesRequestRouter


def _prefix_router() -> Any:
    """Return Ray's prefix-aware router; for a version without it, one that chooses the less busy of
    two replicas."""
    try:  # its public name, in ray.serve.llm, imports vLLM or SGLang too
        name = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
        return import_module(name).PrefixCacheAffinityRouter
    except ImportError:
        bases = (_routers.LocalityMixin, _routers.MultiplexMixin, _routers.RequestRouter)
        return type("LessBusyRouter", bases, {"choose_replicas": _less_busy.choose_replicas})


class ReplicaRouter(_prefix_router()):
    """Ray's prefix-aware router, for HTTP requests.

    It prefers the replica that has answered the prompt with the longest common prefix, unless
    another is much less busy. A request that names a stored response goes to the replica that
    stores it; one without a prompt, to the less busy of two. Prefixes are kept by an actor, without
    which requests are routed as if they had no prompt.
    """

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> Sequence[Sequence[Any]]:
        """Return groups of replicas, the best first."""
        request = _forwarded(pending_request) or ForwardedRequest({}, b"")
        others = [r for r in candidate_replicas if _id(r) not in request.excluded]
        owners = [r for r in others if _id(r) == request.owner]
        if owners:
            return [owners]
        if 0 < len(others) < len(candidate_replicas):
            return [others]
        if request.prompt:
            try:
                return await super().choose_replicas(candidate_replicas, pending_request)
            except Exception as error:
                logger.warning(
                    "The prefix router failed (%s); routing by load.", type(error).__name__
                )
        return await _less_busy.choose_replicas(self, candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        request = _forwarded(pending_request)
        if request is not None and request.prompt:
            _try(super().on_request_routed, pending_request, replica_id, result)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        _try(super().on_replica_actor_died, replica_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        _try(super().update_replicas, replicas)


def _try(update: Callable[..., None], *arguments: Any) -> None:
    """Run an update, which informs the prefixes' actor last."""
    try:
        update(*arguments)
    except Exception as error:
        logger.warning("The prefix router was not updated (%s).", type(error).__name__)


def _forwarded(pending: Any) -> ForwardedRequest | None:
    """Return the HTTP request of a call; None if it is another call."""
    arguments = () if pending is None else pending.args
    return arguments[0] if arguments and isinstance(arguments[0], ForwardedRequest) else None


def _id(replica: Any) -> str:
    return replica.replica_id.unique_id
