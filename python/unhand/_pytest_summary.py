"""What a session of tests found: the section at the end, the JSON file, the peaks to compare with next time."""

import json
import os

from unhand._native import format_bytes


class Summary:
    """Gathers what travels with the reports of tests; of the process that prints, not of its workers."""

    def __init__(self, config):
        self.config, self.options = config, config.option
        self.tests: dict[str, dict] = {}
        """Node id to figures, of the last run of each test."""
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report):
        found = getattr(report, "unhand_gpu", None)
        if found is not None:
            self.tests[report.nodeid] = {**found, "outcome": report.outcome}
        elif report.when == "call" and report.failed:
            # Its peak is no measure for the next run.
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        if self.options.gpu_report_json:
            self._write_json(self.options.gpu_report_json)
        if self.options.gpu_fail_on_increase and hasattr(self.config, "cache"):
            self._remember_peaks()

    def pytest_terminal_summary(self, terminalreporter):
        lines = [*self._most(), *self._collected(), *self._unchecked()]
        if lines:
            terminalreporter.section("GPU memory")
            for line in lines:
                terminalreporter.write_line(line)

    def _most(self):
        wanted = self.options.gpu_most_allocations
        if wanted is None:
            return
        measured = []
        for nodeid, test in self.tests.items():
            known = [peak for peak in test["peaks"] if peak["allocated_bytes"]]
            if known:
                measured.append((max(known, key=lambda peak: peak["allocated_bytes"]), nodeid))
        measured.sort(key=lambda one: (-one[0]["allocated_bytes"], one[1]))
        shown = measured[: wanted or None]
        if not shown:
            yield "no test allocated GPU memory"
            return
        n_tests = f"({len(shown)} of {len(self.tests)} tests)"
        yield f"largest peaks of allocated GPU memory, above what was there when the test began {n_tests}"
        for peak, nodeid in shown:
            least = "" if peak["is_exact"] else "at least "
            device = f"  on cuda:{peak['device']}" if peak["device"] else ""
            yield f"{format_bytes(peak['allocated_bytes']):>10}  {least}{nodeid}{device}"
            for site in peak["sites"][:3]:
                blocks = "1 block" if site["n_blocks"] == 1 else f"{site['n_blocks']:,} blocks"
                yield f"{'':12}{format_bytes(site['requested_bytes']):>10}  {site['place']}  ({blocks})"

    def _collected(self):
        found = [(test["collected_bytes"], nodeid) for nodeid, test in self.tests.items() if test["collected_bytes"]]
        if found:
            yield "left to the garbage collector: dead cycles had it, until a pass was made for the check"
            for n_bytes, nodeid in sorted(found, reverse=True):
                yield f"{format_bytes(n_bytes):>10}  {nodeid}"

    def _unchecked(self):
        reasons: dict[str, list[str]] = {}
        for nodeid, test in self.tests.items():
            for note in test["notes"]:
                reasons.setdefault(note, []).append(nodeid)
        for note, nodeids in reasons.items():
            tests = nodeids[0] if len(nodeids) == 1 else f"{len(nodeids)} tests"
            yield f"not checked: {tests}: {note}"

    def _write_json(self, path):
        tests = [{"nodeid": nodeid, **test} for nodeid, test in sorted(self.tests.items())]
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"schema_version": 1, "tests": tests}, file, indent=1)
            file.write("\n")

    def _remember_peaks(self):
        peaks = self.config.cache.get(CACHE_KEY, {})
        for nodeid, test in self.tests.items():
            if nodeid not in self.failed and test["outcome"] == "passed" and test["peaks"]:
                exact = [peak for peak in test["peaks"] if peak["is_exact"]]
                peaks[nodeid] = {str(peak["device"]): peak["allocated_bytes"] for peak in exact}
        self.config.cache.set(CACHE_KEY, peaks)


CACHE_KEY = "unhand/gpu_peaks"
