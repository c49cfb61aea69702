"""Links between the project's pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs", "docs/log", "strobe/demo_models", "strobe/smollm2_draft", "scripts/clients")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
README_LINES = 140


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def anchors_of(path: Path) -> set[str]:
    return anchors(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_anchors_are_those_of_headings():
    page = "# A `code` word, and more\n```\n# no heading\n```\n## [Link](x.md): two\n"
    assert anchors(page) == {"a-code-word-and-more", "link-two"}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_every_page_is_in_the_list():
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in names if f"]({name})" not in listed] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_named_files_exist(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:strobe|tests|scripts|benchmarks|docs|docker)/[\w./-]*)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
