"""A page and a browser for tests: `exogym ui` in a process of its own, and Chromium without a window."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LOOK_S = 60


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a page over the runs in `folder`."""
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextlib.contextmanager
def opened(address: str) -> Iterator[Any]:
    """A browser that shows `address`."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(address)
        yield driver
    finally:
        driver.quit()


def until(browser: Any, script: str, wanted: Callable[[Any], bool] = bool) -> Any:
    """Return what a script gives, as soon as it is what is wanted."""
    from selenium.webdriver.support.ui import WebDriverWait

    def look(driver: Any) -> Any:
        found = driver.execute_script(f"return {script}")
        return [found] if wanted(found) else None

    return WebDriverWait(browser, LOOK_S).until(look)[0]


def to(browser: Any, way: str) -> None:
    browser.execute_script("location.hash = arguments[0]", way)
