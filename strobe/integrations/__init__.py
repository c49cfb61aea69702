"""Strobe inside other systems, which are not installed with it."""

from __future__ import annotations

from importlib.util import find_spec

from strobe.config import EngineConfig
from strobe.server.server_settings import ServerConfig


def serve_on_ray(config: EngineConfig, settings: ServerConfig) -> int:
    """Serve on Ray until a signal, and return the exit status. Raises ValueError, also if Ray is
    not installed."""
    if find_spec("ray") is None:
        raise ValueError("--ray needs Ray Serve; install it with: pip install 'strobe[ray]'.")
    from strobe.integrations.ray_command import serve_on_ray

    return serve_on_ray(config, settings)
