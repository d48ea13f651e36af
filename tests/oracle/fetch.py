#!/usr/bin/env python3
"""Fetch the two allocator libraries and the c10 headers of given PyTorch releases into cache/.

usage: fetch.py [VERSION ...]        (default: 2.11.0 2.15.0)

A Linux wheel of torch is about 530 MB, of which the allocator is under 4 MB. A wheel is a zip file, so its
directory (at the end) is read with an HTTP range request, then only the wanted members. Where the server
refuses ranges the whole wheel is streamed to a temporary file and the same members are taken out of it.
Every member is checked against the zip's CRC-32, and a version appears in cache/ by one rename, so an
interrupted run leaves nothing half-done behind and a finished one never touches the network again.
Where the wheel lives is asked of pip (`pip install --dry-run --report`), so whatever index, mirror,
proxy or wheel directory pip is configured with is used. Python's standard library and pip only.
"""

import json
import os
import shutil
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.path.join(HERE, "cache")
DEFAULT = ["2.11.0", "2.15.0"]
# The libraries do not depend on the Python version; the first tag that a release has will do.
PYTHONS = ["3.12", "3.10", "3.11", "3.13"]
GAP = 128 * 1024  # members closer together than this come in one request
TRIES = 4


def wanted(name):
    """Whether a member of the wheel is needed to build and run the oracle."""
    if name in ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so"):
        return True
    if os.path.basename(name).startswith("libgomp"):  # some releases bundle it beside libc10
        return name.startswith(("torch/lib/", "torch.libs/"))
    return name.startswith(("torch/include/c10/", "torch/include/torch/headeronly/")) and name.endswith(".h")


def say(text):
    print(text, file=sys.stderr, flush=True)


def wheel_url(version):
    """Ask pip where the wheel is; nothing is downloaded but the index page and the metadata."""
    last = ""
    for python in PYTHONS:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet",
                   "--report", "-", "--target", os.path.join(CACHE, "never"), "--only-binary", ":all:",
                   "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux1_x86_64",
                   "--python-version", python, f"torch=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)["install"][0]["download_info"]["url"]
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    raise SystemExit(f"fetch.py: pip finds no Linux wheel of torch {version}: {last}")


class Remote:
    """Byte ranges of a wheel over HTTP, with retries; `supported` is False when ranges are refused."""

    def __init__(self, url):
        self.url = url
        bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        self.context = ssl.create_default_context(cafile=bundle) if bundle else ssl.create_default_context()
        self.supported = True
        self.size = 0
        self.received = 0

    def open(self, headers):
        request = urllib.request.Request(self.url, headers={"User-Agent": "unhand-oracle", **headers})
        return urllib.request.urlopen(request, timeout=60, context=self.context)

    def read(self, start, length):
        for attempt in range(TRIES):
            try:
                spec = f"bytes={start}-{start + length - 1}" if start >= 0 else f"bytes=-{length}"
                with self.open({"Range": spec}) as answer:
                    if answer.status != 206:
                        self.supported = False
                        return b""
                    self.size = int(answer.headers["Content-Range"].rsplit("/", 1)[1])
                    data = answer.read()
                if start >= 0 and len(data) != length:
                    raise OSError(f"short answer: {len(data)} of {length} bytes")
                self.received += len(data)
                return data
            except OSError as error:
                if attempt + 1 == TRIES:
                    raise SystemExit(f"fetch.py: {error}") from error
                time.sleep(1 + 2 * attempt)
        return b""

    def whole(self, path):
        """Fallback: stream everything to `path`."""
        with self.open({}) as answer, open(path, "wb") as out:
            total = int(answer.headers.get("Content-Length") or 0)
            while chunk := answer.read(1 << 20):
                out.write(chunk)
                self.received += len(chunk)
                progress(self.received, total)


class Local:
    """The same interface over a file on disk."""

    supported = True

    def __init__(self, path):
        self.file = open(path, "rb")
        self.size = os.path.getsize(path)
        self.received = 0

    def read(self, start, length):
        self.file.seek(start if start >= 0 else max(0, self.size - length))
        return self.file.read(length)


def progress(done, total):
    if sys.stderr.isatty():
        share = f" of {total / 1e6:.1f}" if total else ""
        print(f"\r  {done / 1e6:.1f}{share} MB", end="", file=sys.stderr, flush=True)


