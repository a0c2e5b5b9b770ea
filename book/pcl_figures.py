"""Figures with numbers: the paragraph that starts with `*Figure.*` below a cell becomes a
numbered caption with an anchor and links to the cell's code and to the records behind it. Lists of all figures and of
all theorems. Links to the glossary carry the definition."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from pcl_fold import CAPTION, is_caption
from pcl_records import record_links
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import clean_astext, make_refnode

FENCE = ":" * 8
KINDS = ("figures", "theorems")
# A caption that tells panels apart by their side; on a phone they stand below each other.
SIDES = re.compile(r"\b(?:Left|Right)(?:,|:| and )|\((?:left|right)\b")
STOP = re.compile(r"(?<!\bal)(?<!\be\.g)(?<!\bi\.e)[.?!](?=\s)")  # ends a sentence
NARROW = " On this narrow screen, left is above and right is below."


def mark_captions(
    cells: list[dict[str, Any]],
    behind: dict[
        int, list[str]
    ],  # by position of a cell, experiments whose records it reads
) -> None:
    """Turn the caption that opens a Markdown cell into the directive below."""
    for position, cell in enumerate(cells):
        if not is_caption(cell):
            continue
        source = "".join(cell["source"])
        match = CAPTION.match(source)
        assert match is not None
        text, _, rest = source[match.end() :].partition("\n\n")
        name = f":name: {match['label']}\n" if match["label"] else ""
        if experiments := behind.get(position - 1):
            name += f":records: {' '.join(experiments)}\n"
        directive = f"{FENCE}{{pcl-caption}}\n{name}\n{text.rstrip()}\n{FENCE}"
        cell["source"] = f"{directive}\n\n{rest}" if rest else directive


class Caption(SphinxDirective):
    """The caption of the figure that the cell above has drawn."""

    has_content = True
    option_spec: ClassVar = {
        "name": directives.unchanged,
        "records": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """A figure that holds its caption; the number comes from Sphinx."""
        place = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, place)
        count = self.env.temp_data["pcl_captions"] = (
            self.env.temp_data.get("pcl_captions", 0) + 1
        )
        figure = nodes.figure(classes=["pcl-figure"])
        figure["ids"].append(f"figure-{count}")
        self.set_source_info(figure)
        paragraph = place[0] if place.children else nodes.paragraph()
        caption = nodes.caption("", "", *paragraph.children)
        if SIDES.search(caption.astext()):
            caption += nodes.inline("", NARROW, classes=["pcl-narrow"])
        if experiments := self.options.get("records", "").split():
            caption += record_links(self.env.docname, experiments)
        figure += caption
        self.add_name(figure)
        return [figure, *place.children[1:]]


class LinkToCode(SphinxTransform):
    """Give the code above a caption an anchor, and the caption a link to it."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Link every caption whose cell shows its code, folded or not."""
        for figure in self.document.findall(nodes.figure):
            if "pcl-figure" not in figure["classes"]:
                continue
            before = figure.parent[: figure.parent.index(figure)]
            cell = before[-1] if before else None
            if not isinstance(cell, nodes.container) or not cell.children:
                continue
            words_below(figure, cell)
            code = cell.children[0]
            if code.get("nb_element") != "cell_code_source":
                continue
            anchor = f"code-of-{figure['ids'][0]}"
            code["ids"].append(anchor)
            link = nodes.reference("", "Code", refid=anchor, classes=["pcl-made-by"])
            figure[0].extend([nodes.Text(" "), link])


def words_below(
    figure: nodes.figure,  # a caption
    cell: nodes.container,  # what stands above it
) -> None:
    """Put what a cell prints after its drawing below the caption."""
    outputs = cell.children[-1]
    if outputs.get("nb_element") != "cell_code_output":
        return
    drawn = [
        number
        for number, output in enumerate(outputs.children)
        for part in output.findall(nodes.container)
        if part.get("mime_type", "").startswith("image/")
    ]
    printed = outputs.children[drawn[-1] + 1 :] if drawn else []
    if printed:
        for output in printed:
            outputs.remove(output)
        below = cell.copy()
        below += outputs.copy()
        below[0].extend(printed)
        figure.parent.insert(figure.parent.index(figure) + 1, below)


class listing(nodes.General, nodes.Element):
    """Where a list of figures or theorems will stand."""


class Listing(SphinxDirective):
    """All figures of the book, or all its theorems: `{pcl-list} figures`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A placeholder, filled in when every page is read."""
        kind = directives.choice(self.arguments[0], KINDS)
        return [listing(kind=kind)]


Entry = tuple[str, str, str, str, list[nodes.Node]]


def finding_of(caption: nodes.caption) -> list[nodes.Node]:
    """The first sentence of a caption, with its formulas and links."""
    kept: list[nodes.Node] = []
    said = ""  # a line of the source is a piece of text of its own
    for child in caption.children:
        if isinstance(child, nodes.Text):
            before, said = said, said + str(child)
            if stop := STOP.search(said):
                kept.append(nodes.Text(said[len(before) : stop.end()]))
                break
            kept.append(nodes.Text(str(child).replace("\n", " ")))
        elif not {"pcl-made-by", "pcl-narrow"} & set(child.get("classes", ())):
            said += child.astext()
            copied = child.deepcopy()
            for node in copied.findall(nodes.Element):
                node["ids"] = []  # the anchors stay where the figure is
            kept.append(copied)
    return kept


