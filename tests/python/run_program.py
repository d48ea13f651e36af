"""A program under `unhand run` sees and does what it sees and does under `python`. No PyTorch needed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile

from bench import main

SCRIPT = """
import sys
print(__name__, __file__, __spec__, __package__, type(__loader__).__name__, __builtins__)
print(sys.argv, sys.path[0], sorted(name for name in globals() if name.startswith("__")))
what = sys.argv[1] if sys.argv[1:] else ""
if what == "exit":
    sys.exit(7)
if what == "say":
    sys.exit("goodbye")
if what == "raise":
    def inner():
        raise ValueError("told")
    try:
        {}["x"]
    except KeyError:
        inner()
if what == "hook":
    sys.excepthook = lambda kind, error, traceback: print("hook", kind, traceback.tb_frame.f_code.co_name)
    1 / 0
if what == "atexit":
    import atexit, threading
    atexit.register(print, "at the end", __name__)
    threading.Timer(0.2, lambda: print("thread", sys.modules["__main__"].what)).start()
if what == "spawn":
    pass

def work(number):
    return number * 2

if __name__ == "__main__" and what == "spawn":
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
        # Ended by themselves: what a child prints is lost when it is stopped.
        pool.close()
        pool.join()
if what == "interrupt":
    import time
    print("ready", flush=True)
    time.sleep(60)
"""

FILES = {
    "job.py": SCRIPT,
    "bad.py": "def (\n",
    "pack/__init__.py": "",
    "pack/part.py": "import sys\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0])\n" * 2,
    "folder/__main__.py": "import sys\nprint(__name__, sys.argv, sys.path[0])\n",
}


def folder_of_programs():
    folder = tempfile.TemporaryDirectory()
    for name, text in FILES.items():
        os.makedirs(os.path.dirname(os.path.join(folder.name, name)), exist_ok=True)
        with open(os.path.join(folder.name, name), "w", encoding="utf-8") as file:
            file.write(text)
    with zipfile.ZipFile(os.path.join(folder.name, "archive.zip"), "w") as archive:
        archive.writestr("__main__.py", FILES["folder/__main__.py"])
    os.symlink("../job.py", os.path.join(folder.name, "folder", "link.py"))
    return folder


def outcome_of(folder, *arguments, environment=None):
    environment = dict(os.environ, **(environment or {}))
    outcome = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    # The addresses of objects differ.
    return outcome.returncode, *(re.sub(r"0x[0-9a-f]+", "0x…", text) for text in (outcome.stdout, outcome.stderr))


def same(*program, environment=None):
    """The outcome of a program, which is the same under `unhand run`."""
    with folder_of_programs() as folder:
        plain = outcome_of(folder, *program, environment=environment)
        ours = outcome_of(folder, "-m", "unhand", "run", *program, environment=environment)
        assert plain == ours, f"\n{plain}\n{ours}"
        assert "unhand-oom" not in os.listdir(folder)
        return plain


# What the test runner sets is for its own scripts.
UNSAFE = {"PYTHONSAFEPATH": ""}


def check_a_script():
    code, out, _ = same("job.py", "--limit", "3", "-m", "x", "--", "--help", environment=UNSAFE)
    assert code == 0 and "['job.py', '--limit', '3', '-m', 'x', '--', '--help']" in out, out
    same("folder/link.py", environment=UNSAFE)
    same("job.py", environment={"PYTHONSAFEPATH": "1"})


def check_exit_codes():
    assert same("job.py", "exit")[0] == 7
    assert same("job.py", "say")[::2] == (1, "goodbye\n")


def check_tracebacks():
    code, _, err = same("job.py", "raise")
    assert code == 1 and "KeyError" in err and err.endswith("ValueError: told\n") and "unhand" not in err, err
    assert "hook" in same("job.py", "hook")[1]
    assert "SyntaxError" in same("bad.py")[2]


def check_the_end_of_a_program():
    out = same("job.py", "atexit")[1]
    assert out.endswith("thread atexit\nat the end __main__\n"), out


def check_spawned_children():
    assert "[2, 4]" in same("job.py", "spawn", environment=UNSAFE)[1]


def check_modules_folders_and_archives():
    code, out, _ = same("-m", "pack.part", "a", "-x", environment=UNSAFE)
    assert code == 0 and out.startswith("__main__ pack pack.part"), out
    for program in (["folder", "a"], ["archive.zip", "a"]):
        assert same(*program, environment=UNSAFE)[1].startswith("__main__")
    for program in (["-m", "pack"], ["-m", "not_there"], ["missing.py"], ["pack"]):
        assert same(*program, environment=UNSAFE)[0] in (1, 2)


def check_an_interrupt_ends_it_as_it_ends_python():
    with folder_of_programs() as folder:
        for before in ([], ["-m", "unhand", "run"]):
            process = subprocess.Popen(
                [sys.executable, *before, "job.py", "interrupt"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert "ready\n" in iter(process.stdout.readline, ""), process.communicate()
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert process.returncode == -signal.SIGINT and err.endswith("KeyboardInterrupt\n") and "unhand" not in err, err


def check_torch_is_neither_imported_nor_needed():
    program = "import sys; print('torch' in sys.modules, [name for name in sys.modules if 'unhand' in name and 'run' in name])"
    with folder_of_programs() as folder:
        with open(os.path.join(folder, "ask.py"), "w", encoding="utf-8") as file:
            file.write(program)
        assert outcome_of(folder, "-m", "unhand", "run", "ask.py")[1] == "False ['unhand._run']\n"


def check_a_module_is_watched_without_a_trace():
    """What waits for torch leaves its loader as it was, and the path of finders, too."""
    from unhand import _after_import

    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("later", "import sooner\nVALUE = 1\n"), ("sooner", "")):
            with open(os.path.join(folder, f"{name}.py"), "w", encoding="utf-8") as file:
                file.write(text)
        sys.path.insert(0, folder)
        try:
            seen, finders = [], list(sys.meta_path)
            _after_import.when_imported("later", lambda module: seen.append(module.VALUE))
            _after_import.when_imported("never", seen.append)
            _after_import.forget("never", seen.append)
            import later

            assert seen == [1] and "exec_module" not in vars(later.__loader__), vars(later.__loader__)
            _after_import.when_imported("later", lambda module: seen.append(module))
            assert seen == [1, later] and sys.meta_path == finders
        finally:
            sys.path.remove(folder)
            for name in ("later", "sooner"):
                sys.modules.pop(name, None)


if __name__ == "__main__":
    main(globals())
