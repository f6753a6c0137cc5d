"""Windows of a real browser at a console, and what must hold for every page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from playwright.async_api import Browser, Page

#: How long a page may take to show what a test waits for, on a machine that does much else.
_TIMEOUT_MS = 20_000
_AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
_SERIOUS = ("serious", "critical")


@asynccontextmanager
async def window(chromium: Browser, port: int, **options: Any) -> AsyncIterator[Page]:
    """A window of a new user. An error of a script, a dialog, or what the page's policy forbids fails the test."""
    context = await chromium.new_context(base_url=f"http://127.0.0.1:{port}", timezone_id="UTC", **options)
    context.set_default_timeout(_TIMEOUT_MS)
    problems = list[str]()
    page = await context.new_page()
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    try:
        yield page
    finally:
        await context.close()
    assert problems == []


async def assert_accessible(page: Page) -> None:
    """axe finds nothing serious."""
    await page.evaluate(_AXE)
    found = await page.evaluate("axe.run({resultTypes: ['violations']})")
    serious = [
        (one["id"], one["help"], [node["html"] for node in one["nodes"]][:3])
        for one in found["violations"] if one["impact"] in _SERIOUS
    ]  # fmt: skip
    assert len(found["passes"]) > 10
    assert serious == [], page.url


#: The width that a time with its seconds takes in a field, in pixels.
_TIME_WIDTH = 240


async def assert_fits(page: Page) -> None:
    """The page is no wider than its window, and no time is cut in its field."""
    wide, shown = await page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= shown, page.url
    times = page.locator('input[type="datetime-local"]:visible')
    widths = await times.evaluate_all("all => all.map(one => one.clientWidth)")
    assert [width for width in widths if width < _TIME_WIDTH] == [], page.url


async def number(page: Page, label: str) -> str:
    """Return the number that a page shows below a label."""
    return await page.locator(f'.numbers div:has(dt:text-is("{label}")) dd').inner_text()
