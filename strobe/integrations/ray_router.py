"""Ray Serve: which replica answers a request.

Ray copies this module's code into its processes, so that classes to compare by identity must be in
others.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from strobe.integrations import forwarding
from strobe.integrations.forwarding import ForwardedRequest
from strobe.server.engine_process.replicas import MAX_CREDIT, OPEN_TOKENS

if TYPE_CHECKING:  # Ray may not be installed, so its types are described here

    class ReplicaID(Protocol):
        unique_id: str

        def to_full_id_str(self) -> str: ...

    class RunningReplica(Protocol):
        replica_id: ReplicaID

    class PendingRequest(Protocol):
        args: tuple[object, ...]


logger = logging.getLogger(__name__)

CHARACTERS = 4
"""Characters of a token, about."""

_routers = import_module("ray.serve.request_router")
_less_busy = import_module("ray.serve._private.request_router").PowerOfTwoChoicesRequestRouter


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
    """Ray's prefix-aware router, for HTTP requests, with the costs of `Replicas`.

    It prefers the replica that has answered the prompt with the longest common prefix, unless that
    has more open requests: each that this router has sent there outweighs OPEN_TOKENS. A request
    that names a stored response goes to the replica that stores it. Prefixes are kept by an actor,
    without which requests are routed as if they had no prompt. Silent replicas come last.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[Sequence[RunningReplica]]:
        """Return groups of one replica each, the best first."""
        request = _forwarded(pending_request)
        if request is None:
            return await _less_busy.choose_replicas(self, candidate_replicas, pending_request)
        routing = forwarding.ROUTING
        owners = [r for r in candidate_replicas if _id(r) == request.owner]
        if owners:
            routing.record_sent(request, request.owner)
            return [owners]
        cached = await self._cached(request.prompt, candidate_replicas)
        on_all = min((cached.get(_id(r), 0) for r in candidate_replicas), default=0)
        num_open = routing.num_open()
        num_open.subtract([routing.replica_of(request)])
        costs = dict[str, tuple[float, ...]]()
        for replica in candidate_replicas:
            name = _id(replica)
            credit = min(cached.get(name, 0) - on_all, CHARACTERS * MAX_CREDIT)
            costs[name] = (
                name in request.excluded,
                routing.is_silent(name),
                CHARACTERS * OPEN_TOKENS * num_open[name] - credit,
                self._num_waiting(replica),
                random.random(),
            )
        ordered = sorted(candidate_replicas, key=lambda replica: costs[_id(replica)])
        if ordered:
            routing.record_sent(request, _id(ordered[0]))
        return [[replica] for replica in ordered]

    def _num_waiting(self, replica: RunningReplica) -> int:
        """Return the replica's open requests, other routers' included, as last known."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    async def _cached(self, prompt: str, replicas: Sequence[RunningReplica]) -> dict[str, int]:
        """Return the length of the prompt's prefix that replicas have answered: the longest, and
        the longest on a replica that has not answered that one."""
        if not prompt:
            return {}
        cached: dict[str, int] = {}
        try:
            rest = {r.replica_id.to_full_id_str(): _id(r) for r in replicas}
            for _ in range(2 if len(rest) > 1 else 0):
                match = self._tree_actor.prefix_match.remote(prompt, list(rest))
                text, names = await match
                if not text or not names:
                    break
                cached |= {rest.pop(name): len(text) for name in names if name in rest}
        except Exception as error:
            logger.warning("The prefix router failed (%s); routing by load.", type(error).__name__)
        return cached

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        request = _forwarded(pending_request)
        if request is None:
            return
        forwarding.ROUTING.record_sent(request, replica_id.unique_id)
        if request.prompt:
            _try(super().on_request_routed, pending_request, replica_id, result)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        _try(super().on_replica_actor_died, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        forwarding.ROUTING.replicas = frozenset(map(_id, replicas))
        _try(super().update_replicas, replicas)


def _try(update: Callable[..., None], *arguments: object) -> None:
    """Run an update, which informs the prefixes' actor last."""
    try:
        update(*arguments)
    except Exception as error:
        logger.warning("The prefix router was not updated (%s).", type(error).__name__)


def _forwarded(pending: PendingRequest | None) -> ForwardedRequest | None:
    """Return the HTTP request of a call; None if it is another call."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, ForwardedRequest) else None


def _id(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id
