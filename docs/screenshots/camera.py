# ruff: noqa: INP001, T201
"""Debian's Chromium without a screen, driven by Selenium: pictures, print, and what a page did."""

import base64
import io
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from pypdfium2 import PdfDocument
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from docs.screenshots.waiting import until

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
MOST_BYTES = 150_000
# Fewer make text on tinted ground look dirty; more pass the limit on a long page.
_COLOURS = 128
# Pixels a point: sheets are then 770 wide, on which the smallest text can just be read.
_PRINT_SCALE = 1.3
_GAP, _BETWEEN = 16, "#8c959f"
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

Scheme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Camera:
    """A browser, and where its pictures go."""

    browser: webdriver.Chrome
    images: Path

    def open(
        self, address: str, *, width: int = 1440, height: int = 900, scheme: Scheme = "light"
    ) -> None:
        """Open a page in a window of that size, in pixels; a phone's width is a real one too."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.browser.get(address)

    def go_offline(self) -> None:
        """From now on nothing can be fetched; what is tried shows in `requests`."""
        self.browser.execute_cdp_cmd("Network.enable", {})
        off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.browser.execute_cdp_cmd("Network.emulateNetworkConditions", off)

    def requests(self) -> list[str]:
        """Everything that was asked for since this was asked last, also what failed."""
        lines = (json.loads(line["message"]) for line in self.browser.get_log("performance"))
        sent = (line["message"] for line in lines)
        return [
            message["params"]["request"]["url"]
            for message in sent
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Every warning and error on the console since this was asked last."""
        return [line["message"] for line in self.browser.get_log("browser")]

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

    def look(self, *, settle_s: float = 2.0, whole: bool = False) -> Image.Image:
        """What the window shows once what moves has come to rest.

        Args:
            settle_s: after which it has.
            whole: all of the page, not what fits in the window.
        """
        time.sleep(settle_s)
        asked: dict[str, object] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            asked["clip"] = {**size, "scale": 1}
        found = self.browser.execute_cdp_cmd("Page.captureScreenshot", asked)
        return Image.open(io.BytesIO(base64.b64decode(found["data"])))

    def take(self, name: str, *, settle_s: float = 2.0, whole: bool = False) -> None:
        """Write a picture of that, under its name without an ending."""
        self._write(name, self.look(settle_s=settle_s, whole=whole))

    def printed(self) -> bytes:
        """The page as a PDF of A4 sheets, as the browser prints it."""
        asked = {"preferCSSPageSize": True, "printBackground": False}
        return base64.b64decode(self.browser.execute_cdp_cmd("Page.printToPDF", asked)["data"])

    def take_print(self, name: str) -> None:
        """Write a picture of the printed sheets."""
        document = PdfDocument(self.printed())
        self.write_beside(name, [p.render(scale=_PRINT_SCALE).to_pil() for p in document])
        document.close()

    def write_beside(self, name: str, pictures: Sequence[Image.Image]) -> None:
        """Several pictures as one, side by side."""
        width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
        joined = Image.new("RGB", (width, max(picture.height for picture in pictures)), _BETWEEN)
        left = 0
        for picture in pictures:
            joined.paste(picture, (left, 0))
            left += picture.width + _GAP
        self._write(name, joined)

    def _write(self, name: str, picture: Image.Image) -> None:
        """With few colours, to be small."""
        path = self.images / f"{name}.png"
        _with_few_colours(picture.convert("RGB")).save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}.")
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")


@contextmanager
def camera(images: Path) -> Iterator[Camera]:
    """A browser with a profile of its own, closed at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        for option in (*_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        browser = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            yield Camera(browser, images)
        finally:
            browser.quit()


def _with_few_colours(picture: Image.Image) -> Image.Image:
    """The colours of areas as they are, and of the rest those that come nearest to it."""
    most_pixels = picture.width * picture.height
    found = picture.getcolors(most_pixels) or []
    areas = [colour for _, colour in sorted(found, reverse=True)[: _COLOURS // 2]]
    rest = picture.quantize(_COLOURS // 2, method=Image.Quantize.MAXCOVERAGE)
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(part for colour in areas for part in colour), *rest.getpalette()])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)
