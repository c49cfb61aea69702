"""Print the changelog's section of the version that a tag names.

    python -m scripts.release_notes v0.2.0

Exits with 1 and a sentence if the tag is not the package's version, or if the changelog has no
dated section for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from strobe import __version__

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, version: str, changelog: str) -> str:
    """Return the text below the version's heading. Raises ValueError if it is not released."""
    if tag != f"v{version}":
        raise ValueError(
            f"The tag {tag!r} does not name version {version} of strobe/__init__.py; "
            f"tag this commit 'v{version}'."
        )
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n"
    section = re.search(heading + r"(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError(
            f"CHANGELOG.md has no heading '## {version} (DATE)'; rename its unreleased section."
        )
    return section[1].strip() + "\n"


def main() -> int:
    if len(sys.argv) != 2:
        print("Give one tag, such as v0.2.0.", file=sys.stderr)
        return 2
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        notes = release_notes(tag=sys.argv[1], version=__version__, changelog=changelog)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(notes, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
