"""The pytest plugin: limits and leak checks for GPU memory, and the figures of a session. Loading it imports no PyTorch.

    @pytest.mark.limit_gpu("2 GiB")     # fails if the test had more than that above what was there
    @pytest.mark.no_gpu_leak            # fails if memory of the test is alive after it, and says who holds it

    pytest --gpu-no-leak --gpu-most-allocations=5
    pytest --standin                    # the whole session on a machine without a GPU

docs/guides/pytest.md explains all of it.
"""

import pytest

MARKS = ("limit_gpu", "no_gpu_leak")

_MARKERS = (
    'limit_gpu(limit, *, kind="allocated"): fail if the test has more GPU memory at its peak than limit, such as '
    '"2 GiB", above what was there when it began, on any device; kind is allocated or reserved',
    "no_gpu_leak(allow=0, *, collect=True, warmups=0): fail if GPU memory that was allocated during the test is alive "
    "after it; allow such as \"1 MiB\" may stay, collect=False lets dead cycles fail too, warmups runs the test function "
    "so often before",
)


def pytest_addoption(parser):
    group = parser.getgroup("gpu memory", "GPU memory (unhand)")
    add = group.addoption
    add("--gpu-no-leak", action="store_true", help="Fail every test that leaves GPU memory behind.")
    add(
        "--gpu-most-allocations",
        type=int,
        metavar="N",
        help="Show the N tests with the largest peaks of GPU memory, and the lines that had it (N=0 for all).",
    )
    add(
        "--gpu-fail-on-increase",
        action="store_true",
        help="Fail a test with a measured peak (all with limit_gpu) if it is larger than in its last successful run.",
    )
    add("--gpu-stacks", type=int, default=1, metavar="N", help="Show N frames for each place that had memory.")
    add("--gpu-report-json", metavar="PATH", help="Measure all tests and write the figures to PATH.")
    add("--gpu-recording", metavar="DIR", help="Write the history of each measured test into DIR, for `unhand explain`.")
    add("--standin", action="store_true", help="Run the session on the stand-in: the real PyTorch, and no GPU.")
    add("--standin-gpu", metavar="NAME", help="The GPU that is stood in for, such as h200; turns --standin on.")
    add("--standin-memory", metavar="SIZE", help="Memory of each device, such as 24GiB; turns --standin on.")
    add("--standin-devices", metavar="N", help="How many devices; turns --standin on.")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config):
    # Outermost and before anything else: nothing is captured yet, and no conftest has imported PyTorch.
    options = early_config.known_args_namespace
    if any(getattr(options, name, None) for name in ("standin", "standin_gpu", "standin_memory", "standin_devices")):
        from unhand import _pytest_standin

        try:
            _pytest_standin.restart(early_config, options)
        except _pytest_standin.Unavailable as error:
            raise pytest.UsageError(f"--standin: {error}") from None
    yield


def pytest_configure(config):
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if not hasattr(config, "workerinput"):
        from unhand import _pytest_summary

        config.pluginmanager.register(_pytest_summary.Summary(config), "unhand-summary")


def pytest_collection_finish(session):
    """Hooks around tests exist only in sessions that want something measured."""
    config = session.config
    if config.pluginmanager.has_plugin("unhand-checks"):
        return
    options = config.option
    wants_all = options.gpu_no_leak or options.gpu_most_allocations is not None or options.gpu_report_json
    if wants_all or options.gpu_recording or any(_wants_something(item) for item in session.items):
        from unhand import _pytest_checks

        config.pluginmanager.register(_pytest_checks.Checks(config), "unhand-checks")


def _wants_something(item) -> bool:
    if "gpu_memory" in getattr(item, "fixturenames", ()):
        return True
    return any(item.get_closest_marker(name) is not None for name in MARKS)


@pytest.fixture
def gpu_memory(request):
    """GPU memory of this test so far: `grown_bytes()`, `peak_bytes()`, `sites()`, `counters()`, each with `device=None`."""
    checks = request.config.pluginmanager.get_plugin("unhand-checks")
    return checks.gpu_memory()


@pytest.fixture
def standin(request, tmp_path):
    """Runs a function of the test file, or a program, on the stand-in: `standin.run(function, *args, devices=2)`."""
    from unhand import _pytest_standin

    try:
        _pytest_standin.command()
    except _pytest_standin.Unavailable as error:
        pytest.skip(f"no stand-in: {error}")
    return _pytest_standin.Standin(tmp_path, request.node.nodeid)
