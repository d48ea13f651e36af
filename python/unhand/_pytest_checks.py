"""What happens around each test of a session in which something is measured: limits, leaks, recordings."""

import gc
import os
import pickle
import re
import sys
from dataclasses import dataclass, field

import pytest

from unhand import _allocator, _counters, _pytest_leaks, _pytest_peaks, _pytest_summary, _sizes
from unhand._native import format_bytes

KINDS = ("allocated", "reserved")


@dataclass(slots=True)
class Limit:
    """What the mark `limit_gpu` says."""

    bytes: int
    kind: str


@dataclass(slots=True)
class LeakRule:
    """What the mark `no_gpu_leak` says."""

    allowed_bytes: int = 0
    collect: bool = True
    n_warmups: int = 0


@dataclass(slots=True, eq=False)
class Test:
    """One run of one test, and what was found."""

    limit: Limit | None
    rule: LeakRule | None
    is_measured: bool
    is_asked: bool
    """Whether it has the fixture `gpu_memory`."""
    recording: "_pytest_peaks.Recording | None" = None
    watch: "_pytest_leaks.Watch | None" = None
    peaks: tuple = ()
    verdict: "_pytest_leaks.Verdict | None" = None
    has_failed: bool = False
    notes: list = field(default_factory=list)

    def to_dict(self) -> dict:
        """What travels with the report of the test: plain values."""
        return {
            "is_measured": self.is_measured,
            "peaks": [peak.to_dict() for peak in self.peaks],
            "limit_bytes": self.limit.bytes if self.limit is not None else None,
            "is_checked_for_leaks": self.verdict is not None,
            "leaks": [leak.to_dict() for leak in self.verdict.leaks] if self.verdict is not None else [],
            "collected_bytes": self.verdict.collected_bytes if self.verdict is not None else 0,
            "notes": self.notes,
        }


