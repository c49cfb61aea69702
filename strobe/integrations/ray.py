"""Ray Serve: replicas of the server on the machines of a Ray cluster.

    serve run strobe.integrations.ray:app target=Qwen/Qwen3-8B num_replicas=2
    strobe serve Qwen/Qwen3-8B --ray --data-parallel-size 2

    client > Ray's proxy > Ingress with ReplicaRouter > Replica > engine process

An ingress reads each request before it chooses a replica, since Ray's proxies see no bodies and so
no prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import Context
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, get_type_hints

from pydantic_core import from_json
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from strobe.compat.aliases import translate
from strobe.compat.arguments import parse_value
from strobe.config import EngineConfig
from strobe.integrations.forwarding import (
    MERGED,
    ROUTING,
    ForwardedRequest,
    merge,
    read_body,
    respond,
    send_failure,
    without_request_id,
)
from strobe.integrations.replica_watchdog import Heartbeat
from strobe.server.app import make_app
from strobe.server.http.guards import Shutdown, route
from strobe.server.launch import (
    begin_stop,
    load_serving,
    locate_checkpoint,
    make_client,
    prepare,
)
from strobe.server.server_settings import ServerConfig

ray = import_module("ray")  # without types, which are not there where Ray is not
serve = import_module("ray.serve")

SERVE_NAMESPACE = "serve"
RAY_OPTIONS = ("autoscaling_config", "ray_actor_options")
_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile", "root_path")
_REFUSED = {
    "batch_dir": "every replica would run the same batches; leave it out, and use strobe run-batch",
    "kv_events_config": "all replicas would publish at one port; leave it out, since Ray routes",
}
ROUTER_SETTINGS = {"do_eviction": True}
"""Settings of Ray's prefix-aware router, which by itself forgets no prompt."""
STOP_SECONDS = 15
"""Seconds a replica has to stop its engine after its last request."""
MAX_ONGOING = 1 << 20
"""Requests that Ray lets a replica answer at once: the replica's own limits are reached first."""
ACCEPT_SECONDS = 5.0
"""Seconds in which a replica has to accept a request before another one gets it."""
LAST_ACCEPT_SECONDS = 60.0
"""Seconds in which the last replica has to accept a request. The watchdog ends a stopped replica
in between."""
ALL_SECONDS = 5.0
"""Seconds in which each replica has to answer a request that goes to all."""
LOST = "The replica that answered this request was lost; send the request again."
SILENT = "No replica accepted this request in time; send the request again."


