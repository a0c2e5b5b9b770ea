"""Pages of the built book opened from disk until their formulas stand, against the same
pages with the formulas left as TeX."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import Bars, Row, installed, interleaved, show

HTML = Path(__file__).resolve().parent.parent / "_build" / "html"
PAGES = ("nbs/intro", "nbs/260_losses", "nbs/340_recovery", "nbs/810_scoreboard")
TYPESET = """const done = arguments[arguments.length - 1];
    Promise.resolve(window.MathJax?.startup?.promise).then(() => done())"""
FORMULAS = "*tex-svg-full.js*"


def open_browser(binary: str, driver: str) -> Any:
    """A headless Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_script_timeout(300)
    browser.execute_cdp_cmd("Network.enable", {})
    return browser


def opening(browser: Any, page: str, blocked: list[str]) -> Callable[[], None]:
    """Opens a page and waits until it is complete."""

    def load() -> None:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": blocked})
        browser.get((HTML / f"{page}.html").as_uri())
        browser.execute_async_script(TYPESET)

    return load


def rows(quick: bool = False) -> list[Row]:
    """One comparison a page; none without the book, selenium or Chromium."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    there = installed("selenium") is not None and (HTML / "index.html").exists()
    if binary is None or driver is None or not there:
        return []
    browser, found = open_browser(binary, driver), []
    peers = {"tex": ("formulas left as TeX", None)}
    try:
        for page in PAGES[: 1 if quick else None]:
            calls = {
                "ours": opening(browser, page, []),
                "tex": opening(browser, page, [FORMULAS]),
            }
            slug = f"page.{page.partition('/')[2].partition('_')[0]}"
            bars = Bars(slug, f"open {page} from disk", "Pages of the book", peers)
            found += bars.rows(interleaved(calls, 2 if quick else 7))
    finally:
        browser.quit()
    return found


if __name__ == "__main__":
    show(rows())
