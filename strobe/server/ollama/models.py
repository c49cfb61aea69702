"""The endpoints /api/tags, /api/ps, /api/show and /api/version, and the paths that are refused."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from strobe.hub.files import GGUF_LINK, read_json, source_of, weight_files
from strobe.hub.gguf_file import part_paths
from strobe.server.generation import reply
from strobe.server.ollama.protocol import bodies
from strobe.server.ollama.protocol.requests import ShowRequest
from strobe.server.serving import Serving

VERSION = "0.12.11"
"""The version of Ollama whose API these endpoints follow; clients compare it."""

NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""

_ONE_MODEL = (
    "the server holds the one model that it was started with; run strobe pull NAME and strobe "
    "serve NAME for another one"
)
REFUSED = {
    **dict.fromkeys(("pull", "push", "create", "copy", "delete", "blobs"), _ONE_MODEL),
    **dict.fromkeys(("embed", "embeddings"), "the server generates text and makes no embeddings"),
}
"""Names of Ollama's other endpoints, and why the server does not have them."""


def refusal(path: str) -> str | None:
    """Return a sentence for a path of Ollama's API that is not served."""
    root, _, name = path.strip("/").partition("/")
    reason = REFUSED.get(name.partition("/")[0]) if root == "api" else None
    return None if reason is None else f"{path[:200]} is not supported: {reason}."


def add_ollama_endpoints(app: FastAPI, serving: Serving) -> None:
    """Add the GET endpoints of Ollama's API."""
    endpoints = _GetEndpoints(serving)
    app.get("/api/version")(endpoints.ollama_version)
    app.get("/api/tags", response_model=bodies.ModelList)(endpoints.ollama_tags)
    app.get("/api/ps", response_model=bodies.RunningModelList)(endpoints.ollama_ps)


class _GetEndpoints:
    """Ollama's GET endpoints; the docstrings are shown in the OpenAPI document."""

    def __init__(self, serving: Serving):
        self._serving = serving

    async def ollama_version(self) -> bodies.Version:
        """The version of Ollama whose API the paths under /api follow."""
        return {"version": VERSION}

    async def ollama_tags(self, http: Request) -> Response:
        """The names of the served model, in Ollama's format."""
        try:
            body: bodies.ModelList = {"models": _models(self._serving)}
            return JSONResponse(body)
        except Exception as error:
            return reply.error_response(self._serving, http, error)

    async def ollama_ps(self, http: Request) -> Response:
        """The served model with its context length, in Ollama's format."""
        try:
            facts = self._serving.facts
            is_on_cpu = facts.device == "cpu"
            models: list[bodies.RunningModel] = [
                {
                    **model,
                    "expires_at": NEVER,
                    "context_length": facts.max_model_len,
                    "size_vram": 0 if is_on_cpu else model["size"],
                }
                for model in _models(self._serving)
            ]
            body: bodies.RunningModelList = {"models": models}
            return JSONResponse(body)
        except Exception as error:
            return reply.error_response(self._serving, http, error)


async def ollama_show(serving: Serving, request: ShowRequest, http: Request) -> Response:
    """Answer POST /api/show, which describes the model."""
    serving.name(request.model or request.name)
    facts = serving.facts
    formats = serving.formats
    details = _details(serving)
    template = serving.chat_template or serving.tokenizer.hf.chat_template
    family = details["family"]
    body: bodies.ShowResponse = {
        "modelfile": f"# Served by Strobe.\nFROM {serving.names[0]}",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.sampling.items()),
        "template": template if isinstance(template, str) else "",
        "details": details,
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.vocab_size": facts.vocab_size,
        },
        "capabilities": [
            "completion",
            *(["tools"] if formats.tools is not None else []),
            *(["thinking"] if formats.reasoning is not None else []),
        ],
        "modified_at": _modified_at(serving),
    }
    if warnings := request.warnings():
        body["warnings"] = warnings
    return JSONResponse(body)


def _models(serving: Serving) -> list[bodies.Model]:
    """Describe the model under each of its names."""
    config = Path(serving.root) / "config.json"
    files = [config.parent / name for name in weight_files(config.parent)]
    if files == [config.parent / GGUF_LINK]:
        files = part_paths(source_of(config.parent))
    size = sum(file.stat().st_size for file in files)
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _modified_at(serving),
            "size": size,
            "digest": digest,
            "details": _details(serving),
        }
        for name in [name if ":" in name else f"{name}:latest" for name in serving.names]
    ]


def _modified_at(serving: Serving) -> str:
    changed = (Path(serving.root) / "config.json").stat().st_mtime
    return datetime.fromtimestamp(changed, UTC).isoformat().replace("+00:00", "Z")


def _details(serving: Serving) -> bodies.ModelDetails:
    root = Path(serving.root)
    family = str(read_json(root / "config.json").get("model_type", "unknown"))
    return {
        "parent_model": "",
        "format": "gguf" if weight_files(root) == [GGUF_LINK] else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": serving.facts.dtype.upper(),
    }