@serve.ingress()
class Ingress:
    """Forwards each request to a replica, and chooses another if that one cannot answer now."""

    def __init__(self, replicas: Any, max_body_bytes: int):
        self.max_body_bytes = max_body_bytes
        self.answers = replicas.options(method_name="answer", stream=True)
        self.heartbeat = Heartbeat()
        self.handling = 0

    def __serve_build_asgi_app__(self) -> Router:
        return Router(default=self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        self.handling += 1
        try:
            body = await read_body(receive, self.max_body_bytes)
            if body is not None:
                request = ForwardedRequest.of(scope, body)
                reply = self._from_all if route(scope) in MERGED else self._from_one
                await reply(request, without_request_id(send))
        finally:
            self.handling -= 1

    async def count_open(self) -> int:
        """Return the number of requests whose responses are not sent yet."""
        return self.handling

    async def _from_one(self, request: ForwardedRequest, send: Send) -> None:
        """Send one replica's response."""
        start: Message | None = None
        accepted = False
        try:
            while not accepted:
                stream = self.answers.remote(request)
                try:
                    accepted = await self._accepts(request, stream)
                    if not accepted:
                        continue
                    async for messages in stream:
                        for message in messages:
                            start = start or message
                            if _is_last(message):  # before the client knows, and sends the next
                                ROUTING.record_answered(request)
                            await send(message)
                finally:
                    stream.cancel()
        except ray.exceptions.RayTaskError:
            raise
        except TimeoutError:
            await send_failure(
                request, send=send, start=start, sentence=SILENT, code="replica_silent"
            )
        except (ray.exceptions.RayError, serve.exceptions.RayServeException):
            await send_failure(request, send=send, start=start, sentence=LOST, code="replica_lost")
        finally:
            ROUTING.record_answered(request)

    async def _accepts(self, request: ForwardedRequest, stream: AsyncIterator[str]) -> bool:
        """Wait until a replica accepts a request. If it does not, exclude it and return False.
        Raises TimeoutError if no other is left."""
        others = ROUTING.replicas.difference(request.excluded)
        is_last = request.owner in request.excluded or not others
        try:
            async with asyncio.timeout(LAST_ACCEPT_SECONDS if is_last else ACCEPT_SECONDS):
                refused_by: str = await anext(stream)
        except TimeoutError:
            silent = ROUTING.replica_of(request)
            if is_last and silent:
                raise
            if silent:  # else Ray is starting replicas
                ROUTING.record_silent(silent)
                request.excluded += (silent,)
            return False
        if refused_by:
            request.excluded += (refused_by,)
        return not refused_by

    async def _from_all(self, request: ForwardedRequest, send: Send) -> None:
        """Send a response merged from all replicas that answer in time, or the first one's
        error."""
        if not ROUTING.replicas:  # the first request makes Ray's router
            await self._whole(replace(request), LAST_ACCEPT_SECONDS)
        ids = sorted(ROUTING.replicas)
        tasks = [
            asyncio.create_task(
                self._whole(replace(request, owner=name, excluded=(name,))),
                context=Context(),  # Ray's router mixes up calls at once in the context of one
            )
            for name in ids
        ]
        answers = await asyncio.gather(*tasks)
        responses = dict(answer for answer in answers if answer is not None)
        if not responses:
            await send_failure(
                request, send=send, start=None, sentence=SILENT, code="replica_silent"
            )
            return
        try:
            messages = merge(route(request.scope), responses, set(ids) - responses.keys())
        except ValueError as error:
            await send_failure(
                request, send=send, start=None, sentence=str(error), code="replica_silent"
            )
            return
        for message in messages:
            await send(message)

    async def _whole(
        self, request: ForwardedRequest, seconds: float = ALL_SECONDS
    ) -> tuple[str, list[Message]] | None:
        """Return a replica's id and the messages of its response, None if it is lost or late."""
        stream = self.answers.remote(request)
        try:
            async with asyncio.timeout(seconds):
                if await anext(stream):  # the id of a replica whose engine restarts
                    return None
                replica = ROUTING.replica_of(request)
                return replica, [message async for part in stream for message in part]
        except ray.exceptions.RayTaskError:
            raise
        except (TimeoutError, ray.exceptions.RayError, serve.exceptions.RayServeException):
            return None
        finally:
            stream.cancel()
            ROUTING.record_answered(request)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


class Replica:
    """The server without its HTTP port: the engine process and the application. Raises ValueError
    and EngineDead if the engine cannot start."""

    async def __init__(self, config: EngineConfig, settings: ServerConfig, template: str | None):
        settings.logs.configure()
        self.id = serve.get_replica_context().replica_id.unique_id
        self.heartbeat = Heartbeat()
        client = make_client(await asyncio.to_thread(locate_checkpoint, config), settings)
        client.start()
        try:
            self.serving = await load_serving(settings, client, template)
            self.serving.responses.id_prefix = f"resp_{self.id}_"
            self.serving.shutdown = Shutdown(retry_after=max(1, int(settings.grace)))
            self.app = make_app(self.serving)
            await client.ready()
        except BaseException:
            await client.stop()
            raise

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message] | str]:
        """Yield "" and the messages of the response; if the engine is restarting, this replica's
        id alone, so that the ingress may choose another."""
        if not self.serving.client.can_answer and self.id not in request.excluded:
            yield self.id
            return
        yield ""
        async with contextlib.aclosing(respond(self.app, request)) as messages:
            async for some in messages:
                yield some

    async def drain(self) -> int:
        """Reject new requests from now on; return the number of requests still to answer."""
        if not self.serving.shutdown.stopping:
            await begin_stop(self.serving)
        return max(self.serving.handling, self.serving.client.num_open)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended for good; Ray then replaces the replica."""
        if self.serving.client.dead:
            raise RuntimeError(self.serving.client.state)

    async def __del__(self) -> None:
        """Stop the engine. Ray calls this when the replica's last request has ended."""
        if hasattr(self, "serving"):
            await begin_stop(self.serving)
            await self.serving.client.stop()
            self.heartbeat.stop()


