"""What answers look like as HTML: whole, escaped, readable without styles, with nothing to load. Needs no torch."""

import dataclasses
import os
import sys
from html.parser import HTMLParser

HERE = os.path.dirname(os.path.abspath(__file__))
# At the end: a folder named torch, which is not PyTorch, is beside this file.
sys.path += [os.path.join(HERE, "..", "standin"), HERE]

from bench import main
from ladder_text import EXAMPLE, UNKNOWN

from unhand import _actions, _compact, _footer, _free, _html, _see, _survivors, _verdict
from unhand._holders import Holder, Part

MIB = 1 << 20
# What a dictionary's key, a cell's name or a device may be called.
HOSTILE = '<script>alert("x")</script>&\'\u202e\x00\ud800'


class Checker(HTMLParser):
    """Whether every element is closed in order, nothing is loaded or run, and heads say what they are heads of."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.tags, self.labels = [], [], set(), []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.add(tag)
        names = dict(attributes)
        assert set(names) <= {"style", "title", "role", "aria-label", "scope"}, names
        for value in names.values():
            assert "url(" not in value and "javascript:" not in value and "\u202e" not in value
        assert tag != "th" or names.get("scope") in ("col", "row")
        if names.get("role") == "img":
            self.labels.append(names["aria-label"])
        # Themes are the host's: no colour for text, and no background but grey and that of the bar's parts.
        style = names.get("style", "")
        assert "color:inherit" in style or ";color:" not in f";{style.replace('background-color', '')}", style

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def parse(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == [] and checker.tags <= {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "br", "wbr"}
    html.encode("utf-8")
    return checker


def holder(path="__main__.model", **changes):
    values = {
        "path": path, "paths": (path,), "kind": "parameters", "type": "Linear", "bytes": 5 * MIB, "n_storages": 2,
        "device": 0, "is_alone": True, "advice": "unhand.free(model) gives it back.",
    }
    return Holder(**{**values, **changes})


def report(**changes):
    values = {
        "ladder": EXAMPLE, "holders": (holder(),), "more_holders_bytes": 0, "named_bytes": 5 * MIB, "garbage_bytes": 0,
        "unattributed_bytes": 0, "unattributed": (),
    }
    return _see.Report((_see.DeviceReport(**{**values, **changes}),))


def check_a_ladder_is_whole_and_escaped():
    page = parse(_html.ladder_html(dataclasses.replace(EXAMPLE, name=HOSTILE)))
    assert '<script>alert("x")</script>&\'\\u202e\\x00\\ud800' in page.text
    for words in ("returnable 26.9 GiB", "stuck 614.4 MiB", "outside PyTorch 614.4 MiB", "torch.cuda.empty_cache()"):
        assert words in page.text, words
    assert "n/a" in parse(_html.ladder_html(UNKNOWN)).text
    (label,) = page.labels
    assert "returnable 26.9 GiB" in label and "allocated 12.3 GiB" in label, "the bar says what it shows"


def check_tables_for_others():
    page = parse(_html.table_html(("holder", "bytes"), [("<b>x</b>", 5), ("y", None)], "lr"))
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert page.words == ["holder", "bytes", "<b>x</b>", "5", "y", "n/a"]
    page = parse(_html.table_html(("a", "b", "c"), [("x", "", 1), ("y", _html.Lines([""]), 2)], "llr"))
    assert page.words == ["a", "c", "x", "1", "y", "2"], "a column that says nothing is left out"
    page = parse(_html.table_html((), [("used", 5)], "lr"))
    assert "thead" not in page.tags and "th" in page.tags


def check_the_bar_never_overflows():
    html = _html.bar_html([("allocated", 30), ("stuck", 0), ("returnable", 90)], 100, "x")
    widths = [float(part.split("%")[0]) for part in html.split(";width:")[1:] if "%" in part]
    assert sum(widths) <= 100.01 and len(widths) == 2, widths


def check_a_small_process_on_a_large_device_is_seen():
    small = dataclasses.replace(
        EXAMPLE, others_bytes=0, outside_bytes=30 * MIB, allocated_bytes=60 * MIB, stuck_bytes=0, kept_by_pools_bytes=0,
        returnable_bytes=10 * MIB,
    )
    html = _html.ladder_bar(small)
    assert "width:60.000%" in html and "the bar is what is in use: 0.1 % of it" in parse(html).text
    assert "the bar is" not in parse(_html.ladder_bar(EXAMPLE)).text


def check_a_report_has_all_that_its_text_has():
    parts = (Part(".weight", "Parameter", 4 * MIB, 1), Part(".bias", "", MIB, 1))
    found = report(
        holders=(holder(HOSTILE, paths=(HOSTILE, *(f"also_{n}" for n in range(9))), parts=parts),),
        more_holders_bytes=7 * MIB, unattributed_bytes=3 * MIB, unattributed=(_see.Site("train.py:7 step()", 2 * MIB, 1234),),
    )
    page = parse(found._repr_html_())
    for words in ("7.0 MiB", "in more holders", "3.0 MiB", "unattributed", "no Python object leads to it",
                  "train.py:7 step()", "2.0 MiB", "1,234", "also also_1", "and 4 more", "4.0 MiB .weight (1)", "\\u202e"):
        assert words in page.text, words
    assert "script" not in page.tags
    assert "no GPU memory" in parse(_see.Report(())._repr_html_()).text


def check_holders_without_a_count_have_no_column_for_it():
    found = _see.HolderList("Tensor", 5 * MIB, (holder(n_storages=0, device=None),))
    page = parse(found._repr_html_())
    assert "storages" not in page.text and "Tensor, 5.0 MiB on GPUs" in page.text
    assert "nothing holds it" in parse(_see.HolderList("Tensor", 0, ())._repr_html_()).text


def freed(**changes):
    values = {
        "returned_bytes": 6 * MIB, "freed_bytes": 5 * MIB, "n_storages": 2, "shared": (), "kept": (),
        "unattributed_bytes": 0, "before": (EXAMPLE,), "after": (dataclasses.replace(EXAMPLE, allocated_bytes=MIB),),
        "actions": (), "dry_run": False, "seconds": 0.1,
    }
    return _free.Freed(**{**values, **changes})


def check_what_was_freed_is_told_with_what_was_done():
    actions = (
        _actions.Action("tracebacks", "RuntimeError in sys.last_value", 5 * MIB, None, 3),
        _actions.Action("empty_cache", "", None, "a CUDA graph is being captured"),
        _actions.Action("collect", "0 unreachable objects", 0, None, 0),
    )
    kept = tuple(holder(f"kept_{n}") for n in range(11))
    page = parse(freed(actions=actions, kept=kept, shared=(holder(HOSTILE),), unattributed_bytes=9 * MIB)._repr_html_())
    for words in ("12.3 GiB → 1.0 MiB", "RuntimeError in sys.last_value", "not done: a CUDA graph is being captured",
                  "not touched", "15.0 MiB", "in 3 more holders", "unattributed", "9.0 MiB"):
        assert words in page.text, words
    assert "0 unreachable" not in page.text
    page = parse(freed(dry_run=True)._repr_html_())
    assert "nothing was done" in page.text and "table" not in page.tags


def check_a_compaction_has_its_table_and_its_sentences():
    usage = _compact.Usage(9 * MIB, 3 * MIB, 4 * MIB, 2 * MIB)
    answer = _compact.Compacted(
        device=0, is_dry_run=False, before=usage, after=dataclasses.replace(usage, reserved_bytes=5 * MIB), moved_bytes=MIB,
        n_moved=7, n_left=1, passes=1, extra_limit_bytes=MIB, extra_bytes=0, returned_bytes=4 * MIB,
        peak_allocated_bytes=3 * MIB, n_other_allocations=0, seconds=0.1,
        skipped=(_compact.Skipped("a CUDA graph may use it", 2, MIB, "pool <1>"),), note="interrupted",
    )
    page = parse(answer._repr_html_())
    for words in ("moved 7 storages", "before", "reserved", "9.0 MiB", "5.0 MiB", "the driver got back 4.0 MiB",
                  "a CUDA graph may use it (pool <1>)", "interrupted"):
        assert words in page.text, words


def check_a_verdict_has_its_growers():
    grower = _verdict.Grower(**{
        **dict.fromkeys(_verdict.Grower.__slots__), "path": HOSTILE, "paths": (HOSTILE, "loader.kept"), "kind": "container",
        "type": "list", "bytes": 3 * MIB, "n_storages": 3, "bytes_per_step": MIB,
        "site": "train.py:7 step()", "advice": "Clear it.", "is_replaced": False,
    })
    values = dict.fromkeys(_verdict.Verdict.__slots__)
    values |= {"kind": "leak", "device": 0, "step": 20, "growth_bytes_per_step": 1.0 * MIB, "low_bytes_per_step": MIB,
               "high_bytes_per_step": MIB, "growers": (grower,), "unattributed_bytes_per_step": 2.0 * MIB, "advice": ""}
    page = parse(_verdict.Verdict(**values)._repr_html_())
    for words in ("leak on cuda:0", "1.0 MiB a step", "also loader.kept", "train.py:7 step()", "Clear it.", "2.0 MiB a step",
                  "unattributed"):
        assert words in page.text, words
    assert "script" not in page.tags


def leak(path="__main__.model", **changes):
    values = {"site": None, "in_thread": None, **{name: getattr(holder(path), name) for name in Holder.__slots__}}
    del values["is_alone"], values["parts"]
    return _survivors.Leak(**{**values, **changes})


def footer(**changes):
    device = _footer.CellDevice(0, 2 * MIB, 5 * MIB, 20 * MIB, 10 * MIB, 6 * MIB, 6 * MIB, 3)
    values = {
        "name": "train", "seconds": 1.25, "error": None, "devices": (device,), "defined": (), "added": (), "left": (),
        "unattributed_bytes": 0, "note": "",
    }
    return _footer.Footer(**{**values, **changes})


def check_a_footer_tells_results_from_what_was_left():
    answer = footer(
        defined=(leak("__main__.x", kind="global", site="In[3]:2 <module>()"),),
        added=(leak("__main__.losses", kind="autograd graph", advice="A graph hangs on it."),),
        left=tuple(leak(f"lib.cache[{n}]", kind="cache", advice="Clear it.") for n in range(10)),
        unattributed_bytes=MIB, note="not all could be told: the record was overrun",
    )
    words = ("train, 1.25 s", "allocated 5.0 MiB (+3.0 MiB)", "reserved 10.0 MiB (-10.0 MiB)", "peak 6.0 MiB",
             "A graph hangs on it.", "lib.cache[7]", "10.0 MiB", "in 2 more", "unattributed", "allocated at In[3]:2 <module>()", "the record was overrun")
    page, text = parse(answer._repr_html_()), str(answer)
    for word in words:
        assert word in text and word in page.text, word
    assert "defined by the cell" in text and "defined" in page.text and "lib.cache[8]" not in text
    assert "gives it back" not in text, "a result needs no advice"
    assert answer.to_dict()["left"][0]["path"] == "lib.cache[0]" and answer.to_dict()["schema_version"] == 1


def check_a_footer_says_how_the_cell_ended():
    left = (leak("sys.last_value.__traceback__ at In[3]:2 f() local `x`", kind="traceback", type="Tensor"),)
    failed = footer(error="OutOfMemoryError", left=left)
    assert "failed with OutOfMemoryError" in str(failed) and "`%unhand free` lets go of it" in str(failed)
    assert failed.traceback_bytes == 5 * MIB
    assert "interrupted" in str(footer(error="KeyboardInterrupt")) and "%unhand free" not in str(footer(error="ValueError"))
    page = parse(footer(name=HOSTILE, left=left)._repr_html_())
    assert "script" not in page.tags and "sys.last_value.__traceback__ at In[3]:2" in page.text


def check_a_peak_that_was_not_seen_is_a_bound():
    device = _footer.CellDevice(0, 0, 0, 0, 0, None, 8 * MIB, 0)
    assert "peak at most 8.0 MiB (an earlier one)" in str(footer(devices=(device,)))
    assert not footer(devices=(device,)).is_worth_a_line and footer().is_worth_a_line
    assert "no GPU memory" in str(footer(devices=())) and "no GPU memory" in parse(footer(devices=())._repr_html_()).text


if __name__ == "__main__":
    main(globals())
