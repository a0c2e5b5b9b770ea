"""The built book in a real Chromium: offline, typeset, free of console errors, and readable on a phone."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed; make test installs it"
)
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
CHROMIUM = next(
    (
        p
        for n in ("chromium", "chromium-browser", "google-chrome")
        if (p := shutil.which(n))
    ),
    None,
)
DRIVER = shutil.which("chromedriver")
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium with its driver: apt install chromium chromium-driver",
    ),
    pytest.mark.skipif(
        not (HTML / "index.html").exists(), reason="the book is not built: make book"
    ),
]


def pages() -> list[str]:
    """Every page the table of contents lists, and those of the reference, as a path under the built book."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    chapters = [
        chapter["file"] for part in toc["parts"] for chapter in part["chapters"]
    ]
    generated = [
        f"reference/{page.stem}" for page in sorted((HTML / "reference").glob("*.html"))
    ]
    return [f"{name}.html" for name in [toc["root"], *chapters, *generated]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with an empty profile that logs its console and its requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The built book served on the loopback address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=HTML)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def open_page(browser: webdriver.Chrome, url: str) -> None:
    """Load a page, empty the logs of the page before, and wait until MathJax has finished."""
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(url)
    # Asked anew of whatever document is there: a page may lead on to another meanwhile.
    done = """const typeset = window.MathJax?.startup?.promise;
              if (!typeset) return document.readyState === 'complete';
              if (window.pclTypeset === undefined) {
                  window.pclTypeset = false;
                  typeset.then(() => { window.pclTypeset = true; });
              }
              return window.pclTypeset;"""
    WebDriverWait(browser, 300).until(lambda b: b.execute_script(done))


# Done when the article has kept its width for a fifth of a second.
SETTLED = """const done = arguments[arguments.length - 1];
    const article = document.querySelector('article');
    let width = -1, since = 0;
    const look = now => {
        if (article.clientWidth !== width) { width = article.clientWidth; since = now; }
        if (now - since > 200) done(); else requestAnimationFrame(look);
    };
    requestAnimationFrame(look)"""


def read_page(page: str) -> str:
    """The text of a built page."""
    return (HTML / page).read_text(encoding="utf-8")


def requests(browser: webdriver.Chrome) -> list[str]:
    """The addresses the page asked for, data and blob URLs left out."""
    events = (
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    )
    urls = [
        e["params"]["request"]["url"]
        for e in events
        if e["method"] == "Network.requestWillBeSent"
    ]
    return [
        u for u in urls if urlsplit(u).scheme not in ("data", "blob", "about", "chrome")
    ]


