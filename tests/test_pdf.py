"""The book as one PDF: which pages it has, and where its links lead. The printing itself
takes a browser and minutes: `make pdf`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import yaml

pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed: extra book")
from pypdf.annotations import Link  # noqa: E402
from pypdf.generic import DictionaryObject, Fit, NameObject  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "book"))

import pcl_pdf  # noqa: E402
from pcl_pdf import Printed, bind, pages_of  # noqa: E402

BOX = (10, 10, 50, 20)


def printed_page(
    html: Path, name: str, first: int, n_sheets: int, addresses: list[str]
) -> Printed:
    """A page with links on its first sheet and an anchor on its last."""
    writer = pypdf.PdfWriter()
    for _ in range(n_sheets):
        writer.add_blank_page(595, 842)
    for address in addresses:
        writer.add_annotation(0, Link(rect=BOX, url=address))
    inside = Link(rect=BOX, target_page_index=0, fit=Fit.fit())
    inside[NameObject("/Dest")] = NameObject("/place")
    writer.add_annotation(0, inside)
    place = pypdf.generic.Destination(
        "/place", writer.pages[-1].indirect_reference, Fit.xyz(left=0, top=500)
    )
    goals = DictionaryObject({NameObject("/place"): place.dest_array})
    writer.root_object[NameObject("/Dests")] = goals
    file = io.BytesIO()
    writer.write(file)
    title = f"Page {name}"
    pdf = pypdf.PdfReader(file)
    return Printed(f"{name}.html", "A part", title, [("A place", "place")], pdf, first)


def test_links_lead_to_sheets_and_none_to_files(tmp_path: Path) -> None:
    one, two = ((tmp_path / f"{name}.html").as_uri() for name in ("one", "two"))
    wanted = [f"{two}#place", two, f"{two}#gone", "https://example.org/", f"{one}.zip"]
    pages = [
        printed_page(tmp_path, "one", 1, 2, wanted),
        printed_page(tmp_path, "two", 3, 3, [one]),
    ]
    front = printed_page(tmp_path, "front", 0, 1, [two]).pdf
    file = io.BytesIO()
    bind(front, pages, tmp_path, "A book").write(file)
    book = pypdf.PdfReader(file)
    numbers = {page.indirect_reference.idnum: n for n, page in enumerate(book.pages)}

    def goals(sheet: int) -> list[int | str]:
        found = []
        for note in book.pages[sheet].annotations:
            link = note.get_object()
            goal = link.get("/Dest")
            found.append(numbers[goal[0].idnum] if goal else link["/A"]["/URI"])
        return found

    assert goals(0)[0] == 3
    assert goals(1) == [5, 3, 3, "https://example.org/", 2]
    assert goals(3) == [1, 5]
    assert book.page_labels == ["i", "1", "2", "3", "4", "5"]
    part, (first, [section], *_) = book.outline
    assert (part.title, first.title, section.title) == ("A part", "Page one", "A place")
    assert book.get_destination_page_number(section) == 2


def test_every_page_of_the_book_is_printed_in_order(root: Path, tmp_path: Path) -> None:
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "losses.html").touch()
    found = [page for _, page in pages_of(root, tmp_path)]
    listed = [f"{c['file']}.html" for part in toc["parts"] for c in part["chapters"]]
    at = found.index("reference/losses.html")
    assert found[at - 1] == "nbs/reference.html"
    assert found[:at] + found[at + 1 :] == [f"{toc['root']}.html", *listed]


def test_without_a_browser_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcl_pdf.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt install chromium"):
        pcl_pdf.start_browser()
