#!/usr/bin/env python3
"""Pictures of a notebook's outputs in a real browser, light and dark, wide and narrow, and checks that a page can make.

usage: screenshots.py NOTEBOOK.ipynb FOLDER

The notebook is one that ran: `UNHAND_NOTEBOOK=notebook.ipynb` lets tests/python/torch/jupyter.py write it. Needs Chromium
(`chromium`, `chromium-browser`, `google-chrome` on the PATH, or what CHROMIUM names), and says so and ends well without.
The checks: nothing but a frame that scrolls is wider than the page, text has a contrast of 4.5:1, and a picture is named.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

# What a notebook's page does to HTML in it. Tables are where hosts have opinions.
HOSTS = {
    "jupyterlab-light": ("#ffffff", "rgba(0,0,0,.87)", "#f5f5f5"),
    "jupyterlab-dark": ("#111111", "rgba(255,255,255,.87)", "#212121"),
    "vscode-dark": ("#1e1e1e", "#cccccc", "#2a2d2e"),
}
WIDTHS = {"wide": 1200, "narrow": 420}

STYLE = """
body {{ margin: 0; padding: 12px; background: {background}; color: {text}; font: 14px/1.4 system-ui, sans-serif; }}
.output {{ border-left: 3px solid rgba(128,128,128,.4); padding-left: 10px; margin: 0 0 14px; }}
.source {{ font: 12px monospace; white-space: pre-wrap; background: {stripe}; padding: 6px; margin: 0 0 6px; overflow-wrap: anywhere; }}
.output table {{ border-collapse: collapse; border: none; font-size: 12px; table-layout: fixed; margin: 0 auto 1em; }}
.output thead {{ border-bottom: 1px solid {text}; vertical-align: bottom; }}
.output td, .output th, .output tr {{ text-align: right; vertical-align: middle; padding: .5em; line-height: normal;
    white-space: normal; max-width: none; border: none; }}
.output th {{ font-weight: bold; }}
.output tbody tr:nth-child(odd) {{ background: {stripe}; }}
"""

# Says in the page's title what is wrong. `--dump-dom` waits for it.
CHECKS = r"""
const wrong = [];
const parse = (colour) => (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const over = (top, under) => { const a = top.length > 3 ? top[3] : 1; return [0, 1, 2].map((i) => top[i] * a + under[i] * (1 - a)); };
const luminance = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (element) => { const layers = []; for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
  let colour = [255, 255, 255]; for (const layer of layers.reverse()) colour = over(layer.length > 3 ? layer : [...layer, 1], colour); return colour; };
for (const output of document.querySelectorAll(".output")) {
  for (const element of output.querySelectorAll("*")) {
    const scrolls = (() => { for (let at = element; at && at !== output; at = at.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(at).overflowX)) return true; return false; })();
    if (!scrolls && element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
      wrong.push("wider than the page: " + element.outerHTML.slice(0, 160));
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (text && getComputedStyle(element).fontSize !== "0px") {
      const under = behind(element), over_ = over(parse(getComputedStyle(element).color), under);
      const [low, high] = [luminance(under), luminance(over_)].sort((a, b) => a - b);
      const contrast = (high + 0.05) / (low + 0.05);
      if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(1)}: ` + element.outerHTML.slice(0, 160));
    }
    if (element.getAttribute("role") === "img" && !element.getAttribute("aria-label")) wrong.push("a picture without a name");
    if (element.tagName === "TH" && !element.getAttribute("scope")) wrong.push("a head without a scope: " + element.textContent);
  }
  if (output.querySelector("script, img, iframe, link, style, object, embed")) wrong.push("what may load or run something");
}
document.body.dataset.wrong = JSON.stringify(wrong.slice(0, 20));
document.body.dataset.height = document.documentElement.scrollHeight;
"""


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.partition("\n\n")[0] + "\n\nusage: screenshots.py NOTEBOOK.ipynb FOLDER")
    browser = chromium()
    if browser is None:
        print("skipped: there is no Chromium here; set CHROMIUM, or install the package `chromium`")
        return
    notebook, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    found = outputs(notebook)
    if not found:
        sys.exit(f"screenshots.py: no output with HTML in {notebook}")
    failed = 0
    with tempfile.TemporaryDirectory() as profile:
        for host, colours in HOSTS.items():
            for size, width in WIDTHS.items():
                page = os.path.join(profile, f"{host}-{size}.html")
                with open(page, "w", encoding="utf-8") as file:
                    file.write(document(found, *colours))
                wrong, height = check(browser, profile, page, width)
                picture = os.path.join(folder, f"{host}-{size}.png")
                run(browser, profile, page, width, height, f"--screenshot={picture}")
                failed += bool(wrong)
                print(f"{picture}: {len(found)} outputs, {'; '.join(wrong) or 'nothing wrong'}")
    sys.exit(1 if failed else 0)


def chromium():
    """The browser's path, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def outputs(notebook):
    """What the cells showed as HTML, as (source, [HTML])."""
    with open(notebook, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    found = []
    for cell in cells:
        shown = [output.get("data", {}).get("text/html") for output in cell.get("outputs", [])]
        shown = ["".join(one) for one in shown if one]
        if shown:
            found.append(("".join(cell["source"]), shown))
    return found


def document(found, background, text, stripe):
    """A page with all outputs, in the style of a host."""
    parts = []
    for source, shown in found:
        parts.append(f'<div class="source">{html.escape(source)}</div>')
        parts += [f'<div class="output">{one}</div>' for one in shown]
    style = STYLE.format(background=background, text=text, stripe=stripe)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>outputs</title><style>{style}</style>'
        f"<body>{''.join(parts)}<script>{CHECKS}</script></body></html>"
    )


def check(browser, profile, page, width):
    """What the page says is wrong, and how high it is."""
    dom = run(browser, profile, page, width, 900, "--dump-dom")
    wrong = re.search(r'data-wrong="([^"]*)"', dom)
    height = re.search(r'data-height="(\d+)"', dom)
    if wrong is None or height is None:
        return ["the checks did not run"], 4000
    return json.loads(html.unescape(wrong[1])), int(height[1])


def run(browser, profile, page, width, height, *options):
    """What the browser prints. It has no network to ask: the page is a file, and nothing in it is elsewhere."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}/p",
               "--disable-background-networking", f"--window-size={width},{height}", *options, f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"screenshots.py: {browser} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
