"""How answers look in a notebook: self-contained fragments, for light and dark themes, with everything escaped.

A fragment has no script, no class, no link and no style sheet: notebooks take those out of what they do not trust. What it
says it says in text and in table markup, so that it can be read without its styles, and by a screen reader.
"""

import re
from html import escape

from unhand import _native

# Text takes the theme's own colour; lines and backgrounds are mixed from grey, so that both themes can be read.
_FONT = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;line-height:1.5;color:inherit"
_LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.25)"
_CELL = f"padding:2px 12px 2px 0;background:transparent;color:inherit;vertical-align:top;{_LINE}"
# A number stays in one piece. A path breaks anywhere rather than push the advice out of sight.
_NUMBER = "white-space:nowrap;font-variant-numeric:tabular-nums"
_WORDS = "white-space:normal;overflow-wrap:break-word;word-break:normal;min-width:6em;max-width:44em"
_PATH = "white-space:normal;overflow-wrap:anywhere;min-width:24em;max-width:48em"

# Parts of the bar. Each stands out from white and from dark grey with 3:1 at least (WCAG 2.1, 1.4.11), and neighbours
# differ for eyes that do not tell red from green.
_COLOURS = {
    "other processes": "#7d8590",
    "outside PyTorch": "#b7791f",
    "allocated": "#3b82d6",
    "stuck": "#c2557a",
    "kept by pools": "#8c6bc0",
    "returnable": "#2f9e7f",
}


# Where less of the device than this is in use, the bar shows what is in use and not the device.
_ENLARGED = 0.1


class Lines(tuple):
    """A cell of several lines."""

    __slots__ = ()


class Path(Lines):
    """A cell of paths, one a line; they break before a dot or a bracket, and where that is not enough, anywhere."""

    __slots__ = ()


class Word(str):
    """A cell that stays in one piece."""

    __slots__ = ()


def sheet(*parts):
    """The frame around an answer. What is too wide scrolls inside it, and not the whole notebook."""
    style = f"background:transparent;max-width:100%;overflow-x:auto;{_FONT}"
    return f'<div style="{style}">{"".join(parts)}</div>'


def heading(words, note=""):
    """A line above a table, in bold, with a note that is not."""
    note = f' <span style="font-weight:400">{_text(note)}</span>' if note else ""
    return f'<div style="font-weight:600;margin:8px 0 2px">{_text(words)}{note}</div>'


def line(words):
    """A line of plain text."""
    return f'<div style="overflow-wrap:anywhere;margin:2px 0">{_text(words)}</div>'


def table_html(headers, rows, align=None):
    """A table. A cell is text, a number or `Lines`; `align` has a letter a column, `l` or `r`, left where it is missing.

    Headers may be empty: then there is no head row, and the first column heads the rows. With headers, a column that is
    empty in all rows is left out.
    """
    align, rows = (align or "").ljust(len(headers), "l"), list(rows)
    if headers:
        full = [at for at in range(len(headers)) if any(_text(row[at]) for row in rows)]
        headers, align = [headers[at] for at in full], "".join(align[at] for at in full)
        rows = [[row[at] for at in full] for row in rows]

    def row(cells, is_head):
        out = []
        for column, cell in enumerate(cells):
            is_right = align[column : column + 1] == "r"
            is_number = is_right or isinstance(cell, Word) or not isinstance(cell, Lines | str) or (column == 0 and not headers)
            wrap = _PATH if isinstance(cell, Path) else _NUMBER if is_number or is_head else _WORDS
            tag, scope = ("th", "col") if is_head else ("th", "row") if column == 0 and not headers else ("td", None)
            weight = 600 if is_head else 400
            style = f"{_CELL};{wrap};text-align:{'right' if is_right else 'left'};font-weight:{weight}"
            attributes = f' scope="{scope}"' if scope else ""
            out.append(f'<{tag}{attributes} style="{style}">{_text(cell)}</{tag}>')
        return f'<tr style="background:transparent">{"".join(out)}</tr>'

    head = f"<thead>{row(headers, True)}</thead>" if headers else ""
    body = "".join(row(cells, False) for cells in rows)
    style = f"border-collapse:collapse;border:0;margin:4px 0;table-layout:auto;{_FONT}"
    return f'<table style="{style}">{head}<tbody>{body}</tbody></table>'