def directory(source):
    """Parse the zip's central directory: a list of (name, method, crc, packed, size, header offset)."""
    tail = source.read(-1, 128 * 1024)
    if not source.supported:
        return None
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise SystemExit("fetch.py: the wheel has no zip directory")
    count, length, offset = struct.unpack("<HII", tail[end + 10:end + 20])
    if 0xFFFFFFFF in (length, offset) or count == 0xFFFF:
        locator = tail.rfind(b"PK\x06\x06", 0, end)
        count, length, offset = struct.unpack("<QQQ", tail[locator + 32:locator + 56])
    base = source.size - len(tail)
    raw = tail[offset - base:offset - base + length] if offset >= base else source.read(offset, length)
    entries, at = [], 0
    for _ in range(count):
        (method,) = struct.unpack("<H", raw[at + 10:at + 12])
        crc, packed, size, n, m, k = struct.unpack("<IIIHHH", raw[at + 16:at + 34])
        (header,) = struct.unpack("<I", raw[at + 42:at + 46])
        name = raw[at + 46:at + 46 + n].decode()
        extra = raw[at + 46 + n:at + 46 + n + m]
        while len(extra) >= 4:  # zip64 values, in this order, only those that overflowed
            kind, width = struct.unpack("<HH", extra[:4])
            if kind == 1:
                values = list(struct.unpack(f"<{width // 8}Q", extra[4:4 + width // 8 * 8]))
                size = values.pop(0) if size == 0xFFFFFFFF else size
                packed = values.pop(0) if packed == 0xFFFFFFFF else packed
                header = values.pop(0) if header == 0xFFFFFFFF else header
            extra = extra[4 + width:]
        entries.append((name, method, crc, packed, size, header))
        at += 46 + n + m + k
    return entries


def groups(entries):
    """Neighbouring members together: lists of entries whose ranges are at most GAP apart."""
    result, reach = [], -1
    for entry in sorted(entries, key=lambda e: e[5]):
        stop = entry[5] + 30 + len(entry[0]) + 512 + entry[3]  # the local header's extra field is small
        if result and entry[5] - reach <= GAP:
            result[-1].append(entry)
        else:
            result.append([entry])
        reach = max(reach, stop)
    return result


def extract(source, entries, into):
    """Read, unpack, check and write the wanted members."""
    total = sum(e[3] for e in entries)
    for group in groups(entries):
        start = group[0][5]
        stop = min(max(e[5] + 30 + len(e[0]) + 512 + e[3] for e in group), source.size)
        data = source.read(start, stop - start)
        for name, method, crc, packed, size, header in group:
            at = header - start
            n, m = struct.unpack("<HH", data[at + 26:at + 30])
            body = data[at + 30 + n + m:at + 30 + n + m + packed]
            if method == 8:
                body = zlib.decompress(body, -15)
            if len(body) != size or zlib.crc32(body) != crc:
                raise SystemExit(f"fetch.py: {name} is damaged (CRC mismatch)")
            path = os.path.join(into, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as out:
                out.write(body)
        progress(source.received, total)
    if sys.stderr.isatty():
        say("")


def fetch(version):
    home = os.path.join(CACHE, version)
    if os.path.exists(os.path.join(home, "COMPLETE")):
        say(f"torch {version}: already in cache/")
        return
    os.makedirs(CACHE, exist_ok=True)
    say(f"torch {version}: asking pip for the wheel")
    url = wheel_url(version)
    parts = urllib.parse.urlparse(url)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=CACHE) as work:
        into = os.path.join(work, "files")
        if parts.scheme == "file":
            source = Local(urllib.request.url2pathname(parts.path))
            entries = directory(source)
        else:
            source = Remote(url.split("#")[0])
            entries = directory(source)
            if entries is None:
                say("  the server refuses byte ranges; streaming the whole wheel")
                source.supported = True
                path = os.path.join(work, "wheel")
                source.whole(path)
                source = Local(path)
                entries = directory(source)
        names = [e for e in entries if wanted(e[0])]
        if sum(e[0].endswith(".so") for e in names) < 2:
            raise SystemExit(f"fetch.py: the wheel of torch {version} holds no CUDA allocator")
        extract(source, names, into)
        with open(os.path.join(into, "COMPLETE"), "w") as out:
            out.write(os.path.basename(parts.path) + "\n")
        shutil.rmtree(home, ignore_errors=True)  # a directory without COMPLETE is not ours to keep
        os.rename(into, home)
    say(f"torch {version}: {len(names)} files, {source.received / 1e6:.1f} MB received in "
        f"{time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    if any(a.startswith("-") for a in sys.argv[1:]):
        print(__doc__.strip())
        raise SystemExit(0 if sys.argv[1] in ("-h", "--help") else 2)
    for item in sys.argv[1:] or DEFAULT:
        fetch(item)
