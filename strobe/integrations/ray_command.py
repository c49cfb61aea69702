"""`strobe serve --ray`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import time
from dataclasses import replace
from typing import Any

from strobe.config import EngineConfig
from strobe.integrations.ray import (
    SERVE_NAMESPACE,
    Ingress,
    Replica,
    choose_device,
    default_resources,
    make_application,
    prepare_replicas,
    ray,
    serve,
)
from strobe.server.launch import greeting, listen, locate_checkpoint, warn_if_open
from strobe.server.schema.field_errors import counted
from strobe.server.server_settings import ServerConfig

logger = logging.getLogger(__name__)

APPLICATION = "strobe"
_POLL = 0.1
"""Seconds between two looks at open requests."""
_DRAIN_SECONDS = 5.0
"""Seconds in which all replicas have to answer one look."""
_FLUSH_SECONDS = 1.0
"""Seconds in which Ray's proxies send the last bytes."""


class _Stopped(BaseException):
    """A signal asks the command to end."""


def serve_on_ray(config: EngineConfig, settings: ServerConfig) -> int:
    """Serve on the running Ray cluster, else on one that is started on this machine and ends with
    the command, until SIGTERM or SIGINT. Returns the exit status. Raises ValueError."""
    settings.logs.configure()
    logger.info("Strobe starts on Ray with %s.", config.target or "the demo models")
    settings, template = prepare_replicas(config, settings)
    listener = listen(settings.host, settings.port)
    address = listener.getsockname()
    listener.close()  # Ray's proxies listen there
    settings = replace(settings, host=address[0], port=address[1])
    warn_if_open(settings)
    own = _connect()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    deployed = False
    with contextlib.suppress(_Stopped):  # a third signal
        try:
            if own:
                _check_resources(config, settings.data_parallel_size)
                config = locate_checkpoint(config)
            _deploy(make_application(config, settings, template), settings)
            deployed = True
            settings.logs.configure()  # Serve has replaced the handlers
            logger.info("%s", greeting(settings, address, "Ray"))
            while True:
                signal.pause()
        except _Stopped:
            logger.info("stopping: finishing open answers")
            if deployed:
                with contextlib.suppress(_Stopped):
                    _drain(settings.grace)
        finally:
            names = serve.status().applications.keys()
            if names <= {APPLICATION}:
                serve.shutdown()  # the proxies too, which would answer 404 without the application
            elif APPLICATION in names:
                serve.delete(APPLICATION)
    ray.shutdown()
    return 0


def _stop(number: int, frame: object) -> None:
    raise _Stopped


def _drain(grace: float) -> None:
    """Let all replicas reject new requests, and wait until the open ones are answered, for `grace`
    seconds at most."""
    end = time.monotonic() + grace
    replicas = serve.get_deployment_handle(Replica.__name__, APPLICATION)
    ingresses = serve.get_deployment_handle(Ingress.__name__, APPLICATION)
    while time.monotonic() < end:
        try:  # each time, since Ray may have started others
            counts = [*_ask_all(replicas, "drain"), *_ask_all(ingresses, "count_open")]
        except TimeoutError:
            continue
        if not any(isinstance(count, int) and count for count in counts):
            time.sleep(_FLUSH_SECONDS)
            return
        time.sleep(_POLL)


def _ask_all(deployment: Any, method: str) -> list[Any]:
    """Return what a method returns on all replicas, or raises there. Raises TimeoutError."""
    response = deployment.broadcast(method)
    return response.results(timeout_s=_DRAIN_SECONDS, return_exceptions=True)


def _connect() -> bool:
    """Connect to Ray. Returns whether its cluster was started here. Raises ValueError if Serve runs
    there already, because its proxies then listen elsewhere."""
    options = {"namespace": SERVE_NAMESPACE, "logging_level": logging.WARNING}
    host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), 10.0).close()
        ray.init("auto", **options)
    except OSError as error:
        if host:
            raise ValueError(
                f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, but no Ray cluster answers there "
                f"({error}); start it, or unset RAY_ADDRESS to serve on this machine."
            ) from None
        ray.init("local", include_dashboard=False, **options)
        return True
    if serve.status().proxies:
        raise ValueError(
            "Ray Serve runs on this cluster already, with a host and port of its own; deploy with "
            "serve run strobe.integrations.ray:app, or end it with serve shutdown."
        )
    return False


def _deploy(application: object, settings: ServerConfig) -> None:
    """Start Serve's proxies and the application. Raises ValueError if no replica can start."""
    http_options = {
        "host": settings.host,
        "port": settings.port,
        "root_path": settings.root_path,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile or settings.ssl_certfile,
    }
    serve.start(http_options=http_options)
    try:
        serve.run(application, name=APPLICATION)
    except RuntimeError as error:
        deployments = serve.status().applications[APPLICATION].deployments.values()
        messages = [deployment.message for deployment in deployments if deployment.message]
        last_line = "\n".join([str(error), *messages]).rstrip().splitlines()[-1]
        raise ValueError(re.sub(r"^[\w.]+: ", "", last_line)) from None


def _check_resources(config: EngineConfig, count: int) -> None:
    """Raise ValueError if this machine has no room for so many replicas."""
    wanted = default_resources(replace(config, device=choose_device(config.device)))
    available = ray.cluster_resources()
    for name, kind in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
        have = int(available.get(kind, 0))
        need = count * wanted[name]
        if need > have:
            raise ValueError(
                f"data_parallel_size is {count}, which needs {counted(need, kind)} for replicas, "
                f"but this machine has {have}; ask for fewer, or start a Ray cluster of several "
                "machines."
            )
