"""Who holds it, asked of unhand, objgraph, guppy3 and pytorch_memlab: `python3 compare.py [OBJECTS] [QUESTION]`.

Each question is asked in a process of its own with the same objects in it (`scene.py`), in one run of this program. A
question that gets no answer within ten minutes is stopped. With a question, that one only, and the answer in full.
"""

import gc
import json
import subprocess
import sys
import time
import weakref

import tools

LIMIT_SECONDS = 600
N_OBJECTS = 1_000_000


def _sizes():
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: line.split()[1] for line in file if line.startswith("Vm")}


def _begin_peak():
    """Forget the peak so far; the resident size now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return int(_sizes()["VmRSS"])


def ask(question, n_objects):
    """Make the scene, ask, and say what it took and whether the answer is right."""
    import scene

    scene.make_crowd(n_objects)
    scene.plant()
    gc.collect()
    about = [scene.hidden] if question.endswith("holders") else []
    before = len(gc.get_objects())
    resident = _begin_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        text, n_bytes = tools.QUESTIONS[question](*about)
    except Exception as error:
        text, n_bytes = f"{type(error).__name__}: {error}", None
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    extra = int(_sizes()["VmHWM"]) - resident
    kept = weakref.ref(scene.hidden())
    scene.clear()
    gc.collect()
    return {
        "question": question,
        "n_objects": before,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "extra_mib": extra / 1024,
        "bytes": n_bytes,
        "leaves_reference": kept() is not None,
        "text": text,
    }


def judge(answer):
    """What of the truth is in an answer."""
    import scene

    text = answer["text"]
    is_report = answer["question"].endswith("report")
    # The variable that leads to the tensor, by name.
    names = "registry" in text
    # The whole way: the keys, the attribute, that it is closed over, the place in the list.
    way = names and all(word in text for word in ("jobs", "handlers", "on_step", "closure", "[1]"))
    row = {"variable named": names, "each step named": way}
    if is_report:
        expected = scene.HIDDEN_BYTES + scene.LOCAL_BYTES + scene.SAVED_BYTES
        # Beside these there are only scalars, of 512 bytes each.
        row["all bytes"] = answer["bytes"] is not None and 0 <= answer["bytes"] - expected < 4096
        row["generator named"] = "pending" in text and "inside" in text
        row["saved by autograd"] = "losses" in text and row["all bytes"]
    else:
        row["retained bytes"] = answer["bytes"] == scene.HIDDEN_BYTES
    return row


def main(n_objects, only):
    for question in [only] if only else tools.QUESTIONS:
        command = [sys.executable, __file__, "--ask", question, str(n_objects)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            print(f"{question:22}  no answer within {LIMIT_SECONDS} s", flush=True)
            continue
        answer = json.loads(done.stdout.splitlines()[-1])
        if only:
            print(answer["text"])
        facts = ", ".join(f"{name}: {'yes' if is_so else 'no'}" for name, is_so in judge(answer).items())
        print(
            f"{question:22} {answer['cpu_seconds']:8.2f} CPU-s {answer['wall_seconds']:8.2f} s "
            f"{answer['extra_mib']:7.0f} MiB  says {answer['bytes']} bytes; {facts}; "
            f"leaves a reference: {'yes' if answer['leaves_reference'] else 'no'} ({answer['n_objects']:,} objects)",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        print(json.dumps(ask(sys.argv[2], int(sys.argv[3]))))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else N_OBJECTS, sys.argv[2] if sys.argv[2:] else None)
