"""The types of the extension module; `tests/python/stubs.py` compares this file with the built one."""

from collections.abc import Sequence

class Heap:
    """The objects of this process and who refers to whom, at one moment. Node 0 is the root; see `capture.rs`."""

    def __new__(cls, seeds: Sequence[object] = ..., skip: Sequence[object] = ...) -> Heap:
        """Take the graph now, from what the collector lists and from `seeds`; the referents of `skip` are left out."""

    @property
    def n_nodes(self) -> int: ...
    @property
    def n_edges(self) -> int: ...
    def node(self, object: object) -> int | None: ...
    def object(self, node: int) -> object | None: ...
    def types(self) -> list[tuple[type, int]]: ...
    def instances(self, types: Sequence[type]) -> list[int]: ...
    def referents(self, node: int) -> list[int]: ...
    def graph(
        self, n_added: int, edges: Sequence[tuple[int, int]], anchors: Sequence[int]
    ) -> HeapGraph: ...

class HeapGraph:
    """A heap with everything added, ready for questions; see `heap.rs`."""

    def holdings(self, targets: Sequence[tuple[int, int]]) -> tuple[list[tuple], list[int], list[tuple[int, int, int]]]: ...
    def reachable(self, starts: Sequence[int], closed: Sequence[int]) -> Nodes: ...
    def ancestors(self, ends: Sequence[int]) -> Nodes: ...
    def paths_to(self, end: int, starts: Sequence[int]) -> list[list[int] | None]: ...
    def referrers(self, node: int) -> list[int]: ...
    def retained(self, weights: Sequence[tuple[int, int]], nodes: Sequence[int]) -> list[int]: ...

class Nodes:
    """A set of nodes, which may be most of the heap."""

    def __contains__(self, node: int) -> bool: ...
    def __len__(self) -> int: ...
    def list(self) -> list[int]: ...

def cache(snapshot_pickle: bytes) -> str:
    """What of the cache can be given back, per device, as JSON, from a pickle of PyTorch's snapshot. Nothing in it is run."""

def devices() -> str:
    """All devices and the processes on them as the driver sees them now, as JSON; makes no CUDA context.

    `RuntimeError` says why there is no answer: no driver, no permission.
    """

def format_bytes(bytes: int) -> str:
    """A number of bytes as people read it, for example `1.5 GiB`: the way the whole project writes sizes."""

def is_cublas_workspace(bytes: int) -> bool:
    """Whether a request of so many bytes has the size of a workspace that PyTorch allocates for cuBLAS."""

def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`, program name first, and give the exit code."""

def out_of_memory(snapshot_pickle: bytes, device: int, allowed_bytes: int | None = ...) -> str:
    """What a pickled snapshot says about the last out-of-memory error of a device, as JSON. Nothing in it is run.

    `ValueError` for a snapshot that cannot be read or says nothing about the device.
    """

def run_plan(argv: Sequence[str]) -> str | None:
    """What `unhand run` on the command line `argv` asks for, as JSON; None for any other command line."""

def replay(snapshot_pickle: bytes, device: int) -> str:
    """What the history in a pickle of PyTorch's snapshot did on one device, as JSON: a run of `unhand replay --json`.

    `ValueError` where there is no history, or one that no allocator can follow. Nothing in it is run.
    """