def entries_of(document: nodes.document) -> list[Entry]:
    """Kind, counter, anchor, name and text of the figures and theorems on a page."""
    found = []
    for node in document.findall(nodes.Element):
        if isinstance(node, nodes.figure) and node["ids"]:
            caption = next(iter(node.findall(nodes.caption)), None)
            if caption is not None:
                place = ("figures", "figure", node["ids"][0], "Figure")
                found.append((*place, finding_of(caption)))
        elif node.get("realtype") and node.get("countertype"):
            kind = node["realtype"].capitalize()
            place = ("theorems", node["countertype"], node["ids"][0], kind)
            found.append((*place, [nodes.Text(node.get("title", ""))]))
    return found


def on_doctree_read(app: Any, document: nodes.document) -> None:
    """Remember what a page has."""
    entries = app.env.__dict__.setdefault("pcl_entries", {})
    entries[app.env.docname] = entries_of(document)
    terms = app.env.__dict__.setdefault("pcl_terms", {})
    for item in document.findall(nodes.definition_list_item):
        for term in item.findall(nodes.term):
            for anchor in term["ids"]:
                terms[anchor] = first_sentence(clean_astext(item[-1]))


def define_terms(app: Any, document: nodes.document, docname: str) -> None:
    """Let a link to the glossary carry the definition, for hover and focus."""
    terms = getattr(app.env, "pcl_terms", {})
    for link in document.findall(nodes.reference):
        anchor = link.get("refid") or link.get("refuri", "").partition("#")[2]
        if anchor in terms and not link.get("reftitle"):
            link["reftitle"] = terms[anchor]


def on_purge(app: Any, env: Any, docname: str) -> None:
    """Forget a page that is read again, or gone."""
    getattr(env, "pcl_entries", {}).pop(docname, None)


def on_merge(app: Any, env: Any, docnames: list[str], other: Any) -> None:
    """Take over what another process has read."""
    entries = env.__dict__.setdefault("pcl_entries", {})
    entries.update(getattr(other, "pcl_entries", {}))


def first_sentence(text: str) -> str:
    """What a text says first, without what may be long after it."""
    head, dot, _ = " ".join(text.split()).partition(". ")
    return head + dot.strip()


def item_of(app: Any, docname: str, page: str, entry: Entry) -> nodes.Node:
    """One line of a list."""
    _, counter, anchor, word, said = entry
    numbers = app.env.toc_fignumbers.get(page, {}).get(counter, {}).get(anchor, ())
    number = ".".join(map(str, numbers))
    link = make_refnode(
        app.builder, docname, page, anchor, nodes.Text(f"{word} {number}".strip())
    )
    copies = [node.deepcopy() for node in said]
    return nodes.list_item("", nodes.paragraph("", "", link, nodes.Text(" "), *copies))


class Fill(SphinxPostTransform):
    """Write the lists, chapter by chapter."""

    default_priority = 5  # before links are resolved: captions have some

    def run(self, **kwargs: Any) -> None:
        """Put the lists where their placeholders stand."""
        entries = getattr(self.env, "pcl_entries", {})
        for place in list(self.document.findall(listing)):
            parts: list[nodes.Node] = []
            for page in sorted(entries, key=lambda name: ("/intro" not in name, name)):
                mine = [entry for entry in entries[page] if entry[0] == place["kind"]]
                if not mine:
                    continue
                rubric = nodes.rubric("", clean_astext(self.env.titles[page]))
                items = [item_of(self.app, self.env.docname, page, e) for e in mine]
                parts += [rubric, nodes.bullet_list("", *items, classes=["pcl-list"])]
            place.replace_self(parts or [nodes.paragraph("", "None yet.")])


def on_outdated(app: Any, env: Any, *changed: set[str]) -> list[str]:
    """The pages with lists are written anew whenever anything is."""
    added, modified, removed = changed
    lists = getattr(env, "pcl_lists", set()) & env.found_docs
    return sorted(lists) if added | modified | removed else []


def on_lists(app: Any, document: nodes.document) -> None:
    """Remember which pages have lists."""
    if next(iter(document.findall(listing)), None) is not None:
        app.env.__dict__.setdefault("pcl_lists", set()).add(app.env.docname)
        # The formulas come with the lists, after Sphinx has looked for some.
        app.env.get_domain("math").data["has_equations"][app.env.docname] = True


def connect(app: Any) -> None:
    """Register directives, transform and handlers."""
    app.add_directive("pcl-caption", Caption)
    app.add_directive("pcl-list", Listing)
    app.add_node(listing)
    app.add_transform(LinkToCode)
    app.add_post_transform(Fill)
    app.connect("doctree-read", on_doctree_read)
    app.connect("doctree-read", on_lists)
    app.connect("env-purge-doc", on_purge)
    app.connect("env-merge-info", on_merge)
    app.connect("env-get-outdated", on_outdated)
    app.connect("doctree-resolved", define_terms)