def bar_html(parts, total_bytes, label):
    """A stacked bar of `(name, bytes)` with a legend; what is left of `total_bytes` stays empty."""
    total_bytes = max(total_bytes, sum(size for _, size in parts), 1)
    pieces, legend = [], []
    for name, size in parts:
        if not size:
            continue
        colour = _COLOURS.get(name, "#808080")
        text = _text(f"{name} {_native.format_bytes(size)}")
        share = 100 * size / total_bytes
        # The light edge keeps neighbours apart, whatever their colours. It is inside the width, and would be all of a
        # piece that is hardly wider.
        edge = ";border-right:1px solid rgba(255,255,255,.7)" if share >= 1 else ""
        pieces.append(
            f'<span title="{text}" style="display:inline-block;box-sizing:border-box;height:100%;width:{share:.3f}%;'
            f'background:{colour}{edge}"></span>'
        )
        swatch = f"display:inline-block;width:9px;height:9px;margin-right:5px;background:{colour}"
        entry = "display:inline-block;margin-right:14px;white-space:nowrap"
        legend.append(f'<span style="{entry}"><span style="{swatch}"></span>{text}</span> ')
    label = f"{label}: {', '.join(f'{name} {_native.format_bytes(size)}' for name, size in parts if size) or 'nothing'}"
    frame = (
        "height:14px;max-width:720px;overflow:hidden;white-space:nowrap;font-size:0;line-height:0;margin:2px 0;"
        "background:rgba(128,128,128,.22)"
    )
    return (
        f'<div role="img" aria-label="{_text(label)}" style="{frame}">{"".join(pieces)}</div>'
        f'<div style="margin:3px 0">{"".join(legend)}</div>'
    )


def ladder_bar(ladder):
    """The ladder as a bar: what is live, what can be given back, what is stuck, what is outside of PyTorch."""
    parts = [(name, size) for name, size in _parts(ladder) if size]
    title, whole = _ladder_title(ladder), ladder.total_bytes
    in_use = sum(size for _, size in parts)
    note = ""
    if in_use < _ENLARGED * whole:
        # On a large device a small process would be a hair.
        note, whole = f"(the bar is what is in use: {100 * in_use / whole:.1f} % of it)", in_use
    return heading(title, note) + bar_html(parts, whole, f"memory of {title}")


def bar_text(ladder):
    """The same in one line, for where there is no HTML."""
    words = [f"{name} {_native.format_bytes(size)}" for name, size in _parts(ladder) if size]
    return f"{_ladder_title(ladder)}: {', '.join(words) or 'nothing in use'}"


def ladder_html(ladder):
    """The ladder as a bar and its table."""
    return sheet(_ladder(ladder))


def report_html(report):
    """A whole report: for each device the ladder and the holders."""
    if not report.devices:
        return sheet(line(report))
    parts = []
    for device in report.devices:
        parts.append(_ladder(device.ladder))
        rows = holder_rows(device.holders)
        if device.more_holders_bytes:
            rows.append((_native.format_bytes(device.more_holders_bytes), "", "in more holders", "", ""))
        if device.unattributed_bytes:
            rows.append(_unattributed(device.unattributed_bytes))
        if rows:
            parts += [heading("held by"), table_html(HOLDER_HEADERS, rows, "rllrl")]
        if device.unattributed:
            rows = [(_native.format_bytes(site.bytes), Path([site.place]), f"{site.n_blocks:,}") for site in device.unattributed]
            parts += [heading("unattributed: allocated at"), table_html(("bytes", "line", "blocks"), rows, "rlr")]
    return sheet(*parts)


def holders_html(found):
    """The holders of something, as `unhand.holders` returns them."""
    size = f", {_native.format_bytes(found.bytes)} on GPUs" if found.bytes is not None else ""
    if not len(found):
        return sheet(heading(found.of + size + ": nothing holds it"))
    return sheet(heading(found.of + size, "held by"), table_html(HOLDER_HEADERS, holder_rows(found), "rllrl"))


