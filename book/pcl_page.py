"""What every finished page gets: figures for dark screens, a line on how to cite it, and
labels that screen readers understand."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

# The palette of the figures (chapter 930), and what it becomes on a dark page.
ON_DARK = {
    "#0b3c5d": "#8ec6e6",
    "#c1440e": "#f08a5d",
    "#1b8a6b": "#5cc9a7",
    "#d99a1c": "#e8b64c",
    "#8a6fb3": "#b79fe0",
    "#7d8a94": "#a5b1ba",
}
COLOUR = re.compile(r"#[0-9a-f]{6}\b", re.IGNORECASE)
GROUP = re.compile(r"(<g\b[^>]*>|</g>|<image\b[^>]*>)", re.DOTALL)
NAMED = re.compile(r'<g\b[^>]*\bid="([\w.]+?)_\d+"')
MAPS = {"QuadContourSet", "QuadMesh"}  # as matplotlib names its colour maps
OVER = {"line2d", "PathCollection", "LineCollection"}  # what is drawn upon one
CORNER = re.compile(r"[ML] ([\d.]+) ([\d.]+)")
WHERE = re.compile(r"<g\b[^>]*translate\(([\d.]+) ([\d.]+)\)")
PICTURE = re.compile(
    r'<img\b(?P<head>[^>]*?)\ssrc="(?P<stem>[^"]*_images/[^"]+)\.svg"(?P<tail>[^>]*)>'
)
# What screen readers would stumble over: a name that hides the line it names, a list
# without items. And tables become narrower where a line may break before an error.
MENDED = {
    '<summary aria-label="Toggle hidden content">': "<summary>",
    '<div role="list" class="citation-list">': '<div class="citation-list">',
    "&nbsp;±": " ±",
}
NARROW = '<source media="(max-width: 600px)" srcset="{source}">'
COLUMN = re.compile(r'(<th scope="col"[^>]*><code[^>]*>)(\w+)')
LEAST = 0.5  # lightness of a colour on a dark page
CITE = (
    '<p class="pcl-cite">Cite this page: {author}. <cite>{title}</cite>. In {book}, '
    "version {version}, revision {revision}, {year}.</p>"
)


def is_grey(colour: str) -> bool:
    """Has a colour no hue to speak of?"""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return max(parts) - min(parts) < 0.08


def on_dark(colour: str) -> str:
    """What a colour becomes on a dark page: greys change places, the palette has its own
    counterparts, and other colours keep their hue and become light enough."""
    known = ON_DARK.get(colour.lower())
    if known:
        return known
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    hue, light, sat = colorsys.rgb_to_hls(*parts)
    if is_grey(colour):
        light, sat = 0.93 - 0.83 * light, 0.0
    elif light < LEAST:
        light = LEAST + 0.3 * light
    mixed = colorsys.hls_to_rgb(hue, light, sat)
    return "#" + "".join(f"{round(255 * part):02x}" for part in mixed)


def placed(svg: str) -> Iterator[tuple[str, list[str], int]]:
    """The pieces of a drawing, each with the groups it is in and with its axes, counted
    from 1."""
    places: list[str] = []
    axes = 0
    for piece in GROUP.split(svg):
        if piece.startswith("<g"):
            name = NAMED.match(piece)
            places = [*places, name[1] if name else ""]
            axes += places[-1] == "axes"
        elif piece == "</g>":
            places = places[:-1]
        yield piece, places, axes if "axes" in places else 0


def written_upon(
    piece: str,
    corners: list[tuple[str, str]],  # of the axes
) -> bool:
    """Does a text start within its axes, and not beside them?"""
    if not (place := WHERE.match(piece)) or not corners:
        return False
    sides = zip(place.groups(), zip(*corners, strict=True), strict=True)
    return all(
        min(map(float, ends)) <= float(at) <= max(map(float, ends))
        for at, ends in sides
    )


def dark_version(svg: str) -> str:
    """A drawing for dark pages. Pictures and colour maps stay as they are, and what is
    drawn upon them keeps its white and black."""
    pieces = list(placed(svg))
    corners: dict[int, list[tuple[str, str]]] = {}  # of axes, from their ground
    for piece, places, axes in pieces:
        if axes and places[-1] == "patch" and (found := CORNER.findall(piece)):
            corners.setdefault(axes, found)
    mapped = {axes for _, places, axes in pieces if MAPS & set(places)}
    pictured = {axes for piece, _, axes in pieces if piece.startswith("<image")}
    done = []
    for piece, places, axes in pieces:
        first = (places[places.index("axes") + 1 :] or [""])[0] if axes else ""
        upon = axes in mapped | pictured and first in OVER
        bar = axes in mapped and first == "patch"  # the ends of a colour bar

        def turn(match: re.Match[str], upon: bool = upon, bar: bool = bar) -> str:
            kept = upon if is_grey(match[0]) else bar
            return match[0] if kept else on_dark(match[0])

        stays = piece.startswith("<image") or MAPS & set(places)
        if first == "text" and axes in mapped | pictured:
            if written_upon(piece, corners.get(axes, [])):
                stays = True
                if "fill:" not in piece:  # what has no colour of its own is black
                    piece = piece.replace("<g", '<g style="fill: #000000"', 1)
        done.append(piece if stays else COLOUR.sub(turn, piece))
    # What has no colour of its own is black: matplotlib's text.
    return re.sub(r"<svg\b", '<svg fill="#ededed"', "".join(done), count=1)


def write_dark_versions(folder: Path) -> None:
    """Put a dark version beside every drawing."""
    for path in folder.glob("*.svg"):
        if not path.stem.endswith("-dark"):
            dark = dark_version(path.read_text(encoding="utf-8"))
            path.with_stem(f"{path.stem}-dark").write_text(dark, encoding="utf-8")


def two_pictures(
    match: re.Match[str],
    folder: Path,  # of the drawings
) -> str:
    """A drawing for light pages and one for dark ones, each with its layout for phones;
    a page shows one of them."""
    head, stem, tail = match["head"], match["stem"], match["tail"]
    narrow = (folder / f"{Path(stem).name}-phone.svg").exists()
    versions = (("pcl-light", ""), ("pcl-dark", "-dark"))
    return "".join(
        f'<span class="{name}"><picture>'
        + NARROW.format(source=f"{stem}-phone{end}.svg") * narrow
        + f'<img{head} src="{stem}{end}.svg" loading="lazy"{tail}></picture></span>'
        for name, end in versions
    )


def cite_line(app: Any, title: str) -> str:
    """How to cite a page."""
    from pcl import __version__

    config = app.config
    return CITE.format(
        author=escape(config.author),
        title=escape(re.sub(r"<[^>]*>", "", title)),
        book=escape(config.html_title or config.project),
        version=__version__,
        revision=app.pcl_revision,
        year=escape(config.copyright),
    )


def on_page(
    app: Any, name: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Complete the body of a page before it is written."""
    if doctree is None or "body" not in context:
        return
    body = context["body"]
    for found, better in MENDED.items():
        body = body.replace(found, better)
    body = COLUMN.sub(lambda m: m[1] + m[2].replace("_", "_<wbr>"), body)
    folder = Path(app.outdir) / "_images"
    body = PICTURE.sub(lambda match: two_pictures(match, folder), body)
    context["body"] = body + cite_line(app, context.get("title", name))


def on_finished(app: Any, exception: Exception | None) -> None:
    """Write the drawings for dark pages."""
    if exception is None and app.builder.format == "html":
        write_dark_versions(Path(app.outdir) / "_images")


def connect(app: Any) -> None:
    """Register the handlers."""
    from pcl.provenance import revision

    app.pcl_revision = revision()
    app.connect("html-page-context", on_page)
    app.connect("build-finished", on_finished)
    for name in ("pcl.js", "pcl_touch.js"):
        app.add_js_file(name, loading_method="defer")
