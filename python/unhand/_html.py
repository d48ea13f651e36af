"""How answers look in a notebook: self-contained fragments, for light and dark themes, with everything escaped."""

from html import escape

from unhand import _native

# Text takes the theme's own colour; lines and backgrounds are mixed from it, so that both themes can be read.
_FONT = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;line-height:1.5;color:inherit"
_LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.25)"
_CELL = f"padding:2px 10px 2px 0;background:transparent;color:inherit;white-space:nowrap;vertical-align:top;{_LINE}"

# Parts of the bar, with colours that keep apart on white and on black, and for eyes that do not tell red from green.
_COLOURS = {
    "other processes": "#9aa0a6",
    "outside PyTorch": "#c58b2b",
    "allocated": "#3b78c4",
    "stuck": "#b5486b",
    "kept by pools": "#8c6bb1",
    "returnable": "#5aa88f",
}


def table_html(headers, rows, align=None):
    """A table. A cell is text or a number; `align` has a letter a column, `l` or `r`, left where it is missing.

    Headers may be empty: then there is no head row.
    """
    align = align or ""

    def row(cells, tag, weight):
        out = []
        for column, cell in enumerate(cells):
            side = "right" if align[column : column + 1] == "r" else "left"
            style = f"{_CELL};text-align:{side};font-weight:{weight}"
            out.append(f'<{tag} style="{style}">{_text(cell)}</{tag}>')
        return f'<tr style="background:transparent">{"".join(out)}</tr>'

    head = f"<thead>{row(headers, 'th', 600)}</thead>" if headers else ""
    body = "".join(row(cells, "td", 400) for cells in rows)
    style = f"border-collapse:collapse;border:0;margin:4px 0;{_FONT}"
    return f'<table style="{style}">{head}<tbody>{body}</tbody></table>'


def bar_html(parts, total_bytes, label):
    """A stacked bar of `(name, bytes)` with a legend; what is left of `total_bytes` stays empty."""
    total_bytes = max(total_bytes, sum(size for _, size in parts), 1)
    pieces, legend = [], []
    for name, size in parts:
        if not size:
            continue
        colour = _COLOURS.get(name, "#808080")
        share = 100 * size / total_bytes
        text = f"{name} {_native.format_bytes(size)}"
        pieces.append(
            f'<span title="{escape(text)}" style="display:inline-block;height:100%;width:{share:.3f}%;'
            f'min-width:1px;background:{colour}"></span>'
        )
        swatch = f"display:inline-block;width:9px;height:9px;margin-right:4px;background:{colour}"
        legend.append(
            f'<span style="margin-right:12px;white-space:nowrap"><span style="{swatch}"></span>{escape(text)}</span>'
        )
    frame = "height:14px;max-width:720px;overflow:hidden;white-space:nowrap;font-size:0;background:rgba(128,128,128,.18)"
    return (
        f'<div role="img" aria-label="{escape(label)}" style="{frame}">{"".join(pieces)}</div>'
        f'<div style="{_FONT};margin-top:3px">{"".join(legend)}</div>'
    )


def ladder_html(ladder):
    """The ladder as a bar and its table."""
    from unhand._ladder import rows

    size = _native.format_bytes
    title = f"cuda:{ladder.device} {ladder.name}, {size(ladder.total_bytes)}"
    parts = [
        ("other processes", ladder.others_bytes),
        ("outside PyTorch", ladder.outside_bytes),
        ("allocated", ladder.allocated_bytes),
        ("stuck", ladder.stuck_bytes),
        ("kept by pools", ladder.kept_by_pools_bytes),
        ("returnable", ladder.returnable_bytes),
    ]
    bar = bar_html([part for part in parts if part[1]], ladder.total_bytes, f"memory of {title}")
    lines = [
        (
            "\N{NO-BREAK SPACE}" * 2 * depth + label,
            "n/a" if value is None else size(value),
            note,
        )
        for depth, label, value, note in rows(ladder)
    ]
    table = table_html((), lines, "lrl")
    head = f'<div style="{_FONT};font-weight:600;margin-bottom:4px">{escape(title)}</div>'
    return f'<div style="background:transparent;color:inherit">{head}{bar}{table}</div>'


def _text(cell):
    return "n/a" if cell is None else escape(str(cell))


def holder_rows(holders):
    """Rows of a table of holders."""
    return [
        (
            _native.format_bytes(holder.bytes),
            holder.kind,
            "\n".join(holder.paths[:6]) + (f"\nand {len(holder.paths) - 6} more" if len(holder.paths) > 6 else ""),
            f"{holder.n_storages:,}",
            holder.advice,
        )
        for holder in holders
    ]


