"""`strobe serve`: starts the engine process and the HTTP server, and stops both in order.

SIGTERM, SIGINT: reject new requests > finish running ones within the grace period > exit 0
a second signal: end the grace period at once
the engine process ends: fail its open requests > restart it
the third time within a minute, or with --no-restart-engine: fail open requests > exit 1 if it is
the last one
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from strobe.config import EngineConfig
from strobe.hub.download import without_revision
from strobe.hub.files import read_json
from strobe.hub.locate import locate_models
from strobe.server.app import make_app, middleware_settings
from strobe.server.batches.batch_store import BatchStore
from strobe.server.engine_process.client import EngineClient, EngineDead
from strobe.server.engine_process.engine_messages import Ready
from strobe.server.engine_process.replicas import Replicas
from strobe.server.http.connections import AT_ONCE, Connection, QuietErrorHandler
from strobe.server.http.guards import Shutdown, is_loopback
from strobe.server.schema.field_errors import counted
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import (
    Formats,
    Serving,
    check_parsers,
    check_template,
    log_tool_form,
    read_template,
)
from strobe.server.telemetry.server_metrics import ServerMetrics
from strobe.text.server_tokenizer import load_server_tokenizer
from strobe.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEMO_NAME = "strobe-demo"
_POLL = 0.05
_BACKLOG = 2048


def serve(config: EngineConfig, settings: ServerConfig) -> int:
    """Serve until a signal stops the server. Returns the exit status. Raises ValueError for invalid
    settings."""
    settings.logs.configure()
    logger.info(
        "Strobe starts with %s: it reads the weights, warms up and times its steps, which takes "
        "10 to 30 seconds for a small model on a CPU.",
        config.target or "the demo models",
    )
    settings, template = prepare(config, settings)
    listener = listen(settings.host, settings.port)
    settings = replace(settings, host=listener.getsockname()[0])
    warn_if_open(settings)
    try:
        config = locate_checkpoint(config)
        if template is not None:
            check_template(load_server_tokenizer(Path(config.target)), template)
        return asyncio.run(Server(config, settings, template, listener).run())
    finally:
        listener.close()


def prepare(config: EngineConfig, settings: ServerConfig) -> tuple[ServerConfig, str | None]:
    """Return the settings with the model's names and the environment's key, and the chat template
    that replaces the checkpoint's. Raises ValueError for settings that cannot be used."""
    from_environment = [key for key in [os.environ.get("STROBE_API_KEY")] if key]
    settings = replace(settings, api_key=(*settings.api_key, *from_environment))
    template = read_template(settings.chat_template)
    settings = served_names(config, settings)
    _check_certificate(settings)
    middleware_settings(settings)
    check_parsers(settings)
    if settings.batch_dir is not None:
        BatchStore(Path(settings.batch_dir))
    return settings, template


def warn_if_open(settings: ServerConfig) -> None:
    """Log a warning if the network can use the server without a key."""
    if not (is_loopback(settings.host) or settings.api_key or settings.api_key_file):
        logger.warning(
            "Everyone on the network who reaches %s can use this server, because it asks for no "
            "key; set --api-key.",
            settings.host,
        )


def locate_checkpoint(config: EngineConfig) -> EngineConfig:
    """Return the configuration with directories in place of hub names, which are downloaded. Raises
    ValueError if the target is no checkpoint."""
    config = locate_models(config)
    read_json(Path(config.target) / "config.json")
    return config


def _check_certificate(settings: ServerConfig) -> None:
    """Raise ValueError if the certificate or its key cannot be loaded."""
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: "")
    except (OSError, ValueError) as error:
        key = settings.ssl_keyfile or settings.ssl_certfile
        raise ValueError(
            f"The certificate {settings.ssl_certfile} with the key {key} cannot be used ({error}); "
            "give a chain and its unencrypted key as PEM files."
        ) from None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ValueError if the address cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # now, or two servers that start together share the port
    except OSError as error:
        raise ValueError(
            f"{host} port {port} cannot be listened on ({error.strerror or error}); choose another "
            "with --host and --port."
        ) from None
    return listener


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers, since `Server` handles signals."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # uvicorn also accepts `backlog` connections at a time


