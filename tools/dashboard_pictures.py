"""Make the pictures of docs/observing.md in docs/img: one for each view of a dashboard page with a simulation.

STEPS.html is the page for the first view, REST.html for the other views.
Usage: python -m tools.dashboard_pictures STEPS.html REST.html; needs playwright and Chromium (extra `browser`).
"""

import os
import shutil
import sys
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
# View, theme, which file, place in it (share of its time), seconds that are shown (0: all), size.
SHOTS = (
    ("steps", "light", 0, 0.5, 1.2, (1120, 760)),
    ("pool", "dark", 1, 0.45, 6.0, (1120, 680)),
    ("queue", "light", 1, 0.45, 6.0, (1120, 680)),
    ("lanes", "light", 1, 0.42, 60.0, (1120, 680)),
    ("plots", "dark", 1, 1.0, 0.0, (1140, 570)),
)
PLACE = """([share, span]) => {
  if (span) octavo.span = span; else octavo.fit();
  octavo.moveTo(octavo.store.begin + (octavo.store.end - octavo.store.begin) * share);
}"""


def main(pages: list[Path]) -> int:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for view, theme, number, share, span, (width, height) in SHOTS:
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            tab.goto(pages[number].resolve().as_uri() + f"#{view}")
            while tab.evaluate("octavo.mode") != "paused":
                tab.wait_for_timeout(200)
            tab.evaluate(PLACE, [share, span])
            tab.wait_for_timeout(800)
            tab.evaluate("(box => box.scrollTop = box.scrollHeight * 0.4)(document.getElementById('lanes-scroller'))")
            tab.wait_for_timeout(200)
            tab.screenshot(path=IMAGES / f"dashboard-{view}-{theme}.png")
            tab.close()
        browser.close()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
