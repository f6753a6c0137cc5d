"""A hook of mkdocs: the site has the pages of the checkout where they lie there, so that their links stay as they are.

mkdocs reads one directory; ours are in the root, in docs/ and in examples/. Files that a page links to come along.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).parent.parent.parent
#: What the site changes of its theme.
STYLE = "scripts/docs/site.css"
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def pages() -> list[Path]:
    """Return the pages of the site."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    for folder in ("docs", "examples"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return found


def linked(page: Path) -> set[Path]:
    """Return the files of the checkout that *page* links to."""
    targets = {
        (page.parent / target).resolve() for target in _LINK.findall(page.read_text("utf-8")) if "//" not in target
    }
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Have anchors on the site that are those of the files."""
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by pages and linked files under their paths in the checkout; keep those of themes."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    paths = {path for page in pages() for path in (page, *linked(page))} | {ROOT / STYLE}
    for path in sorted(paths):
        files.append(
            File(
                path.relative_to(ROOT).as_posix(),
                src_dir=str(ROOT),
                dest_dir=config.site_dir,
                use_directory_urls=config.use_directory_urls,
            )
        )
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have each name once in the contents of the reference: its page has a heading, and so has its description."""
    for section in page.toc:
        for part in section.children:
            part.children = _merged(part.children)
    return html


def _merged(links: list[AnchorLink]) -> list[AnchorLink]:
    kept = list[AnchorLink]()
    for link in links:
        if kept and kept[-1].title == link.title:
            kept[-1].children += link.children
        else:
            kept.append(link)
    return kept
