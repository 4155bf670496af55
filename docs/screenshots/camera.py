# ruff: noqa: INP001, T201
"""Debian's Chromium without a screen, driven by Selenium, and pictures of what it shows."""

import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from waiting import until

MOST_BYTES = 150_000
_COLOURS = 128
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@dataclass(frozen=True, slots=True)
class Camera:
    """A browser, and where its pictures go."""

    browser: webdriver.Chrome
    images: Path

    def open(self, address: str, *, width: int = 1280, height: int) -> None:
        """Open a page in a window of that size, in pixels."""
        self.browser.set_window_size(width, height)
        self.browser.get(address)

    def element(self, how: str, what: str) -> WebElement:
        """The first one that can be seen, waited for."""

        def seen() -> WebElement | None:
            found = self.browser.find_elements(how, what)
            return next((each for each in found if each.is_displayed()), None)

        return until(seen, f"the browser shows {what}", passing=(WebDriverException,))

    def click(self, what: str) -> None:
        """Click the element of that XPath, as soon as nothing covers it."""

        def clicked() -> bool:
            self.element(By.XPATH, what).click()
            return True

        passing = (ElementClickInterceptedException,)
        until(clicked, f"{what} can be clicked", passing=passing)

    def text(self, words: str) -> None:
        """Wait until the page says it."""

        def said() -> bool:
            return words in self.browser.find_element(By.TAG_NAME, "body").text

        until(said, f"the page says {words!r}", passing=(WebDriverException,))

    def take(self, name: str, *, settle_s: float = 2.0) -> None:
        """Write a picture once what moves has come to rest, with few colours to be small."""
        time.sleep(settle_s)
        picture = Image.open(io.BytesIO(self.browser.get_screenshot_as_png())).convert("RGB")
        path = self.images / f"{name}.png"
        picture.quantize(_COLOURS).save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}.")
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")


@contextmanager
def camera(images: Path) -> Iterator[Camera]:
    """A browser with a profile of its own, closed at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    driver = shutil.which("chromedriver") or "/usr/bin/chromedriver"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        for option in (*_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        browser = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield Camera(browser, images)
        finally:
            browser.quit()