def freed_html(freed):
    """What `unhand.free` did, and what it left."""
    parts = [heading(str(freed).splitlines()[0])]
    if not freed.dry_run and freed.before:
        rows = [(f"cuda:{after.device}", *_changes(before, after)) for before, after in zip(freed.before, freed.after)]
        parts.append(table_html(("device", "used on the device", "reserved", "allocated"), rows, "lrrr"))
    done = [
        (action.name.replace("_", " "), Lines([f"not done: {action.error}" if action.error else action.detail]), action.freed_bytes)
        for action in freed.actions
        if action.error or action.freed_bytes or (action.count and action.name != "synchronize")
    ]
    if done:
        rows = [(name, what, _native.format_bytes(size) if size else "") for name, what, size in done]
        parts.append(table_html(("done", "what came of it", "bytes"), rows, "llr"))
    for title, holders in (("not touched: somebody else needs it", freed.shared), ("still held by", freed.kept)):
        rows = holder_rows(holders[:8])
        if len(holders) > 8:
            rest = sum(holder.bytes for holder in holders[8:])
            rows.append((_native.format_bytes(rest), "", f"in {len(holders) - 8} more holders", "", ""))
        if holders is freed.kept and freed.unattributed_bytes:
            rows.append(_unattributed(freed.unattributed_bytes))
        if rows:
            parts += [heading(title), table_html(HOLDER_HEADERS, rows, "rllrl")]
    return sheet(*parts)


def compacted_html(compacted):
    """What `unhand.compact` moved, and the device before and after."""
    text = str(compacted).splitlines()
    names = ("reserved", "allocated", "stuck", "returnable")
    size = _native.format_bytes
    rows = [(name, *(size(getattr(usage, f"{name}_bytes")) for usage in (compacted.before, compacted.after))) for name in names]
    # After the first line and the table, the text goes on with sentences.
    notes = [line(words.strip()) for words in text[2 + len(names) :]]
    return sheet(heading(text[0]), table_html(("", "before", "after"), rows, "lrr"), *notes)


def verdict_html(verdict):
    """What `unhand.watch` makes of a loop."""
    lines = str(verdict).splitlines()
    end = lines.index("  held by") if "  held by" in lines else len(lines)
    parts = [heading(lines[0]), *(line(words.strip()) for words in lines[1:end])]
    if verdict.growers:
        rows = [
            (
                f"{_native.format_bytes(round(grower.bytes_per_step))} a step",
                Word(grower.kind),
                Path(_references(grower)),
                Path([grower.site or ""]),
                Lines([grower.advice]),
            )
            for grower in verdict.growers
        ]
        if verdict.unattributed_bytes_per_step:
            size = f"{_native.format_bytes(round(verdict.unattributed_bytes_per_step))} a step"
            rows.append((size, Word("unattributed"), "no Python object leads to it", "", ""))
        parts.append(table_html(("growth", "kind", "held by", "allocated at", "what to do"), rows, "r"))
    return sheet(*parts)


def scope_html(result):
    """What a scope allocated, and what of it outlives the scope."""
    from unhand._scope_answer import peak

    size = _native.format_bytes
    parts = [heading(result.headline())]
    rows = [
        (
            f"cuda:{device.device}",
            f"{size(device.allocated_before_bytes)} → {size(device.allocated_after_bytes)}",
            f"{size(device.reserved_before_bytes)} → {size(device.reserved_after_bytes)}",
            peak(device).removeprefix("peak inside "),
        )
        for device in result.devices
    ]
    if rows:
        parts.append(table_html(("device", "allocated", "reserved", "peak inside"), rows, "lrrl"))
    for title, leaks in (("", result.survivors), ("not counted", result.excused)):
        if leaks:
            parts += [heading(title)] if title else []
            parts.append(table_html(_LEAK_HEADERS, leak_rows(leaks), "rllrll"))
    if result.tree.children:
        parts += [heading("allocated inside"), f'<pre style="{_FONT};margin:4px 0">{_lines(result.tree.lines())}</pre>']
    return sheet(*parts, *map(line, result.notes))


def leak_rows(leaks):
    """Rows of a table of survivors, for `_LEAK_HEADERS` and the alignment `rllrll`."""
    return [
        (
            _native.format_bytes(leak.bytes),
            Word(leak.kind),
            Path(_references(leak)),
            f"{leak.n_storages:,}",
            Path([leak.site or ""]),
            Lines([leak.advice]),
        )
        for leak in leaks
    ]


_LEAK_HEADERS = ("bytes", "kind", "held by", "storages", "allocated at", "what to do")


def _lines(lines):
    return "\n".join(_text(words) for words in lines)


