"""One PDF of the built book: `make pdf`.

Chromium prints the pages one after the other, with `print.css` and page numbers that run
on. They are put behind a title page and a table of contents, with an outline, and a link
from one page to another leads there inside the PDF.

Not by way of LaTeX: the tables and the figures of the chapters are HTML and SVG.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from pypdf import PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from pypdf.generic import ArrayObject, Fit, FloatObject, NameObject, NullObject
from selenium import webdriver

TOP = 842.0  # points: the upper edge of A4
WIDTH = 642  # pixels of a line of print: A4 without its margins
READY = """const done = arguments[arguments.length - 1];
    document.querySelectorAll('img').forEach(i => { i.loading = 'eager'; });
    const shown = [...document.querySelectorAll('article .pcl-light img')];
    Promise.resolve(window.MathJax?.startup?.promise)
    .then(() => Promise.all(shown.map(i => i.decode())))
    .then(() => done(''), error => done(String(error)))"""
# Only the article stays. Of folded code one line stays, and nothing where it draws a figure;
# solutions open. Tables shrink until they fit. A hidden link to an anchor makes Chromium say
# where on paper the anchor is.
ONLY_ARTICLE = """const [styles, part, before] = arguments;
    const make = (tag, name, text) => Object.assign(
        document.createElement(tag), {className: name, textContent: text});
    const heading = h => h.innerText.replace(/#$/, '').trim();
    const article = document.querySelector('article');
    const title = heading(article.querySelector('h1'));
    const sections = [...article.querySelectorAll('section > h2')].map(
        h => [heading(h), h.parentElement.id]);
    for (const fold of article.querySelectorAll('details')) {
        const line = fold.querySelector('summary').innerText.split('\\n')[0].trim();
        const inside = [...fold.children].filter(child => child.tagName !== 'SUMMARY');
        const code = fold.classList.contains('above-input') && !line.startsWith('Solution');
        const drawn = code && ['Code of this figure', 'Imports'].includes(line);
        const named = fold.querySelector("summary > h4"); // of a long page: a heading
        if (named) {
            named.id = fold.id;
            fold.replaceWith(named, ...inside);
            continue;
        }
        fold.replaceWith(...(drawn ? [] : [make('p', 'pcl-named', line)]),
                         ...(code ? [] : inside));
    }
    for (const mark of article.querySelectorAll('td p')) {  // few fonts for paper have it
        if (mark.textContent === '✅') mark.textContent = 'ran';
    }
    if (location.pathname.includes('/reference/')) article.classList.add('pcl-reference');
    if (part) article.prepend(make('p', 'pcl-part', part));
    const anchors = document.createElement('div');
    anchors.hidden = true;
    for (const target of article.querySelectorAll('[id]:not([id^=MJX])')) {
        anchors.append(Object.assign(document.createElement('a'), {href: '#' + target.id}));
    }
    article.append(anchors);
    document.body.replaceChildren(article);
    document.documentElement.dataset.theme = 'light';
    const running = before === null
        ? '@page { @bottom-center { content: counter(page, lower-roman); } }'
          + '@page :first { @bottom-center { content: none; } }'
        : `html { counter-reset: page ${before}; }`
          + `@page { @top-right { content: ${JSON.stringify(title)}; } }`
          + '@page :first { @top-right { content: none; } }';
    document.head.append(make('style', '', styles + running));
    for (const table of article.querySelectorAll('table')) {
        const wide = table.getBoundingClientRect().width / article.clientWidth;
        if (wide > 1) table.style.zoom = 0.99 / wide;
    }
    return [title, sections]"""
NEW_BODY = "document.querySelector('article').innerHTML = arguments[0]"
FRONT = """<div class="title-page"><h1>{title}</h1><p>{author}</p>
<p>Version {version}, revision {revision}, {year}</p>
<p>Printed from the pages of the book. Code of the library is not printed: a line with its
names says where it stands, and the notebook of the chapter has it. Figures that move are
shown as they start.</p></div>
<h1>Contents</h1><div class="contents">{lines}</div>"""


@dataclass
class Printed:
    """A page of the book as sheets of paper."""

    page: str  # its path under the built book
    part: str  # the caption of its part
    title: str
    sections: list[tuple[str, str]]  # title and anchor of each
    pdf: PdfReader
    first: int  # the number of its first sheet


def pages_of(root: Path, html: Path) -> list[tuple[str, str]]:
    """Part and path of every page of the book, in the order of its table of contents."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    found = [("", f"{toc['root']}.html")]
    for part in toc["parts"]:
        for chapter in part["chapters"]:
            listed = [html / f"{chapter['file']}.html"]
            for section in chapter.get("sections", []):
                listed += sorted(html.glob(f"{section['glob']}.html"))
            found += [(part["caption"], p.relative_to(html).as_posix()) for p in listed]
    return found


def start_browser() -> webdriver.Chrome:
    """A headless Chromium that lays pages out as for paper."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        sys.exit("No Chromium with its driver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_page_load_timeout(300)
    browser.set_script_timeout(300)
    size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    return browser


def print_page(
    browser: webdriver.Chrome,
    address: str,
    part: str = "",  # a line above the title
    before: int | None = None,  # sheets before it; None: Roman numbers
    body: str = "",  # in the place of what the page says
) -> tuple[str, list[tuple[str, str]], PdfReader]:  # title, sections, sheets
    """Print one page."""
    browser.get(address)
    wrong = browser.execute_async_script(READY)
    if wrong:
        raise RuntimeError(f"{address}: {wrong}")
    if body:
        browser.execute_script(NEW_BODY, body)
    styles = Path(__file__).with_name("print.css").read_text(encoding="utf-8")
    title, sections = browser.execute_script(ONLY_ARTICLE, styles, part, before)
    words = {"preferCSSPageSize": True, "printBackground": True}
    words["generateTaggedPDF"] = False  # structure is lost when sheets are put together
    done = browser.execute_cdp_cmd("Page.printToPDF", words)
    return title, sections, PdfReader(io.BytesIO(base64.b64decode(done["data"])))


def print_all(
    browser: webdriver.Chrome, html: Path, pages: list[tuple[str, str]]
) -> list[Printed]:
    """Print every page, numbered from where the one before ended."""
    printed: list[Printed] = []
    last, before = "", 0
    for count, (part, page) in enumerate(pages, 1):
        above = part if part != last else ""
        title, sections, pdf = print_page(
            browser, (html / page).as_uri(), above, before
        )
        printed.append(Printed(page, part, title, sections, pdf, before + 1))
        last, before = part, before + len(pdf.pages)
        print(f"[{count:>3}/{len(pages)}] {page:<40} {len(pdf.pages):>3} sheets")
    return printed


def front_matter(config: dict[str, Any], html: Path, printed: list[Printed]) -> str:
    """The title page and the table of contents."""
    from pcl import __version__
    from pcl.provenance import revision

    lines, last = [], ""
    for item in printed:
        if item.part != last:
            lines.append(f'<p class="part">{escape(item.part)}</p>')
        link = f'<a href="{(html / item.page).as_uri()}">{escape(item.title)}</a>'
        lines.append(f"<p>{link}<span>{item.first}</span></p>")
        last = item.part
    return FRONT.format(
        title=escape(config["title"]),
        author=escape(config["author"]),
        version=__version__,
        revision=revision(),
        year=config["copyright"],
        lines="\n".join(lines),
    )


def places_of(
    printed: list[Printed],
    html: Path,
    ahead: int,  # sheets before the first page of the book
) -> dict[str, tuple[int, float]]:  # sheet, counted from 0, and height on it
    """Where on paper every address of the book is."""
    places = {}
    for item in printed:
        start, address = ahead + item.first - 1, (html / item.page).as_uri()
        places[address] = (start, TOP)
        for name, place in item.pdf.named_destinations.items():
            sheet = item.pdf.get_destination_page_number(place)
            if sheet is not None:
                places[address + anchor(name)] = (start + sheet, float(place.top) + 8)
    return places


def anchor(name: str) -> str:
    """A name of Chromium's as the end of an address."""
    return "#" + unquote(name.removeprefix("/"))


def lead_inside(
    writer: PdfWriter, sheets: range, address: str, places: dict[str, tuple[int, float]]
) -> None:
    """Let links on the sheets of one page lead to sheets; drop those to other files."""
    for number in sheets:
        sheet, kept = writer.pages[number], ArrayObject()
        for reference in sheet.get("/Annots", ()):
            link = reference.get_object()
            if "/Dest" in link:
                target = address + anchor(str(link["/Dest"]))
            else:
                target = unquote(str(link.get("/A", {}).get("/URI", "")))
            place = places.get(target) or places.get(target.partition("#")[0])
            if place is not None:
                goal = writer.pages[place[0]].indirect_reference
                link.pop("/A", None)
                at = (NameObject("/XYZ"), NullObject(), FloatObject(place[1]))
                link[NameObject("/Dest")] = ArrayObject([goal, *at, NullObject()])
            elif "/Dest" in link or target.startswith("file:"):
                continue
            kept.append(reference)
        if "/Annots" in sheet:
            sheet[NameObject("/Annots")] = kept


def add_outline(
    writer: PdfWriter,
    printed: list[Printed],
    html: Path,
    places: dict[str, tuple[int, float]],
) -> None:
    """Parts, chapters and sections for the side bar of a reader."""
    part, last = None, ""
    for item in printed:
        address = (html / item.page).as_uri()
        sheet, _ = places[address]
        if item.part != last:
            part = writer.add_outline_item(
                title=item.part, page_number=sheet, is_open=False
            )
        chapter = writer.add_outline_item(
            title=item.title, page_number=sheet, parent=part, is_open=False
        )
        for title, name in item.sections:
            sheet, top = places[f"{address}#{name}"]
            writer.add_outline_item(
                title=title, page_number=sheet, parent=chapter, fit=Fit.xyz(top=top)
            )
        last = item.part


def bind(front: PdfReader, printed: list[Printed], html: Path, title: str) -> PdfWriter:
    """Put everything together."""
    writer, ahead = PdfWriter(), len(front.pages)
    for pdf in (front, *(item.pdf for item in printed)):
        for sheet in pdf.pages:
            writer.add_page(sheet)
    places = places_of(printed, html, ahead)
    lead_inside(writer, range(ahead), "", places)
    for item in printed:
        start = ahead + item.first - 1
        sheets = range(start, start + len(item.pdf.pages))
        lead_inside(writer, sheets, (html / item.page).as_uri(), places)
    add_outline(writer, printed, html, places)
    writer.set_page_label(0, ahead - 1, style=PageLabelStyle.LOWERCASE_ROMAN)
    last = len(writer.pages) - 1
    writer.set_page_label(ahead, last, style=PageLabelStyle.DECIMAL)
    writer.add_metadata({"/Title": title})
    writer.page_mode = "/UseOutlines"
    return writer


def main(root: Path) -> int:
    """Print the book and say where it is."""
    html, target = root / "_build" / "html", root / "_build" / "pcl.pdf"
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    browser = start_browser()
    try:
        printed = print_all(browser, html, pages_of(root, html))
        body = front_matter(config, html, printed)
        address = (html / printed[0].page).as_uri()
        _, _, front = print_page(browser, address, body=body)
    finally:
        browser.quit()
    writer = bind(front, printed, html, config["title"])
    writer.write(target)
    print(f"{len(writer.pages)} pages, {target.stat().st_size / 1e6:.0f} MB: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