_HOLDER_HEADERS = ("bytes", "kind", "held by", "storages", "what to do")


def report_html(report):
    """A whole report: for each device the ladder and the holders."""
    if not report.devices:
        return f'<div style="{_FONT}">{escape(str(report))}</div>'
    parts = []
    for device in report.devices:
        parts.append(ladder_html(device.ladder))
        rows = holder_rows(device.holders)
        if device.unattributed_bytes:
            size = _native.format_bytes(device.unattributed_bytes)
            rows.append((size, "unattributed", "no Python object leads to it", "", ""))
        if rows:
            parts.append(table_html(_HOLDER_HEADERS, rows, "rllrl"))
    return "".join(parts)


def holders_html(found):
    """The holders of something, as `unhand.holders` returns them."""
    head = found.of + (f", {_native.format_bytes(found.bytes)} on GPUs" if found.bytes is not None else "")
    table = table_html(_HOLDER_HEADERS, holder_rows(found), "rllrl")
    return f'<div style="{_FONT}"><b>{escape(head)}</b>, held by</div>{table}'


def freed_html(freed):
    """What `unhand.free` did, and what it left."""
    first = str(freed).splitlines()[0]
    rows = [(f"cuda:{after.device}", *_pair(before, after)) for before, after in zip(freed.before, freed.after)]
    parts = [f'<div style="{_FONT}"><b>{escape(first)}</b></div>']
    parts.append(table_html(("device", "used on the device", "reserved", "allocated"), rows))
    for title, holders in (("not touched: somebody else needs it", freed.shared), ("still held by", freed.kept)):
        if holders:
            parts.append(f'<div style="{_FONT}">{title}</div>')
            parts.append(table_html(_HOLDER_HEADERS, holder_rows(holders[:8]), "rllrl"))
    return "".join(parts)


def verdict_html(verdict):
    """What `unhand.watch` makes of a loop."""
    lines = str(verdict).splitlines()
    end = lines.index("  held by") if "  held by" in lines else len(lines)
    parts = [f'<div style="{_FONT}"><b>{escape(lines[0])}</b></div>']
    parts += [f'<div style="{_FONT}">{escape(line.strip())}</div>' for line in lines[1:end]]
    if verdict.growers:
        rows = [
            (
                f"{_native.format_bytes(round(grower.bytes_per_step))} a step",
                grower.kind,
                "\n".join(grower.paths[:6]),
                grower.site or "",
                grower.advice,
            )
            for grower in verdict.growers
        ]
        parts.append(table_html(("growth", "kind", "held by", "allocated at", "what to do"), rows, "rllll"))
    return "".join(parts)


def _pair(before, after):
    for name in ("device_used_bytes", "reserved_bytes", "allocated_bytes"):
        old, new = getattr(before, name), getattr(after, name)
        known = old is not None and new is not None
        yield f"{_native.format_bytes(old)} → {_native.format_bytes(new)}" if known else "n/a"


_LEAK_HEADERS = ("bytes", "kind", "held by", "storages", "allocated at", "what to do")


def leak_rows(leaks):
    """Rows of a table of survivors."""
    return [
        (
            _native.format_bytes(leak.bytes),
            leak.kind,
            "\n".join(leak.paths[:6]) + (f"\nand {len(leak.paths) - 6} more" if len(leak.paths) > 6 else ""),
            f"{leak.n_storages:,}",
            leak.site or "n/a",
            leak.advice,
        )
        for leak in leaks
    ]


def scope_html(result):
    """What a scope allocated, and what of it outlives the scope."""
    from unhand._scope_answer import peak

    size = _native.format_bytes
    parts = [f'<div style="{_FONT}"><b>{escape(result.headline())}</b></div>']
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
        parts.append(table_html(("device", "allocated", "reserved", "peak inside"), rows))
    for title, leaks in (("", result.survivors), ("not counted", result.excused)):
        if leaks:
            parts.append(f'<div style="{_FONT}">{title}</div>' if title else "")
            parts.append(table_html(_LEAK_HEADERS, leak_rows(leaks), "rllrll"))
    if result.tree.children:
        lines = escape("\n".join(result.tree.lines()))
        parts.append(f'<div style="{_FONT}">allocated inside</div><pre style="{_FONT};margin:4px 0">{lines}</pre>')
    parts += [f'<div style="{_FONT}">{escape(note)}</div>' for note in result.notes]
    return "".join(parts)