class Server:
    """Starts the engine process and the HTTP server, waits for a reason to stop, and stops them."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerConfig,
        template: str | None,
        listener: socket.socket,
    ):
        self.config = config
        self.settings = settings
        self.template = template
        self.listener = listener
        self.shutdown = Shutdown(retry_after=max(1, int(settings.grace)))
        self._stop = asyncio.Event()
        self._force_stop = False

    async def run(self) -> int:
        """Start, serve and stop. Returns the exit status. Raises ValueError if the engine cannot
        start."""
        client = make_client(self.config, self.settings)
        client.on_death = self._stop.set
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(QuietErrorHandler())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        client.start()
        http: asyncio.Task[None] | None = None
        try:
            serving = await load_serving(self.settings, client, self.template)
            serving.shutdown = self.shutdown
            server = _Uvicorn(
                uvicorn.Config(
                    make_app(serving),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    http=Connection,
                    backlog=AT_ONCE,
                    timeout_keep_alive=75,
                    server_header=False,
                    root_path=self.settings.root_path,
                    ssl_certfile=self.settings.ssl_certfile,
                    ssl_keyfile=self.settings.ssl_keyfile,
                )
            )
            http = asyncio.create_task(server.serve(sockets=[self.listener]))
            ready = asyncio.create_task(client.ready())
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({ready, stopped, http}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() or client.dead:
                facts = await ready
                where = description(facts, len(client.engines), self.config.page_size)
                logger.info(greeting(self.settings, self.listener.getsockname(), where))
                for work in serving.background:
                    work.resume()
                await asyncio.wait({stopped, http}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            stopped.cancel()
            return await self._end(serving, server, http)
        except EngineDead as error:
            logger.error("%s", error)
            return 1
        finally:
            if http is not None:
                http.cancel()
            await client.stop()

    def _on_stop_signal(self) -> None:
        self._force_stop = self._stop.is_set()
        self._stop.set()

    async def _end(self, serving: Serving, server: uvicorn.Server, http: asyncio.Task[None]) -> int:
        """Drain requests, then stop the engine and the HTTP server. Returns the exit status."""
        client = serving.client
        await begin_stop(serving)
        if client.dead:
            logger.error("the engine's process has ended; the server stops")
            await asyncio.sleep(_POLL)  # the open requests' errors go out first
        else:
            logger.info("stopping: finishing %s", counted(client.num_open, "answer"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.grace):
                    while serving.busy and not client.dead and not self._force_stop:
                        await asyncio.sleep(_POLL)
            if client.num_open:
                logger.warning("stopping with %s unfinished", counted(client.num_open, "answer"))
        status = 1 if client.dead or http.done() else 0
        await client.stop()
        server.should_exit = True
        server.force_exit = False
        try:
            async with asyncio.timeout(2.0):
                await asyncio.shield(http)
        except TimeoutError:
            server.force_exit = True
        return status


def make_client(config: EngineConfig, settings: ServerConfig) -> EngineClient | Replicas:
    """Return the client of an engine process, or of several, that are yet to start. Raises
    ValueError if the machine has too few GPUs."""
    if settings.data_parallel_size > 1:
        return Replicas(config, settings)
    return EngineClient(
        config, settings.logs, restart=settings.restart_engine, kv_events=settings.kv_events
    )


async def load_serving(
    settings: ServerConfig, client: EngineClient | Replicas, template: str | None
) -> Serving:
    """Load the tokenizer while the engine starts, and return the endpoints' shared state. Raises
    as `make_serving`."""
    tokenizer = await asyncio.to_thread(load_server_tokenizer, Path(client.config.target))
    return make_serving(settings, client, tokenizer, template)


def description(facts: Ready, num_engines: int, page_size: int) -> str:
    """Return what serves: devices, dtype, default method, and memory for keys and values."""
    several = f"{num_engines} engines, " if num_engines > 1 else ""
    return (
        f"{several}{facts.device}, {facts.dtype}, drafting with {facts.methods[0]}, "
        f"K/V memory {facts.kv_bytes / 1e6:,.0f} MB for {facts.pages * page_size:,} tokens"
    )


def greeting(settings: ServerConfig, address: Sequence[Any], where: str) -> str:
    """Return the log's line for a server that can answer. address: host and port."""
    host, port = address[:2]
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.ssl_certfile is None else "https"
    base = f"{scheme}://{host}:{port}"
    return (
        f"Strobe serves {settings.served_model_name[0]} on {where}: {base}/ is a page to try it, "
        f"{base}/docs its API."
    )


async def begin_stop(serving: Serving) -> None:
    """Reject new requests, restart no engine any more, and end background work."""
    for engine in serving.client.engines:
        engine.restart = False
    serving.shutdown.stopping = True
    for work in serving.background:
        await work.stop()


def make_serving(
    settings: ServerConfig,
    client: EngineClient | Replicas,
    tokenizer: Tokenizer,
    template: str | None,
) -> Serving:
    """Return the endpoints' shared state. template: replaces the checkpoint's chat template. Raises
    ValueError for a template that does not compile and for unknown parsers."""
    if template is not None:
        check_template(tokenizer, template)
    chat_template = template or tokenizer.hf.chat_template
    text = chat_template if isinstance(chat_template, str) else None
    capabilities = tokenizer.capabilities(template)
    formats = Formats.of(settings, text, capabilities)
    if chat_template is not None:
        log_tool_form(settings, formats, capabilities)
    metrics = ServerMetrics(settings.served_model_name[0])
    page_size = client.config.page_size
    metrics.add_engines(len(client.engines) - 1)
    for engine, own in zip(client.engines, metrics.engines, strict=True):
        own.open_answers = partial(getattr, engine, "num_open")
        engine.on_snapshot = own.engine
        engine.on_end = own.engine_ended
        engine.on_restart = own.engine_restarted
        engine.on_ready = lambda facts, own=own: own.engine_started(page_size, facts.pages)
        if engine.facts is not None:
            engine.on_ready(engine.facts)
    return Serving(
        settings=settings,
        client=client,
        tokenizer=tokenizer,
        names=tuple(settings.served_model_name),
        root=client.config.target,
        chat_template=template,
        formats=formats,
        metrics=metrics,
    )


def served_names(config: EngineConfig, settings: ServerConfig) -> ServerConfig:
    """Return the settings with the names of the served model filled in."""
    names = tuple(settings.served_model_name) or (without_revision(config.target) or DEMO_NAME,)
    return replace(settings, served_model_name=names)