class Checks:
    """The hooks. Around everything else, so that what other plugins do for a test is the test's."""

    def __init__(self, config):
        options = self.options = config.option
        self.no_leak = options.gpu_no_leak
        self.all_measured = bool(
            options.gpu_most_allocations is not None or options.gpu_report_json or options.gpu_recording
        )
        self.last_peaks = {}
        if options.gpu_fail_on_increase and hasattr(config, "cache"):
            self.last_peaks = config.cache.get(_pytest_summary.CACHE_KEY, {})
        self.adopted = {}
        """What fixtures that outlive a test have; see `_pytest_leaks.Watch`."""
        self.test: Test | None = None
        self._has_gpu = None

    # The test

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.test, error = None, None
        try:
            self.test = self._of(item)
        except (TypeError, ValueError) as wrong:
            error = wrong
        if self.test is not None and self.test.rule is not None:
            self.test.watch = _pytest_leaks.Watch(self.adopted)
            self.test.watch.start()
        outcome = yield
        if error is not None:
            _force(outcome, error)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        test = self.test
        if test is None:
            yield
            return
        self._before_call(item, test)
        outcome = yield
        if test.recording is not None:
            test.peaks = test.recording.stop(lambda peak: self._is_enough(test, item, peak))
            self._keep(item, test)
            if outcome.excinfo is None:
                too_much = self._too_much(item, test)
                if too_much:
                    _force(outcome, _failure(too_much))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        test = self.test
        if test is None or outcome.excinfo is not None:
            return
        report = outcome.get_result()
        test.has_failed |= not report.passed
        if call.when != "teardown":
            return
        # Everything else is done with the test: after this pytest drops the values of its fixtures, and so may we.
        if test.watch is not None and not test.has_failed:
            test.verdict = test.watch.finish(
                test.rule.allowed_bytes, collect=test.rule.collect, let_go=lambda: _let_go_of_fixtures(item)
            )
            if test.verdict.leaks:
                _fail(item, report, "\n".join(f"{item.name} {leak}" for leak in test.verdict.leaks))
        if self._is_without_gpu():
            test.notes.append("no GPU: torch.cuda.is_available() is False")
        report.unhand_gpu = test.to_dict()
        self.test = None

    # Fixtures

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function" or fixturedef in self.adopted:
            yield
            return
        watch = self.test.watch if self.test is not None else None
        with (watch or _pytest_leaks.Watch(self.adopted)).adopting(fixturedef):
            yield

    def pytest_fixture_post_finalizer(self, fixturedef):
        if fixturedef in self.adopted:
            watch = self.test.watch if self.test is not None else None
            (watch or _pytest_leaks.Watch(self.adopted)).release(fixturedef)

    # The parts

    def _of(self, item) -> Test | None:
        """What is wanted of a test; None if nothing is. ValueError and TypeError for marks that make no sense."""
        limit_mark, leak_mark = item.get_closest_marker("limit_gpu"), item.get_closest_marker("no_gpu_leak")
        limit = _limit(*limit_mark.args, **limit_mark.kwargs) if limit_mark is not None else None
        rule = _rule(*leak_mark.args, **leak_mark.kwargs) if leak_mark is not None else None
        if rule is None and self.no_leak:
            rule = LeakRule()
        is_asked = "gpu_memory" in getattr(item, "fixturenames", ())
        is_measured = self.all_measured or limit is not None or is_asked
        return Test(limit, rule, is_measured, is_asked) if is_measured or rule is not None else None

    def _before_call(self, item, test):
        if test.watch is not None:
            if any(hasattr(sys, name) for name in ("last_traceback", "last_value")):
                # pytest drops these in a moment. What the failed test had goes now, not in favour of this one.
                test.watch.rebase(_pytest_leaks.forget_last_error)
            if test.rule.n_warmups:
                with test.watch.adopting():
                    for _ in range(test.rule.n_warmups):
                        item.runtest()
                    gc.collect()
        if test.is_measured:
            test.recording = _pytest_peaks.Recording(self.options.gpu_stacks, with_sites=self._wants_sites(test))
            test.recording.start()

    def _wants_sites(self, test) -> bool:
        options = self.options
        return bool(
            test.limit or test.is_asked or options.gpu_most_allocations is not None or options.gpu_recording
        )

    def _is_enough(self, test, item, peak) -> bool:
        """Whether the counters say enough about a test, so that its history need not be read."""
        options = self.options
        if options.gpu_recording or options.gpu_most_allocations is not None:
            return False
        if (options.gpu_fail_on_increase or options.gpu_report_json) and not peak.is_exact:
            return False
        if self._increase(item, peak):
            return False
        if test.limit is None:
            return True
        most = peak.allocated_at_most_bytes if test.limit.kind == "allocated" else peak.reserved_bytes
        return most is not None and most <= test.limit.bytes

    def _increase(self, item, peak) -> int:
        """By how many bytes a peak is over that of the last successful run; 0 if it is not, or nobody knows."""
        last = self.last_peaks.get(item.nodeid, {}).get(str(peak.device))
        if last is None or peak.allocated_bytes is None:
            return 0
        return max(peak.allocated_bytes - last, 0)

    def _too_much(self, item, test) -> str:
        """Why a test that passed fails for what it used; empty if it does not."""
        found = []
        for peak in test.peaks:
            if test.limit is not None:
                found += _over(item, peak, test.limit, test.notes)
            increase = self._increase(item, peak)
            if increase and not found:
                text = f"{item.name} had {format_bytes(peak.allocated_bytes)} of GPU memory allocated at its peak on "
                text += f"cuda:{peak.device}, {format_bytes(increase)} more than in its last successful run"
                found.append("\n".join([text, *site_lines(peak.sites)]))
        return "\n".join(found)

    def _keep(self, item, test):
        if self.options.gpu_recording and test.recording.look is not None:
            os.makedirs(self.options.gpu_recording, exist_ok=True)
            name = re.sub(r"[^\w.\[\]-]+", "_", item.nodeid)
            with open(os.path.join(self.options.gpu_recording, f"{name}.pickle"), "wb") as file:
                pickle.dump(test.recording.look, file, protocol=4)
        test.recording = None

    def _is_without_gpu(self) -> bool:
        """Whether PyTorch is there and no GPU is. Without PyTorch there is nothing to check."""
        if self._has_gpu is None and "torch" in sys.modules:
            self._has_gpu = _allocator.started_torch() is not None or sys.modules["torch"].cuda.is_available()
        return self._has_gpu is False

    def gpu_memory(self):
        """What the fixture of that name gives."""
        return GpuMemory(self.test)


