#!/usr/bin/env python3
"""Install PyTorch for CUDA, and what it needs, into cache/, with none of NVIDIA's wheels.

usage: fetch.py [VERSION ...]        (default: 2.11.0 2.15.0)

The environment variable UNHAND_STANDIN_CACHE names another folder than cache/ beside this file.

Each version comes into cache/torch-VERSION (0.5 to 0.9 GB to download, 1.2 to 1.7 GB on disk); transformers, NumPy
and the other light packages, which all versions share, into cache/packages (100 MB, 300 MB on disk), and what only some tests use into
folders of their own. A folder appears by a rename when it is complete, and is not touched again. Whatever index pip is configured with is used.
"""

import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.environ.get("UNHAND_STANDIN_CACHE") or os.path.join(HERE, "cache")
DEFAULT = ["2.11.0", "2.15.0"]
# The recordings of GPT-2 were made with this release of transformers.
PACKAGES = ["transformers==5.17.0", "numpy", "filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec",
            "setuptools<82"]
# What only some tests use. Each is a folder of its own, so that an installation from before needs nothing again; a script
# of tests/python names those it wants in a line `# packages: NAME ...`, `checks` is there for all.
MORE = {
    "checks": ["hypothesis==6.170.17"],
    "pytest": ["pytest==9.2.0", "pytest-xdist==3.8.0"],
    # 100 MB on disk, most of it for completion and debugging, which the kernel loads lazily.
    "jupyter": ["ipython==9.18.1", "ipykernel==7.4.0", "nbclient==0.11.0", "nbformat==5.11.1"],
    # Each names PyTorch among its dependencies, so what they need beside `packages` is listed: 25 MB to download.
    "integrations": ["--no-deps", "accelerate==1.15.0", "psutil==7.2.2", "peft==0.21.2", "optuna==5.0.0", "colorlog==6.12.0",
                     "lightning==2.6.6", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0",
                     "diffusers==0.42.1", "importlib_metadata==10.2.0", "zipp==4.1.2", "pillow==13.0.0", "requests==2.34.2",
                     "urllib3==2.8.0", "charset-normalizer==3.5.3"],
}


def install(name, *arguments):
    folder = os.path.join(CACHE, name)
    if os.path.isdir(folder):
        return
    draft = f"{folder}.part"
    shutil.rmtree(draft, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-warn-conflicts",
               "--disable-pip-version-check", "--root-user-action=ignore", "--only-binary", ":all:", "--target", draft,
               *arguments]
    print(f"fetch.py: {name}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True)
    os.rename(draft, folder)


def main():
    os.makedirs(CACHE, exist_ok=True)
    install("packages", *PACKAGES)
    for name, packages in MORE.items():
        install(name, *packages)
    for version in sys.argv[1:] or DEFAULT:
        install(f"torch-{version}", "--no-deps", f"torch=={version}")


if __name__ == "__main__":
    main()