def console_errors(browser: webdriver.Chrome) -> list[str]:
    """What the page's console calls an error."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE"
    ]


@pytest.mark.parametrize("page", pages())
def test_page_from_disk_asks_nobody_and_complains_of_nothing(
    browser: webdriver.Chrome, page: str
) -> None:
    open_page(browser, (HTML / page).as_uri())
    foreign = [u for u in requests(browser) if not u.startswith(HTML.as_uri())]
    assert foreign == []
    assert console_errors(browser) == []


# Folded code is measured as well, so it is opened first.
CUT_OFF = """document.querySelectorAll('article details').forEach(d => { d.open = true; });
    return [...document.querySelectorAll('article div.highlight pre, article .cell_output pre')]
    .filter(p => p.scrollWidth > p.clientWidth + 1).map(p => p.textContent.slice(0, 200))"""
# Lines of a table whose last cell, the verdict, is not on the screen. Folded ones are
# measured as well.
OPENED = "document.querySelectorAll('article details.pcl-fold').forEach(d => { d.open = true; });"
UNSEEN = (
    f"{OPENED} return ["
    + """...document.querySelectorAll('table.pcl-cards tbody tr')].filter(row => {
    const box = row.lastElementChild.getBoundingClientRect();
    return box.width === 0 || box.left < 0 || box.right > innerWidth; }).map(r => r.textContent.slice(0, 200))"""
)
# Tables that do not fit on a desk.
TOO_WIDE = """const room = document.querySelector('article').clientWidth + 1;
    return [...document.querySelectorAll('article table')].filter(t => t.offsetWidth > room)
    .map(t => t.textContent.slice(0, 200))"""
# Formulas that do not either.
TOO_LONG = """return [...document.querySelectorAll('article div.math mjx-container')]
    .filter(f => f.clientWidth && f.scrollWidth > f.clientWidth + 1)
    .map(f => f.closest('div.math').id)"""
# Formulas within a line that end beyond their paragraph, and do not scroll.
CUT_FORMULAS = """return [...document.querySelectorAll('article mjx-container:not([display], .pcl-wide)')]
    .filter(f => {
        if (!f.checkVisibility() || !f.querySelector('svg')) return false;
        let box = f.parentElement;
        while (getComputedStyle(box).display.startsWith('inline')) box = box.parentElement;
        return f.querySelector('svg').getBoundingClientRect().right > box.getBoundingClientRect().right + 1;
    }).map(f => f.parentElement.textContent)"""
# What scrolls sideways and cannot be reached from the keyboard.
UNREACHED = """return [...document.querySelectorAll('article *')].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !e.closest('[tabindex]')
    && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && !e.querySelector('a, button, input, select, [tabindex]'))
    .map(e => e.outerHTML.slice(0, 200))"""
DESK = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}


@pytest.mark.parametrize("page", pages())
def test_page_served_is_typeset_described_and_fits_a_phone(
    browser: webdriver.Chrome, site: str, page: str
) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        open_page(browser, f"{site}/{page}")
        assert [u for u in requests(browser) if not u.startswith(site)] == []
        assert console_errors(browser) == []
        untypeset = """return [...document.querySelectorAll('.math')].filter(m => !m.querySelector('mjx-container'))
                        .map(m => m.textContent)"""
        assert browser.execute_script(untypeset) == []
        assert (
            browser.execute_script(
                "return document.querySelectorAll('mjx-merror, [data-mjx-error]').length"
            )
            == 0
        )
        # Raw TeX in running text (code may contain it): delimiters or environments that the parser did not take.
        raw = r"""const a = document.querySelector('article').cloneNode(true);
                  a.querySelectorAll('pre, code, .math, mjx-container, script, style').forEach(e => e.remove());
                  return (a.textContent.match(
                      /\$[^$\n]{1,80}\$|\\\(|\\(?:begin|frac|hat|kappa|math[a-z]+|mu)\b|\{eq\}|\{prf:|\{cite\}|#\|/g) || [])"""
        assert browser.execute_script(raw) == []
        width = browser.execute_script("return document.documentElement.scrollWidth")
        wide = """return [...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > 391)
                  .slice(0, 5).map(e => e.tagName + '.' + e.className)"""
        assert width <= PHONE["width"], browser.execute_script(wide)
        nameless = r"""return [...document.querySelectorAll('article img')].map(i => [i.alt, i.src])
                       .filter(([alt]) => !alt.trim() || alt.includes('/'))"""  # without one, Sphinx puts the file's path there
        assert browser.execute_script(nameless) == []
        assert browser.execute_script(UNSEEN) == []
        assert browser.execute_script(UNREACHED) == []
        assert browser.execute_script(CUT_FORMULAS) == []
        assert browser.execute_script(CUT_OFF) == []
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", DESK)
        browser.execute_async_script(SETTLED)
        assert browser.execute_script(CUT_OFF) == []
        assert browser.execute_script(TOO_WIDE) == []
        assert browser.execute_script(TOO_LONG) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


AXE = "axe-core@4.10.3"
# What MathJax draws has its own words for screen readers; the colours of code are the
# theme's, and the same on every page: a test below looks at those of one page.
SERIOUS = """const done = arguments[arguments.length - 1];
    axe.run({include: arguments[0], exclude: [['mjx-container'], ['pre']]},
            {resultTypes: ['violations'], ...arguments[1]}).then(found => done(
        found.violations.filter(v => ['serious', 'critical'].includes(v.impact))
        .map(v => [v.id, v.nodes.length, v.nodes[0].html.slice(0, 300)])))"""
STRUCTURE = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa"]},
    "rules": {"color-contrast": {"enabled": False}},
}
CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
# Contrast takes long, and depends on colours and type alone: marks one text of every kind
# that was not met before.
NEW_KINDS = """const met = window.pclMet ??= new Set();
    document.querySelectorAll('[data-look]').forEach(e => { delete e.dataset.look; });
    const speaks = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    let count = 0;
    for (const e of document.querySelectorAll('article *')) {
        if (!speaks(e) || e.closest('pre, mjx-container, .math, script, style')
            || !e.checkVisibility()) continue;
        const style = getComputedStyle(e);
        const kind = [style.color, style.fontSize, style.fontWeight, style.opacity];
        for (let at = e; at !== document.body; at = at.parentElement)
            kind.push(getComputedStyle(at).backgroundColor);
        const key = kind.filter(k => k !== 'rgba(0, 0, 0, 0)').join();
        if (!met.has(key)) { met.add(key); e.dataset.look = ''; count++; }
    }
    return count"""
# A page with nothing but its article, into which others are put.
ALONE = """let kept = document.querySelector('article');
    for (; kept !== document.body; kept = kept.parentElement)
        [...kept.parentElement.children].filter(e => e !== kept).forEach(e => e.remove())"""
ARTICLE = re.compile(r"<article\b[^>]*>(.*?)</article>", re.DOTALL)
MOVES = re.compile(r'class="pcl-(?:touch|sphere)"')
NOT_READ = re.compile(r"(?<=<pre>).*?(?=</pre>)|<script\b.*?</script>", re.DOTALL)


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, from npm."""
    folder = HTML.parent / "npm"
    source = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not source.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"no npm to install {AXE} with: apt install npm")
        words = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        done = subprocess.run([*words, AXE], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm could not install {AXE}: {done.stderr[-200:]}")
    return source.read_text(encoding="utf-8")


def themed(browser: webdriver.Chrome, theme: str) -> None:
    """Show the page as a reader with that preference sees it."""
    script = "document.documentElement.dataset.theme = arguments[0]"
    browser.execute_script(script, theme)


def violations(browser: webdriver.Chrome) -> list[object]:
    """What axe calls serious in the article that is shown, in both modes."""
    themed(browser, "light")
    found = browser.execute_async_script(SERIOUS, [["article"]], STRUCTURE)
    for theme in ("light", "dark"):
        themed(browser, theme)
        if browser.execute_script(NEW_KINDS):
            looked = browser.execute_async_script(SERIOUS, [["[data-look]"]], CONTRAST)
            found += [[theme, *one] for one in looked]
    return found


@pytest.fixture
def sheet(browser: webdriver.Chrome, axe: str) -> Callable[[str], list[object]]:
    """Puts what an article says on a page of the book, and says what is wrong with it."""
    browser.set_script_timeout(600)
    browser.get((HTML / "nbs" / "intro.html").as_uri())
    browser.execute_script(axe)
    browser.execute_script(ALONE)

    def look(words: str) -> list[object]:
        said = "document.querySelector('article').innerHTML = arguments[0]"
        browser.execute_script(said, words)
        return violations(browser)

    return look


def test_no_page_has_a_serious_violation_of_accessibility_in_either_mode(
    sheet: Callable[[str], list[object]],
) -> None:
    found = {}
    for page in pages():
        article = ARTICLE.search((HTML / page).read_text(encoding="utf-8"))
        assert article is not None, page
        words = NOT_READ.sub("", article[1])
        if wrong := sheet(words.replace('class="pcl-fold"', 'class="pcl-fold" open')):
            found[page] = wrong
    assert found == {}


def test_a_violation_is_seen(sheet: Callable[[str], list[object]]) -> None:
    planted = (
        '<h1>A page</h1><img src="a.svg"><a href="#"></a>'
        '<p style="color: #ddd; background: #fff">pale</p>'
        '<p style="color: #333; background: var(--pst-color-background)">dim</p>'
    )
    found = json.dumps(sheet(planted))
    for rule in ("image-alt", "link-name", "light", "pale", "dark", "dim"):
        assert rule in found
    assert sheet("<h1>A page</h1><p>With a sentence.</p>") == []


# Where scripts draw, and once around the article.
@pytest.mark.parametrize(
    "page", [p for p in pages() if MOVES.search((HTML / p).read_text(encoding="utf-8"))]
)
def test_what_scripts_draw_has_no_serious_violation(
    browser: webdriver.Chrome, axe: str, page: str
) -> None:
    browser.set_script_timeout(600)
    browser.get((HTML / page).as_uri())
    browser.execute_script(axe)
    assert violations(browser) == []


CODE = """const done = arguments[arguments.length - 1];
    axe.run({include: [['article pre']]}, {resultTypes: ['violations', 'passes'], ...arguments[0]})
    .then(found => done(['violations', 'passes'].map(kind => found[kind].flatMap(v => v.nodes).length)))"""


def test_code_can_be_read_in_both_modes(browser: webdriver.Chrome, axe: str) -> None:
    browser.set_script_timeout(600)
    browser.get((HTML / "nbs" / "260_losses.html").as_uri())
    browser.execute_script(axe)
    for theme in ("light", "dark"):
        themed(browser, theme)
        wrong, right = browser.execute_async_script(CODE, CONTRAST)
        assert wrong == 0 and right > 50, theme
    pale = """const shown = [...document.querySelectorAll('article pre span[class]')];
        shown.find(e => e.checkVisibility()).style.color = '#333'"""
    browser.execute_script(pale)  # still dark
    assert browser.execute_async_script(CODE, CONTRAST)[0] == 1


def test_the_frame_of_a_page_has_no_serious_violation(
    browser: webdriver.Chrome, axe: str
) -> None:
    browser.set_script_timeout(600)
    browser.get((HTML / "nbs" / "glossary.html").as_uri())
    browser.execute_script(axe)
    assert browser.execute_async_script(SERIOUS, [["body"]], STRUCTURE) == []
    for theme in ("light", "dark"):
        themed(browser, theme)
        assert browser.execute_async_script(SERIOUS, [["body"]], CONTRAST) == [], theme


def test_figures_are_numbered_and_have_a_dark_version() -> None:
    for page in pages():
        text = (HTML / page).read_text(encoding="utf-8")
        shown = text.count('class="pcl-figure')
        numbered = text.count('<span class="caption-number">Figure ')
        assert numbered >= shown, page
        assert "<em>Figure.</em>" not in text, f"{page} has a caption without number"
    drawn = {p.stem for p in (HTML / "_images").glob("*.svg")}
    light = {stem for stem in drawn if not stem.endswith("-dark")}
    assert light and {f"{stem}-dark" for stem in light} <= drawn


def test_every_page_with_its_pictures_is_under_two_megabytes() -> None:
    for page in pages():
        path = HTML / page
        text = path.read_text(encoding="utf-8")
        own = set(re.findall(r'src="([^"]*_images/[^"]+)"', text))
        sizes = [p.stat().st_size for p in (path, *(path.parent / o for o in own))]
        assert sum(sizes) < 2e6, page


def test_a_dark_page_shows_drawings_without_a_card(browser: webdriver.Chrome) -> None:
    browser.get((HTML / "nbs" / "020_what_holds.html").as_uri())
    themed(browser, "dark")
    shown = """return [...document.querySelectorAll('article img')].filter(i => i.offsetParent)
        .map(i => [i.getAttribute('src'), getComputedStyle(i).backgroundColor])"""
    found = browser.execute_script(shown)
    assert found and all(src.endswith("-dark.svg") for src, _ in found)
    assert {colour for _, colour in found} == {"rgba(0, 0, 0, 0)"}


def test_every_figure_leads_to_its_cell_and_to_its_records() -> None:
    targets = set(re.findall(r'id="(records[\w-]*)"', read_page("nbs/records.html")))
    links = 0
    for page in pages():
        text = read_page(page)
        captions = re.findall(
            r'<figure class="[^"]*pcl-figure.*?</figure>', text, re.DOTALL
        )
        for caption in captions:
            assert "#code-of-figure-" in caption, f"{page}: {caption[-300:]}"
            found = re.findall(r'href="records\.html#([\w-]+)"', caption)
            assert set(found) <= targets, page
            links += len(found)
    assert links > 50


def smallest_type(drawing: str) -> tuple[float, float]:
    """Width of a drawing and of its smallest type, in the same units; matplotlib draws
    letters as paths of a hundred units, scaled."""
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', drawing)[1])
    sizes = re.findall(r"scale\(([\d.]+) -[\d.]+\)", drawing)
    return width, 100 * min(map(float, sizes), default=1.0)


def test_type_is_nine_pixels_or_more_on_a_phone() -> None:
    room = 358  # of a phone of 390, as the test below measures
    small = []
    for page in pages():
        text = read_page(page)
        for cell in re.findall(
            r'<div class="cell_output.*?</div>\s*</div>', text, re.S
        ):
            drawn = re.findall(r'src="\.\./(_images/[^"]+(?<!-dark)\.svg)"', cell)
            layouts = re.findall(r'srcset="\.\./(_images/[^"]+-phone\.svg)"', cell)
            assert len(layouts) == len(drawn), f"{page}: a figure without a layout"
            for name in layouts:
                width, least = smallest_type((HTML / name).read_text("utf-8"))
                # Points are four thirds of a pixel, and what is too wide is scaled.
                pixels = least * min(4 / 3, room / width)
                if pixels < 9:
                    small.append((page, name, round(pixels, 1)))
    assert small == []


def test_a_phone_shows_the_narrow_layout(browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        open_page(browser, (HTML / "nbs" / "930_plots.html").as_uri())
        shown = """const image = document.querySelector('.cell_output .pcl-light img');
            image.loading = 'eager';
            await image.decode();
            const box = image.getBoundingClientRect();
            return [image.currentSrc, box.left, box.right, box.width,
                    image.closest('.cell_output').clientWidth];"""
        source, left, right, width, room = browser.execute_script(shown)
        assert source.endswith("-phone.svg") and left >= 0 and right <= PHONE["width"]
        assert room >= 358 and width <= room
        types_of = """return [...document.querySelectorAll('.pcl-touch svg text')].map(text => {
            const svg = text.closest('svg');
            return parseFloat(getComputedStyle(text).fontSize)
                * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; })"""
        for page in ("240_mixtures", "345_samples", "370_scale"):
            open_page(browser, (HTML / "nbs" / f"{page}.html").as_uri())
            types = browser.execute_script(types_of)
            assert types and min(types) >= 9, page
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("page", ["230_identifiability", "240_mixtures"])
def test_a_phone_shows_formulas_whole_and_their_numbers_below(
    browser: webdriver.Chrome, page: str
) -> None:
    measured = """return [...document.querySelectorAll('article mjx-container')]
        .filter(f => f.checkVisibility() && f.querySelector('svg')).map(f => {
            const drawn = f.querySelector('svg').getBoundingClientRect();
            return [drawn.width - f.clientWidth, parseFloat(getComputedStyle(f).fontSize)]; })"""
    below = """return [...document.querySelectorAll('article div.math > .eqno')].every(n =>
        n.getBoundingClientRect().top >=
        n.parentElement.querySelector('svg').getBoundingClientRect().bottom)"""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        open_page(browser, (HTML / "nbs" / f"{page}.html").as_uri())
        usual = "return parseFloat(getComputedStyle(document.querySelector('article p')).fontSize)"
        least = browser.execute_script(usual) * 2 / 3
        WebDriverWait(browser, 300).until(
            lambda b: any(size < least + 1 for _, size in b.execute_script(measured))
        )
        cut = [size for over, size in browser.execute_script(measured) if over > 1]
        assert all(size < least + 0.1 for size in cut), "smaller type would do"
        assert len(cut) <= 3
        assert browser.execute_script(below)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_printed_columns_stay_columns_on_a_phone_and_other_lines_hang(
    browser: webdriver.Chrome,
) -> None:
    add = """const box = document.createElement('div');
        box.className = 'cell_output';
        box.innerHTML = '<div class="highlight"><pre></pre></div>';
        const pre = box.querySelector('pre');
        pre.textContent = ('a row'.padEnd(arguments[0]) + '0.1\\n').repeat(3);
        document.querySelector('article').append(box);
        dispatchEvent(new Event('resize'));
        const style = getComputedStyle(pre);
        const height = pre.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
        return [parseFloat(style.fontSize), Math.round(height / parseFloat(style.lineHeight))];"""
    hangs = """return [...document.querySelectorAll('.cell_output .pcl-line')].every(line =>
        parseFloat(getComputedStyle(line).textIndent) < -10)"""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        open_page(browser, (HTML / "nbs" / "640_url.html").as_uri())
        usual, _ = browser.execute_script(add, 20)
        size, rows = browser.execute_script(add, 55)
        assert 9 <= size < usual and rows == 3
        size, rows = browser.execute_script(add, 90)
        assert size == usual and rows == 6
        assert browser.execute_script(hangs)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_training_on_the_circle_plays_and_pauses(browser: webdriver.Chrome) -> None:
    open_page(browser, (HTML / "nbs" / "340_recovery.html").as_uri())
    figure = browser.find_element(By.CSS_SELECTOR, '.pcl-touch[data-kind="circle"]')
    slider = figure.find_element(By.CSS_SELECTOR, "input[type=range]")
    button = figure.find_element(By.CSS_SELECTOR, "button")

    def place() -> int:
        return int(slider.get_property("value"))

    last = place()
    assert last == int(slider.get_attribute("max"))  # at first the end is shown
    button.send_keys(Keys.ENTER)
    WebDriverWait(browser, 300).until(lambda b: 0 < place() < last)
    assert button.text == "Pause"
    button.send_keys(Keys.ENTER)
    paused = place()
    assert button.text == "Play" and 0 < paused <= last
    slider.send_keys(Keys.HOME)
    told = figure.find_element(By.CSS_SELECTOR, ".pcl-told").text
    assert place() == 0 and "step 0:" in told
    assert len(figure.find_elements(By.CSS_SELECTOR, "svg")) == 2


def test_anchors_rule_the_other_world_out(browser: webdriver.Chrome) -> None:
    open_page(browser, (HTML / "nbs" / "240_mixtures.html").as_uri())
    figure = browser.find_element(By.CSS_SELECTOR, '.pcl-touch[data-kind="anchors"]')
    count = figure.find_element(By.CSS_SELECTOR, "input[type=range]")

    def told() -> str:
        return figure.find_element(By.CSS_SELECTOR, ".pcl-told").text

    count.send_keys(Keys.HOME)
    assert "Without anchors" in told()
    count.send_keys(Keys.ARROW_RIGHT)
    assert "nothing rules it out" in told()
    count.send_keys(Keys.ARROW_RIGHT * 3)
    assert "it is ruled out" in told()


@pytest.mark.parametrize(
    "page",
    [
        *("nbs/240_mixtures.html", "nbs/340_recovery.html", "nbs/345_samples.html"),
        *("nbs/370_scale.html", "nbs/430_retrieval.html"),
    ],
)
def test_a_figure_that_moves_answers_the_arrow_keys(
    browser: webdriver.Chrome, page: str
) -> None:
    open_page(browser, (HTML / page).as_uri())
    told = "return document.querySelector('.pcl-told').textContent"
    before = browser.execute_script(told)
    slider = browser.find_element(By.CSS_SELECTOR, ".pcl-touch input[type=range]")
    slider.send_keys(Keys.ARROW_LEFT * 2)
    assert browser.execute_script(told) != before
    assert not browser.find_elements(By.CSS_SELECTOR, ".pcl-still")


def test_the_scoreboard_can_be_filtered(browser: webdriver.Chrome) -> None:
    open_page(browser, (HTML / "nbs" / "810_scoreboard.html").as_uri())
    told = "return parseInt(document.querySelector('.pcl-told').textContent)"
    everything = browser.execute_script(told)
    for number in range(4):
        select = browser.find_elements(By.CSS_SELECTOR, ".pcl-filters select")[number]
        select.send_keys(Keys.ARROW_DOWN)
        assert 0 < browser.execute_script(told) < everything
        select.send_keys(Keys.ARROW_UP)
        assert browser.execute_script(told) == everything


def test_the_parts_of_the_scoreboard_are_folded_and_open_by_key_and_by_link(
    browser: webdriver.Chrome,
) -> None:
    url = (HTML / "nbs" / "810_scoreboard.html").as_uri()
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", DESK)
    try:
        open_page(browser, url)
        height = "return document.documentElement.scrollHeight"
        assert browser.execute_script(height) < 16_000
        folds = browser.find_elements(By.CSS_SELECTOR, "details.pcl-fold")
        assert len(folds) > 30 and not any(f.get_property("open") for f in folds)
        line = folds[0].find_element(By.TAG_NAME, "summary")
        assert line.find_element(By.TAG_NAME, "h4").text and ":" in line.text
        line.send_keys(Keys.ENTER)
        assert folds[0].get_property("open")
        assert folds[0].find_element(By.TAG_NAME, "table").is_displayed()
        browser.execute_script("location.hash = '#table1'")
        linked = browser.find_element(By.ID, "table1")
        WebDriverWait(browser, 60).until(lambda b: linked.get_property("open"))
        open_page(browser, f"{url}#table2")  # from elsewhere
        linked = browser.find_element(By.ID, "table2")
        WebDriverWait(browser, 60).until(lambda b: linked.get_property("open"))
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        folds = browser.find_elements(By.CSS_SELECTOR, "details.pcl-fold")
        assert all(f.get_property("open") for f in folds)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_term_and_a_citation_show_on_focus(browser: webdriver.Chrome) -> None:
    open_page(browser, (HTML / "nbs" / "intro.html").as_uri())
    for target in ("glossary", "bibliography"):
        link = f'article a[href*="{target}.html#"][data-tip]'
        browser.execute_script(f"document.querySelector('{link}').focus()")
        tip = browser.find_element(By.CSS_SELECTOR, ".pcl-tip[role=tooltip]")
        assert len(tip.text) > 20


def test_search_for_results_finds_what_holds(
    browser: webdriver.Chrome, site: str
) -> None:
    open_page(browser, f"{site}/search.html?q=results")
    WebDriverWait(browser, 300).until(
        lambda b: b.find_elements(
            By.CSS_SELECTOR, "#search-results li a[href*='020_what_holds']"
        )
    )


def test_the_book_opens_at_its_root_page(browser: webdriver.Chrome) -> None:
    open_page(browser, (HTML / "index.html").as_uri())
    root_page = (HTML / "nbs" / "intro.html").as_uri()
    WebDriverWait(browser, 300).until(lambda b: b.current_url == root_page)
    foreign = [u for u in requests(browser) if not u.startswith(HTML.as_uri())]
    assert foreign == [] and console_errors(browser) == []


def test_chapters_carry_the_number_of_their_file(browser: webdriver.Chrome) -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    parts = [part for part in toc["parts"] if part.get("numbered", True)]
    files = [chapter["file"] for part in parts for chapter in part["chapters"]]
    numbers = [f"{int(Path(name).name[:3])}." for name in files]
    open_page(browser, (HTML / "nbs" / "260_losses.html").as_uri())
    links = browser.find_elements(By.CSS_SELECTOR, "nav.bd-links a.reference")
    shown = [link.get_attribute("textContent").split()[0] for link in links]
    assert [word for word in shown if word.rstrip(".").isdigit()] == numbers
    for tag, start in (("h1", "260. "), ("h2", "260.1. ")):
        heading = browser.find_element(By.CSS_SELECTOR, f"article {tag}")
        assert heading.text.startswith(start)


def test_no_directive_shows_on_any_page() -> None:
    for page in pages():
        assert "#| " not in (HTML / page).read_text(), page


@pytest.mark.parametrize(
    "page",
    [p for p in pages() if (HTML.parent.parent / p).with_suffix(".ipynb").exists()],
)
def test_chapter_offers_its_notebook_and_names_its_switch(
    browser: webdriver.Chrome, page: str
) -> None:
    open_page(browser, (HTML / page).as_uri())
    link = browser.find_element(By.CSS_SELECTOR, ".pcl-run a.download")
    target = Path(urlsplit(link.get_attribute("href")).path.replace("%20", " "))
    assert json.loads(target.read_text())["nbformat"] == 4
    note = browser.find_element(By.CSS_SELECTOR, ".pcl-run").text
    assert ("PCL_RERUN" in note) == ("results_of(" in target.read_text()), (
        "the switch is named where it does something"
    )


def test_search_finds_the_loss_chapter(browser: webdriver.Chrome, site: str) -> None:
    open_page(browser, f"{site}/search.html?q=MCInfoNCE")
    WebDriverWait(browser, 300).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    found = [
        a.get_attribute("href")
        for a in browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    ]
    assert any("260_losses" in href for href in found), found


@pytest.mark.parametrize("page", ["nbs/120_vmf.html", "nbs/930_plots.html"])
def test_slider_moves_the_sphere_by_keyboard_and_by_mouse(
    browser: webdriver.Chrome, page: str
) -> None:
    open_page(browser, (HTML / page).as_uri())
    slider = browser.find_element(By.CSS_SELECTOR, ".pcl-sphere input[type=range]")
    state = """const f = document.querySelector('.pcl-sphere');
               return [f.querySelector('output').textContent, f.querySelector('canvas').toDataURL()]"""
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", slider
    )
    before = browser.execute_script(state)
    slider.send_keys(Keys.ARROW_LEFT * 5)
    by_key = browser.execute_script(state)
    webdriver.ActionChains(browser).click_and_hold(slider).move_by_offset(
        -60, 0
    ).release().perform()
    by_mouse = browser.execute_script(state)
    assert float(by_key[0]) < float(before[0])
    assert len({picture for _, picture in (before, by_key, by_mouse)}) == 3