class GpuMemory:
    """GPU memory of the running test, counted from where its function began; in fixtures, from where they asked."""

    def __init__(self, test):
        self._test = test
        self._before = _counters.read_all()

    def counters(self, device=None):
        """The counters of PyTorch's allocator now; None where CUDA has not been started on the device."""
        return _counters.read_all().get(_index(device))

    def grown_bytes(self, device=None) -> int:
        """How much more is allocated than when the test asked for this fixture; less than 0 if it is less."""
        now, before = self.counters(device), self._before.get(_index(device))
        return (now.allocated_bytes if now else 0) - (before.allocated_bytes if before else 0)

    def peak_bytes(self, device=None) -> int | None:
        """The peak of allocated bytes so far, above what was there when the test function began; None if unknown."""
        peak = self._peak(device, lambda peak: peak.is_exact)
        return peak.allocated_bytes if peak is not None else 0

    def sites(self, device=None) -> tuple:
        """The lines that had memory at that peak, the most first: `.place`, `.requested_bytes`, `.n_blocks`."""
        peak = self._peak(device, lambda peak: False)
        return peak.sites if peak is not None else ()

    def _peak(self, device, is_enough):
        recording = self._test.recording if self._test is not None else None
        if recording is None:
            return None
        return next((peak for peak in recording.so_far(is_enough) if peak.device == _index(device)), None)





def _limit(limit, *, kind="allocated") -> Limit:
    if kind not in KINDS:
        raise ValueError(f"limit_gpu: no such kind: `{kind}` (one of {', '.join(KINDS)})")
    return Limit(_sizes.parse(limit), kind)


def _rule(allow=0, *, collect=True, warmups=0) -> LeakRule:
    return LeakRule(_sizes.parse(allow), bool(collect), int(warmups))


def _over(item, peak, limit, notes):
    used = peak.allocated_bytes if limit.kind == "allocated" else peak.reserved_bytes
    if used is None:
        at_most = peak.allocated_at_most_bytes if limit.kind == "allocated" else None
        if at_most is None or at_most > limit.bytes:
            notes.append("its peak is not known: the history of allocations is in use by somebody else")
        return
    if used > limit.bytes:
        word = "" if peak.is_exact else "at least "
        yield "\n".join(
            [
                f"{item.name} had {word}{format_bytes(used)} of GPU memory {limit.kind} at its peak on cuda:{peak.device}, "
                f"{format_bytes(used - limit.bytes)} over its limit of {format_bytes(limit.bytes)}",
                *site_lines(peak.sites),
            ]
        )


def site_lines(sites, limit=5) -> list[str]:
    """Sites as lines of text."""
    if not sites:
        return []
    lines = ["requested at the peak by"]
    for site in sites[:limit]:
        blocks = "1 block" if site.n_blocks == 1 else f"{site.n_blocks:,} blocks"
        lines.append(f"  {format_bytes(site.requested_bytes):>10}  {site.place}  ({blocks})")
    more = sum(site.requested_bytes for site in sites[limit:])
    if more:
        lines.append(f"  {format_bytes(more):>10}  in {len(sites) - limit} more places")
    return lines


def _let_go_of_fixtures(item):
    if getattr(item, "funcargs", None):
        item.funcargs = {}


def _index(device) -> int:
    if device is None:
        torch = _allocator.started_torch()
        return torch.cuda.current_device() if torch is not None else 0
    if isinstance(device, int):
        return device
    return int(str(device).rpartition(":")[2])


def _failure(text) -> BaseException:
    return pytest.fail.Exception(text, pytrace=False)


def _force(outcome, error):
    """Make a hook fail, whatever it did."""
    force = getattr(outcome, "force_exception", None)
    if force is not None:
        force(error)
    else:
        outcome._excinfo = (type(error), error, error.__traceback__)


def _fail(item, report, text):
    """Turn a report into a failure with these words."""
    try:
        raise _failure(text)
    except pytest.fail.Exception:
        caught = pytest.ExceptionInfo.from_current()
    if report.passed:
        report.outcome, report.longrepr = "failed", item.repr_failure(caught)
