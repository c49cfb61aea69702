"""The page at /docs: the OpenAPI document as plain HTML, without scripts or external files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.92em ui-monospace, monospace; }
h2 { border-top: 1px solid #8886; padding-top: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; }
tr { border-bottom: 1px solid #8883; }
td:nth-child(2) { color: #888; width: 24%; }
td:nth-child(3) { width: 48%; }
"""


def api_page(schema: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML: each path with the fields of its request."""
    body = "\n".join(_paths(schema))
    title = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}: API</title><style>{STYLE}</style><h1>{title}: API</h1>"
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. A page to try the '
        f'model: <a href="/">/</a>.</p>{body}</html>'
    )


def _paths(schema: Mapping[str, Any]) -> Iterator[str]:
    by_use = sorted(schema["paths"].items(), key=lambda item: "post" not in item[1])
    for path, methods in by_use:
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
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
