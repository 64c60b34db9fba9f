"""The site of docs/ is built without a warning, and its pages fit a desk's screen and a phone's."""

import html
import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.entry.docs.pages import PAGES, ROOT
from tests.launching import Job

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("site")]

LOOK = """
<script>
addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  const name = element => element.tagName + " " + element.textContent.trim().slice(0, 40);
  const wide = [...document.querySelectorAll("article table, article pre")].filter(
    each => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== "auto");
  const blocks = [...document.querySelectorAll("article section > *")].filter(each => box(each).height);
  const over = blocks.filter(each => each.nextElementSibling && box(each.nextElementSibling).height
    && box(each.nextElementSibling).top < box(each).bottom - 1);
  const seen = {width: innerWidth, page: document.documentElement.scrollWidth, blocks: blocks.length,
    wide: wide.map(name), over: over.map(name)};
  parent.postMessage(JSON.stringify(seen), "*");
});
</script></body>
"""
"""Tells the frame around a page what does not fit: what is wider than it and cannot be scrolled, and what overlaps."""
FRAME = """
<script>addEventListener("message", message => document.title = "SEEN" + message.data + "END")</script>
<iframe src="PAGE" width="WIDTH" height="2000" style="border: 0"></iframe>
"""
"""A window is at least 500 pixels wide."""


# 40 s: the reference imports TensorFlow.
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", "-c", "docs", ".", str(folder)]
    overlay = ["launch/lib/overlay.sh", "docs", "-r", "launch/requirements-docs.txt", "--"]
    Job([*overlay, sys.executable, *words], cwd=ROOT, VIRTUAL_ENV=sys.prefix).expect(timeout=400)
    return folder


def test_every_page_is_there_and_reachable(site):
    front = (site / "README.html").read_text(encoding="utf-8")
    for page in PAGES:
        if page != "README.md":
            target = page.replace(".md", ".html")
            assert (site / target).exists()
            assert f'href="{target}"' in front, page


def test_every_public_name_has_an_entry_in_the_reference(site):
    import hvdtrain

    text = (site / "docs/reference.html").read_text(encoding="utf-8")
    assert [name for name in hvdtrain.__all__ if f'id="hvdtrain.{name}"' not in text] == []


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
@pytest.mark.parametrize("page", ["README", "docs/options", "docs/reference"])
def test_a_page_fits_the_screen(site, page, width):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed")
    looked = site / f"{page}-{width}.html"
    looked.write_text((site / f"{page}.html").read_text(encoding="utf-8").replace("</body>", LOOK), encoding="utf-8")
    frame = looked.with_suffix(".frame.html")
    frame.write_text(FRAME.replace("PAGE", looked.name).replace("WIDTH", str(width)), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,2100", "--dump-dom"]
    dumped = subprocess.run([*command, f"file://{frame}"], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(html.unescape(re.search(r"<title>SEEN(.*)END</title>", dumped.stdout)[1]))
    assert seen["blocks"] > 20
    assert seen["width"] == width
    assert seen["page"] <= width
    assert seen["wide"] == seen["over"] == []