def app(args: dict[str, Any]) -> object:
    """Return the application for `serve run` and for Serve's configuration files.

    args: options of `strobe serve`, with underscores; num_replicas or Ray's autoscaling_config;
    ray_actor_options. A command line's values are texts. Raises ValueError.
    """
    kinds = get_type_hints(EngineConfig) | get_type_hints(ServerConfig)
    options = {name: _parse(name, value, kinds.get(name)) for name, value in args.items()}
    values = translate(options).values
    for name in values:
        if name in _PROXY:
            raise ValueError(
                f"{name} is set, but Ray's proxies listen for requests; set it in http_options of "
                "Serve's configuration."
            )
        if name not in kinds and name not in RAY_OPTIONS:
            raise ValueError(
                f"{name} is neither an option of strobe serve nor {', '.join(RAY_OPTIONS)}."
            )
    engine, server = ({f.name for f in fields(kind)} for kind in (EngineConfig, ServerConfig))
    config = EngineConfig(**{name: values[name] for name in values.keys() & engine})
    settings = ServerConfig(**{name: values[name] for name in values.keys() & server})
    settings, template = prepare_replicas(config, replace(settings, host="0.0.0.0"))
    ray_options = {name: values[name] for name in values.keys() & {*RAY_OPTIONS}}
    return make_application(config, settings, template, **ray_options)


def _parse(name: str, value: object, kind: object) -> object:
    """Return an option's value. kind: the type of the setting; None for other options. Raises
    ValueError."""
    if name in RAY_OPTIONS:
        return _parse_object(name, value)
    if not isinstance(value, str):
        return value
    if "Sequence" in str(kind):
        return (value,)
    if "str" in str(kind):
        return value
    return {"true": True, "false": False}.get(value.lower(), parse_value(value))


def _parse_object(name: str, value: object) -> dict[str, Any]:
    try:
        fields = from_json(value) if isinstance(value, str) else value
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"{name} is {value!r}, but must be an object, or its JSON.")
    return fields


def prepare_replicas(
    config: EngineConfig, settings: ServerConfig
) -> tuple[ServerConfig, str | None]:
    """Return the settings and the chat template as `prepare` does. Raises ValueError also for
    settings without a meaning for replicas."""
    for name, reason in _REFUSED.items():
        if vars(settings)[name] is not None:
            raise ValueError(f"{name} is set, but with Ray {reason}.")
    if config.device.startswith("cuda:"):
        raise ValueError(f"device is {config.device!r}, but Ray chooses the GPU; ask for cuda.")
    return prepare(config, settings)


def make_application(
    config: EngineConfig,
    settings: ServerConfig,
    template: str | None,
    autoscaling_config: dict[str, Any] | None = None,
    ray_actor_options: dict[str, Any] | None = None,
) -> Any:
    """Return the application: as many ingresses as replicas, and for each replica of a model on
    several GPUs a placement group, so that they are on one machine.

    autoscaling_config: Ray's settings of a number of replicas that follows the load, in place of
    num_replicas. ray_actor_options: a replica's resources; by default its GPUs and one CPU, or one
    CPU per rank. Raises ValueError.
    """
    count = settings.data_parallel_size
    if count > 1 and autoscaling_config is not None:
        raise ValueError(
            f"num_replicas is {count}, but autoscaling_config is set too; set one of them."
        )
    settings = replace(settings, data_parallel_size=1)  # each replica has one engine
    config = replace(config, device=choose_device(config.device))
    resources = default_resources(config) | (ray_actor_options or {})
    placement: dict[str, Any] = {}
    if resources["num_gpus"] > 1:
        bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
        placement["placement_group_bundles"] = [bundle | resources.get("resources", {})]
    common: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": settings.grace + STOP_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 2,
        "logging_config": {"enable_access_log": False},  # the application logs its requests
    }
    if autoscaling_config is None:
        common["num_replicas"] = count
    else:
        common["autoscaling_config"] = autoscaling_config
    replica = serve.deployment(
        Replica,
        **common,
        **placement,
        ray_actor_options=resources,
        max_constructor_retry_count=3,  # of the first start; later ones are retried on and on
        request_router_config={
            "request_router_class": "strobe.integrations.ray_router.ReplicaRouter",
            "request_router_kwargs": ROUTER_SETTINGS,
        },
    )
    ingress = serve.deployment(Ingress, **common, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replica.bind(config, settings, template), settings.max_body_bytes)


def default_resources(config: EngineConfig) -> dict[str, Any]:
    """Return a replica's resources: its GPUs and one CPU, or one CPU per rank."""
    size = config.tensor_parallel_size
    if config.device == "cpu":
        return {"num_cpus": size, "num_gpus": 0}
    return {"num_cpus": 1, "num_gpus": size}


def choose_device(name: str) -> str:
    """Return cpu or cuda; for auto, cuda if the cluster has a GPU now."""
    if name != "auto":
        return name
    if not ray.is_initialized():
        ray.init(namespace=SERVE_NAMESPACE)
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
