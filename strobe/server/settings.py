"""What the operator of a server chooses; the engine's own settings are `EngineConfig`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strobe.sampling_params import option
from strobe.server.logs import configure_logging

TEXT_THREADS = 4
"""Threads that render templates and encode texts, made one by one as they are needed."""


@dataclass(frozen=True)
class LogSettings:
    """How a process of the server logs; see `configure_logging`."""

    level: str = "info"
    as_json: bool = False
    show_text: bool = False

    def configure(self) -> None:
        configure_logging(self.level, as_json=self.as_json, show_text=self.show_text)


@dataclass(frozen=True)
class ServerConfig:
    """Options of `strobe serve` beside the engine's. `check()` raises ValueError."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_key: Sequence[str] = option(
        (), "Clients must send one of these keys, or the one in STROBE_API_KEY."
    )
    served_model_name: Sequence[str] = option(
        (), "Names clients call the model by; the first one is given back."
    )
    chat_template: str | None = option(
        None, "A Jinja file, or its text, in place of the checkpoint's chat template."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring chat templates, which can take all time and memory there is."
    )
    tool_call_parser: str = option(
        "auto", "How the model writes tool calls: hermes, llama3_json, openai, none or auto."
    )
    reasoning_parser: str = option(
        "auto", "How the model marks its thinking: qwen3, openai_gptoss, none or auto."
    )
    max_waiting: int = option(256, "Answers that may wait for a place; more get a 429.")
    request_timeout: float = option(600.0, "Seconds one request may take; 0 is no limit.")
    grace: float = option(30.0, "Seconds that running requests have to finish after SIGTERM.")
    max_body_bytes: int = option(32 << 20, "Largest request body in bytes.")
    cors_origin: Sequence[str] = option((), "Origins whose pages may call the API; * is all.")
    access_log: bool = option(True, "Write one line per request.")
    log_level: str = option("info", "debug, info, warning or error.")
    log_json: bool = option(False, "Write log lines as JSON objects.")
    log_prompts: bool = option(False, "Let prompts and answers appear in the log.")

    def check(self) -> ServerConfig:
        """Itself, if every value makes sense by itself."""
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port!r}, but must be a whole number from 0 to 65535.")
        for name in ("max_waiting", "max_body_bytes"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 0.")
        for name in ("request_timeout", "grace"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name} is {value!r}, but must be seconds of at least 0.")
        for name in self.served_model_name:
            if not str(name).strip():
                raise ValueError("served_model_name holds an empty name; give it a visible one.")
        return self

    @property
    def logs(self) -> LogSettings:
        return LogSettings(self.log_level, self.log_json, self.log_prompts)
