"""axe-core's rules for accessible pages, from a package that ships its script."""

from __future__ import annotations

import json
from importlib.resources import files

from tests.server.support.browser import Page


def violations(page: Page) -> list[str]:
    """Return a line for each rule that the page breaks, with the elements that break it."""
    script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(f"{script}\n; window.axe = axe, 0")
    found = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => JSON.stringify("
        "violations.map(({id, help, nodes}) => [id, help, nodes.map(({html}) => html)])))"
    )
    return [f"{rule}: {help}: {nodes[:3]}" for rule, help, nodes in json.loads(found)]
