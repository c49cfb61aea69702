"""Settings of the server; `EngineConfig` holds the engine's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from strobe.sampling_params import RepetitionDetection
from strobe.server.log_format import configure_logging
from strobe.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from strobe.server.telemetry.kv_events import KVEventsConfig, check_kv_events
from strobe.server.telemetry.traces import check_endpoint
from strobe.validation import MAX_INT, Texts, option, settings

MAX_PATTERN = 256
"""Maximum number of tokens of a pattern whose repeats `max_repeats` counts."""

TEXT_THREADS = 4
"""Maximum number of threads that render templates and encode texts."""


@dataclass(frozen=True)
class LogSettings:
    """Arguments of `configure_logging` for the server's processes."""

    level: str = "info"
    as_json: bool = False
    show_text: bool = False
    engine: int | None = None

    def configure(self) -> None:
        configure_logging(
            self.level, as_json=self.as_json, show_text=self.show_text, engine=self.engine
        )


def _visible(names: Texts) -> Texts:
    if any(not name.strip() for name in names):
        raise ValueError("served_model_name holds an empty name; give it a visible one.")
    return names


Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


@settings
class ServerConfig:
    """Options of `strobe serve`, without the engine's. Raises ValueError for invalid values."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface.")
    port: Annotated[int, Field(ge=0, le=65535)] = option(
        8000, "Port to listen on; 0 takes a free one."
    )
    api_key: Texts = option(
        (), "Clients must send one of these keys, or the one in STROBE_API_KEY."
    )
    served_model_name: Annotated[Texts, AfterValidator(_visible)] = option(
        (), "Names of the model in requests; responses have the first one."
    )
    chat_template: str | None = option(
        None, "A Jinja file, or its text, in place of the checkpoint's chat template."
    )
    default_chat_template_kwargs: str = option(
        "",
        "Variables for the chat template that requests may change, as JSON, such as "
        """'{"enable_thinking": false}'.""",
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring chat templates, which can exhaust time and memory."
    )
    tool_call_parser: str = option(
        "auto",
        f"How the model writes tool calls: {', '.join(TOOL_FORMATS)}, none or auto.",
    )
    reasoning_parser: str = option(
        "auto",
        f"How the model marks its thinking: {', '.join(REASONING_FORMATS)}, none or auto.",
    )
    api_key_file: str | None = option(
        None,
        "A file of further keys, one per line: a name for the log, the key, and optionally the "
        "number of requests that may run at once.",
    )
    allowed_hosts: Texts = option(
        (),
        "Host names that the server answers for, * is any. On a loopback address that is, without "
        "this option, loopback names and addresses alone, elsewhere any.",
    )
    ssl_certfile: str | None = option(None, "Certificate chain, as PEM; the server speaks HTTPS.")
    ssl_keyfile: str | None = option(None, "Its private key, where the chain's file has none.")
    root_path: str = option("", "Path below which a proxy shows the server, such as /strobe.")
    data_parallel_size: Annotated[int, Field(ge=1, le=256)] = option(
        1,
        "Engines behind the server, each with the whole model and, on GPUs, tensor_parallel_size "
        "GPUs of its own.",
    )
    max_waiting: Count = option(
        256, "Answers that may wait for a slot; more are rejected with 429."
    )
    max_repeats: Annotated[int, Field(ge=2, le=MAX_INT)] | None = option(
        None,
        "End answers that repeat a pattern of up to 256 tokens so many times in a row; requests "
        "may choose otherwise with repetition_detection.",
        "leave it out to let answers repeat themselves.",
    )
    request_timeout: Seconds = option(
        600.0, "Seconds one request may take; 0 is no limit.", "give seconds; 0 is no limit."
    )
    grace: Seconds = option(
        30.0, "Seconds that running requests have to finish after SIGTERM.", "give seconds."
    )
    restart_engine: bool = option(
        True,
        "Restart an engine process that ends, unless it ends the third time within a minute; the "
        "server exits with 1 once no engine is left.",
    )
    max_body_bytes: Count = option(32 << 20, "Largest request body in bytes.")
    response_memory: Count = option(
        64 << 20, "Bytes of the newest responses to store for /v1/responses/ID; 0 stores none."
    )
    batch_dir: str | None = option(
        None, "Directory of the files of /v1/batches and /v1/messages/batches; none: no batches."
    )
    lenient: bool = option(
        False, "Accept unknown fields, with a warning in the response, instead of a 400."
    )
    cors_origin: Texts = option((), "Origins whose pages may call the API; * is all.")
    access_log: bool = option(True, "Write one line per request.")
    otlp_traces_endpoint: Annotated[str, AfterValidator(check_endpoint)] | None = option(
        None,
        "Send a span of each request to this OpenTelemetry collector, such as "
        "http://localhost:4318/v1/traces; needs strobe[otel].",
    )
    kv_events_config: Annotated[str, AfterValidator(check_kv_events)] | None = option(
        None,
        "Publish changes of the prefix cache by ZeroMQ, for routers: a JSON object with vLLM's "
        'keys, such as {"enable_kv_cache_events": true}; needs strobe[kv-events].',
    )
    log_level: str = option("info", "debug, info, warning or error.")
    log_json: bool = option(False, "Write log lines as JSON objects.")
    log_prompts: bool = option(False, "Let prompts and answers appear in the log.")

    @model_validator(mode="after")
    def _check_together(self) -> ServerConfig:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is set without ssl_certfile; set both.")
        if self.root_path and not (self.root_path[0] == "/" != self.root_path[-1]):
            raise ValueError(
                f"root_path is {self.root_path!r}, but must begin with / and not end with it."
            )
        _ = self.template_variables
        if self.kv_events is not None:
            self.kv_events.check_ports(self.data_parallel_size)
        return self

    @property
    def repetition_detection(self) -> RepetitionDetection | None:
        """The setting of requests that choose none."""
        if self.max_repeats is None:
            return None
        return RepetitionDetection(max_pattern_size=MAX_PATTERN, min_count=self.max_repeats)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Where to publish changes of the prefix cache, if anywhere."""
        return None if self.kv_events_config is None else KVEventsConfig.of(self.kv_events_config)

    @property
    def template_variables(self) -> dict[str, Any]:
        """default_chat_template_kwargs as a dict. Raises ValueError."""
        try:
            variables = json.loads(self.default_chat_template_kwargs or "{}")
        except ValueError:
            variables = None
        if not isinstance(variables, dict):
            raise ValueError(
                f"default_chat_template_kwargs is {self.default_chat_template_kwargs!r}, but must "
                """be a JSON object, such as '{"enable_thinking": false}'."""
            )
        return variables

    @property
    def logs(self) -> LogSettings:
        return LogSettings(level=self.log_level, as_json=self.log_json, show_text=self.log_prompts)
