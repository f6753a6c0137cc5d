"""The pages of docs/ fit together: links lead to headings that exist, named files exist, the glossary is in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(page for folder in ("docs", "examples") for page in (ROOT / folder).glob("**/*.md")),
]
GLOSSARY = (ROOT / "docs" / "GLOSSARY.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
TOPS = ("qmq", "spark", "tests", "bench", "fuzz")
MODULES = [f"/{path.relative_to(ROOT)}" for top in TOPS for path in (ROOT / top).rglob("*.py")]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        if not target.startswith("http") and (not other.exists() or (anchor and anchor not in anchors(other))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    assert dead_links(page) == []


def test_the_site_leads_to_every_page() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    of_a_page = {"docs/benchmarks/limits.md"}  # pages that another one leads to
    assert sorted({*listed, *of_a_page}) == sorted(str(page.relative_to(ROOT)) for page in PAGES)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "docs/decisions.md"])
def test_every_file_that_is_named_exists(name: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / name).read_text("utf-8")))
    assert len(named) > 3
    assert sorted(file for file in named if not any(path.endswith(f"/{file}") for path in MODULES)) == []


@pytest.mark.parametrize("name", ["OPERATIONS.md", "PROTOCOL.md", "FORMAT.md"])
def test_a_long_page_begins_with_its_contents_and_links_terms_to_the_glossary(name: str) -> None:
    page = ROOT / "docs" / name
    text = without_code(page.read_text("utf-8"))
    begin, *sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    contents = begin.rstrip().rpartition("\n\n")[2]
    assert [name for name in re.findall(r"\[([^\]]+)\]\(#", contents) if name in sections] == sections[::2]
    assert len(set(re.findall(r"GLOSSARY\.md#([\w-]+)", text))) > 30


def test_the_glossary_defines_each_word_once_in_alphabetical_order() -> None:
    words = re.findall(r"^### (.+)$", GLOSSARY, re.MULTILINE)
    assert len(words) > 80
    assert words == sorted(set(words))


def test_the_architecture_is_a_page_that_begins_with_the_glossary() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 137
    assert re.findall(r"\]\(([^)]+)\)", ARCHITECTURE)[0] == "GLOSSARY.md"


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b: c\n[1](#a-b-c) [2](#no) [3](none.md)\n```\n[4](none)\n```\n", "utf-8")
    assert dead_links(page) == ["#no", "none.md"]
