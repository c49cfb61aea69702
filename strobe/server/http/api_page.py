"""The page at /docs: the OpenAPI document as plain HTML without scripts, styled as the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "OpenAI": (
        "/v1/chat/", "/v1/completions", "/v1/responses", "/v1/models", "/v1/files", "/v1/batches",
    ),
    "Anthropic": ("/v1/messages",),
    "Ollama": ("/api/",),
    "Texts and tokens": ("/infill", "/tokenize", "/detokenize"),
    "The server": ("/",),
}  # fmt: skip
"""The page's sections, and the beginnings of their paths in the order of the page."""

METHODS = ("post", "get", "delete")


class Endpoint(NamedTuple):
    """An operation of the OpenAPI document."""

    method: str
    path: str
    operation: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """The fragment of its place on the page."""
        return f"{self.method}{self.path.replace('/', '-')}"

    @property
    def title(self) -> str:
        return f"<code>{self.method.upper()} {escape(self.path)}</code>"


def api_page(schema: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML: each path with the fields of its request. Links are
    relative, since a proxy may show the page below a path."""
    title = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}: API"
    sections = sorted_endpoints(schema)
    contents = "".join(
        f"<b>{escape(name)}</b><ul>"
        + "".join(f'<li><a href="#{end.anchor}">{end.title}</a></li>' for end in endpoints)
        + "</ul>"
        for name, endpoints in sections.items()
    )
    body = "".join(
        f"<section><h2>{escape(name)}</h2>"
        + "".join(part for end in endpoints for part in _endpoint(end, schema))
        + "</section>"
        for name, endpoints in sections.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel=icon href="icon.svg" type="image/svg+xml">'
        '<link rel=stylesheet href="theme.css"><link rel=stylesheet href="docs.css">'
        f"<header><h1>{title}</h1><p class=note>The same for programs: "
        '<a href="openapi.json">openapi.json</a>. A page to try the model: <a href="./">the '
        "page</a>.</p></header>"
        f'<nav aria-label="Contents">{contents}</nav><main>{body}</main></html>'
    )


def sorted_endpoints(schema: Mapping[str, Any]) -> dict[str, list[Endpoint]]:
    """Return the document's endpoints by section, in the order of the page."""
    sections: dict[str, list[Endpoint]] = {name: [] for name in SECTIONS}
    paths: dict[str, Any] = dict(schema["paths"])
    for name, prefixes in SECTIONS.items():
        for prefix in prefixes:
            matching = [path for path in paths if path.startswith(prefix)]
            for path in sorted(matching, key=lambda path: ("{" in path, path)):
                operations = paths.pop(path)
                for method in sorted(operations, key=METHODS.index):
                    sections[name].append(Endpoint(method, path, operations[method]))
    return {name: endpoints for name, endpoints in sections.items() if endpoints}


def _endpoint(endpoint: Endpoint, schema: Mapping[str, Any]) -> Iterator[str]:
    operation = endpoint.operation
    yield f'<h3 id="{endpoint.anchor}">{endpoint.title}</h3>'
    text = operation.get("description") or operation.get("summary", "")
    yield f"<p>{_code(text)}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        yield _table(_resolved(content["application/json"]["schema"], schema), schema)


def _table(shape: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    needed = shape.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{escape(_type(field, schema))}{', required' if name in needed else ''}</td>"
        f"<td>{_code(_description(field))}</td></tr>"
        for name, field in shape.get("properties", {}).items()
    ]
    return f"<table><tr><th>field<th>type<th>what it does</tr>{''.join(rows)}</table>"


def _description(field: Mapping[str, Any]) -> str:
    parts = [field, *field.get("anyOf", ())]
    return next((part["description"] for part in parts if "description" in part), "")


def _type(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return a field's types in one line."""
    field = _resolved(field, schema)
    if "anyOf" in field:
        kinds = [_type(part, schema) for part in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in field:
        return " or ".join(str(value) for value in field["enum"] if value is not None)
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schema)}"
    return str(field.get("type", "any"))


def _resolved(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a field's schema, following its reference if it has one."""
    name = str(field.get("$ref", "")).rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else field


def _code(text: str) -> str:
    """Escape text for HTML, with `code` in code tags."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