def footer_html(footer):
    """The footer of a cell."""
    from unhand import _footer

    parts = [heading(f"unhand: {_footer.head(footer)}")]
    if not footer.devices:
        parts.append(line("no GPU memory: this process has not started CUDA through PyTorch"))
    parts += [line(f"cuda:{device.device} {', '.join(_footer.figures(device))}") for device in footer.devices]
    rows = []
    for title, holders in _footer.groups(footer):
        title = Word(title)
        shown, rest = holders[: _footer.LIMIT], holders[_footer.LIMIT :]
        rows += [
            (
                _native.format_bytes(holder.bytes),
                title,
                Word(holder.kind),
                Path(_footer.paths(holder)),
                Lines([_footer.advice(footer, holder)]),
            )
            for holder in shown
        ]
        if rest:
            size = _native.format_bytes(sum(holder.bytes for holder in rest))
            rows.append((size, title, "", f"in {len(rest)} more", ""))
    if footer.unattributed_bytes:
        size = _native.format_bytes(footer.unattributed_bytes)
        rows.append((size, Word("left behind"), "unattributed", "no Python object leads to it", ""))
    if rows:
        parts.append(table_html(("bytes", "group", "kind", "held by", "what to do"), rows, "r"))
    parts += [line(sentence) for sentence in _footer.sentences(footer)]
    return sheet(*parts)


HOLDER_HEADERS = ("bytes", "kind", "held by", "storages", "what to do")


def holder_rows(holders):
    """Rows of a table of holders, for `HOLDER_HEADERS` and the alignment `rllrl`."""
    return [
        (
            _native.format_bytes(holder.bytes),
            Word(holder.kind),
            Path(_paths(holder)),
            f"{holder.n_storages:,}" if holder.n_storages else "",
            Lines([holder.advice]),
        )
        for holder in holders
    ]


def _references(holder):
    """The path that names it best, and the others to the same memory."""
    yield holder.path + (f" ({holder.type})" if holder.type else "")
    for path in holder.paths[1:6]:
        yield f"also {path}"
    if len(holder.paths) > 6:
        yield f"and {len(holder.paths) - 6} more"


def _paths(holder):
    """The path, the others to the same memory, and the parts, as in the text."""
    yield from _references(holder)
    for part in holder.parts[:5]:
        yield f"\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}{_native.format_bytes(part.bytes)} {part.path or part.type} ({part.n_storages:,})"


def _unattributed(n_bytes):
    return _native.format_bytes(n_bytes), "unattributed", "no Python object leads to it", "", ""


def _parts(ladder):
    return [
        ("other processes", ladder.others_bytes),
        ("outside PyTorch", ladder.outside_bytes),
        ("allocated", ladder.allocated_bytes),
        ("stuck", ladder.stuck_bytes),
        ("kept by pools", ladder.kept_by_pools_bytes),
        ("returnable", ladder.returnable_bytes),
    ]


def _ladder_title(ladder):
    return f"cuda:{ladder.device} {ladder.name}, {_native.format_bytes(ladder.total_bytes)}"


def _ladder(ladder):
    from unhand._ladder import rows

    lines = [
        (
            "\N{NO-BREAK SPACE}" * 2 * depth + label,
            "n/a" if value is None else _native.format_bytes(value),
            note,
        )
        for depth, label, value, note in rows(ladder)
    ]
    return ladder_bar(ladder) + table_html((), lines, "lrl")


def _changes(before, after):
    for name in ("device_used_bytes", "reserved_bytes", "allocated_bytes"):
        old, new = getattr(before, name), getattr(after, name)
        known = old is not None and new is not None
        yield f"{_native.format_bytes(old)} → {_native.format_bytes(new)}" if known else "n/a"


# Not before the dots of a number, and not inside of what `escape` made: those have none.
_BREAKS = re.compile(r"(?<=[A-Za-z_\])])([.\[](?=[\w<&]))")


def _text(cell):
    if cell is None:
        return "n/a"
    if isinstance(cell, Path):
        return "<br/>".join(_BREAKS.sub(r"<wbr/>\1", _text(words)) for words in cell)
    if isinstance(cell, Lines):
        return "<br/>".join(_text(words) for words in cell)
    return escape("".join(_visible(character) for character in str(cell)))


def _visible(character):
    """The character itself, if it shows as one. What turns text around, or cannot be sent, is spelled out."""
    if character.isprintable() or character == "\N{NO-BREAK SPACE}":
        return character
    return " " if character in "\n\t" else character.encode("unicode_escape", "backslashreplace").decode("ascii")
