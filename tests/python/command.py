"""The `unhand` command as the wheel starts it: through Python, and in every other way like the binary."""

import ctypes
import fcntl
import json
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from bench import main
from unhand import _native

ROOT = Path(__file__).resolve().parents[2]
RECORDING = "tests/snapshots/leak.default.pickle.xz"
COMMAND = [sys.executable, "-m", "unhand"]


def unhand(*arguments, **options):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run([*COMMAND, *arguments], **options)


def recorded():
    with open(ROOT / RECORDING.replace(".pickle.xz", ".json"), encoding="utf-8") as file:
        return json.load(file)["stats"]


def check_version_and_help_have_the_command_s_name():
    outcome = unhand("--version")
    assert outcome.returncode == 0 and outcome.stdout.startswith("unhand "), outcome
    outcome = unhand("explain", "--help")
    assert "Usage: unhand explain [OPTIONS] <FILE>..." in outcome.stdout, outcome


def check_every_subcommand_answers():
    commands = [["explain", RECORDING], ["replay", RECORDING], ["diff", RECORDING, RECORDING], ["flame", RECORDING],
                ["export", RECORDING, "--to", "csv"]]
    for arguments in commands:
        outcome = unhand(*arguments)
        assert outcome.returncode == 0 and outcome.stdout and not outcome.stderr, (arguments, outcome)


def check_the_figures_are_pytorch_s():
    answer = json.loads(unhand("explain", "--json", RECORDING).stdout)
    peak = answer["explanations"][0]["peak"]["allocated"]["peak_bytes"]
    assert peak == recorded()["allocated_bytes.all.peak"], peak


def check_the_module_exports_nothing_of_cuda():
    # It carries the stand-in's library inside. If it were one itself, whoever loads it globally would be on it.
    library = ctypes.CDLL(_native.__file__)
    exported = [name for name in ("cudaMalloc", "cuMemCreate", "nvmlInit_v2") if hasattr(library, name)]
    assert not exported, exported


def check_exit_codes():
    assert unhand("explain", "--fail-on", "leak", RECORDING).returncode == 1
    assert unhand("explian").returncode == 2
    outcome = unhand("explain", "not-there.pickle")
    assert outcome.returncode == 3 and outcome.stderr.startswith("error: cannot read: `not-there.pickle`"), outcome


def check_the_doctor_asks_the_interpreter_that_runs_it():
    answer = json.loads(unhand("doctor", "--json").stdout)
    assert answer["python"]["executable"] == sys.executable, answer["python"]
    assert answer["python"]["version"] == "%d.%d.%d" % sys.version_info[:3]
    named = json.loads(unhand("doctor", "--json", "--python", "python3-of-nobody").stdout)
    assert named["python"] is None


def check_a_name_that_is_not_utf8():
    outcome = unhand("explain", b"\xff.pickle", text=False)
    assert outcome.returncode == 3 and b"No such file" in outcome.stderr, outcome


def check_a_reader_who_goes_away():
    # The table is longer than a pipe holds.
    process = subprocess.Popen([*COMMAND, "export", RECORDING, "--to", "csv"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline().endswith(b"\n")
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), stderr) == (0, b""), stderr


def check_ctrl_c_ends_it_at_once():
    # It waits for the end of its input, which never comes.
    process = subprocess.Popen([*COMMAND, "explain", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until_it_reads(process)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(30) == -signal.SIGINT
        assert process.stderr.read() == b"", "a traceback for a user who wanted to stop"
    finally:
        process.kill()
        process.communicate()


def wait_until_it_reads(process):
    """Return once the process has taken a byte from its input: then it is in native code."""
    process.stdin.write(b"\x80")
    process.stdin.flush()
    for _ in range(600):
        if not pending(process.stdin.fileno()):
            return
        time.sleep(0.05)
    raise AssertionError("nobody reads")


def pending(pipe):
    """How many bytes are in a pipe and not yet read."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def check_other_threads_go_on_meanwhile():
    # One thread waits for its input inside native code; the input comes from another thread of the same process.
    program = f"""
import lzma, os, sys, threading
from unhand import _native
reading, writing = os.pipe()
os.dup2(reading, 0)
codes = []
thread = threading.Thread(target=lambda: codes.append(_native.main(["unhand", "explain", "--json", "-"])))
thread.start()
with lzma.open({str(ROOT / RECORDING)!r}) as source, open(writing, "wb") as pipe:
    pipe.write(source.read())
thread.join()
sys.exit(codes[0])
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0 and json.loads(outcome.stdout)["explanations"], outcome


def check_the_module_can_be_called_twice():
    program = "from unhand import _native; print([_native.main(['unhand', 'explain', 'not-there']) for _ in range(2)])"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert outcome.stdout == "[3, 3]\n" and outcome.stderr.count("error: cannot read") == 2, outcome


def check_sizes_are_written_in_one_way():
    assert [_native.format_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


if __name__ == "__main__":
    main(globals())
