#!/usr/bin/env python3
"""Build the oracle for every fetched torch release (or the given ones) into build/<version>/.

usage: build.py [--force] [VERSION ...]

Needs g++ with C++20 (Debian: apt-get install g++). Each build holds the fake runtime under the soname and
symbol version that this release's library asks for, and the driver program linked to the library.
Unchanged inputs are not built again.
"""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = ["fake.h", "fake_cudart.cpp", "driver.cpp", "build.py", "shim/cuda.h", "shim/cuda_runtime.h",
           "shim/cuda_runtime_api.h"]


def soname(library):
    """The CUDA runtime that a library wants, read from its string table."""
    with open(library, "rb") as file:
        found = set(re.findall(rb"libcudart\.so\.\d+", file.read()))
    if len(found) != 1:
        raise SystemExit(f"build.py: {library} asks for {sorted(found) or 'no CUDA runtime'}")
    return found.pop().decode()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"build.py: {' '.join(command)}\n{done.stderr}")


def build(version, force):
    wheel = os.path.join(HERE, "cache", version, "torch")
    out = os.path.join(HERE, "build", version)
    inputs = [os.path.join(HERE, s) for s in SOURCES] + [os.path.join(wheel, "lib", "libc10_cuda.so")]
    if not os.path.exists(inputs[-1]):
        raise SystemExit(f"build.py: torch {version} is not in cache/; run fetch.py {version}")
    stamp = os.path.join(out, "STAMP")
    if not force and os.path.exists(stamp) and os.path.getmtime(stamp) >= max(map(os.path.getmtime, inputs)):
        return f"torch {version}: up to date"
    work = out + ".new"
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    for name in os.listdir(os.path.join(wheel, "lib")):
        shutil.copy(os.path.join(wheel, "lib", name), work)
    name = soname(inputs[-1])
    with open(os.path.join(work, "version.map"), "w") as file:
        file.write(f"{name} {{ global: *; }};\n")
    major = int(name.rsplit(".", 1)[1])
    flags = ["g++", "-std=c++20", "-O2", "-g0", f"-DCUDA_VERSION={major}000"]
    run(flags + ["-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={work}/version.map",
                 os.path.join(HERE, "fake_cudart.cpp"), "-o", os.path.join(work, name)])
    run(flags + ["-Wno-attributes", "-isystem", os.path.join(wheel, "include"),
                 "-isystem", os.path.join(HERE, "shim"), os.path.join(HERE, "driver.cpp"),
                 f"-L{work}", "-l:libc10_cuda.so", "-l:libc10.so", f"-l:{name}",
                 "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags", "-o", os.path.join(work, "driver")])
    open(os.path.join(work, "STAMP"), "w").close()
    shutil.rmtree(out, ignore_errors=True)
    os.rename(work, out)
    return f"torch {version}: built"


def main():
    words = sys.argv[1:]
    force = "--force" in words
    if any(w.startswith("-") and w != "--force" for w in words):
        print(__doc__.strip())
        raise SystemExit(0 if {"-h", "--help"} & set(words) else 2)
    cache = os.path.join(HERE, "cache")
    fetched = os.listdir(cache) if os.path.isdir(cache) else []
    versions = [w for w in words if w != "--force"] or sorted(
        v for v in fetched if os.path.exists(os.path.join(cache, v, "COMPLETE")))
    if not versions:
        raise SystemExit("build.py: nothing fetched yet; run fetch.py")
    if not shutil.which("g++"):
        raise SystemExit("build.py: g++ not found (Debian: apt-get install g++)")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda v: build(v, force), versions):
            print(line)


if __name__ == "__main__":
    main()
