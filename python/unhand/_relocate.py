"""Carrying out a plan: every free block of a group is occupied, except the one that the next storage goes to.

PyTorch gives a request the smallest free block that is large enough. With one free block in the group there is no
choice, so a storage that is reallocated goes where the plan says. The blocks that do the occupying ("plugs") hold no
data and are released whatever happens.
"""

import bisect
import heapq

from ._layout import MIB
from ._packing import Plan


class Disturbed(Exception):
    """A block came from elsewhere than it must: somebody else allocates at the same time."""


class Relocation:
    """The plugs of one device. Used once for each wave, and always ended with `release()`."""

    def __init__(self, torch, device, rules):
        self.torch = torch
        self.device = device
        self.rules = rules
        self.plugs = {}  # address -> size, of every block that this holds
        self.rests = _Rests()
        self.n_allocations = 0
        self.moved = []  # storages
        self.moved_bytes = 0
        self.lost_streams = []  # storages whose blocks were used on other streams, which a new block does not know

    def carry_out(self, plan: Plan, stream, check):
        """Moves what the plan says. `check` is called before each move and may raise."""
        torch = self.torch
        group = plan.group
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            self.rests = _Rests()
            self._plug_holes(group)
            pieces = sorted(self.plugs)
            ready = []
            for space in plan.spaces:
                if space.hole is None:
                    continue
                low = bisect.bisect_left(pieces, space.hole.address)
                high = bisect.bisect_left(pieces, space.hole.address + space.hole.size)
                ready.append((space, space.hole.address, space.hole.address + space.size, pieces[low:high]))
            # All new memory first: when there is not enough, nothing has moved yet.
            for space in plan.spaces:
                if space.hole is None:
                    ready.append((space, *self._new_segment(space.size, group)))
            for space, address, end, plugs in ready:
                self._fill(space.blocks, address, end, plugs, group, check)

    def release(self):
        """Gives up every plug."""
        while self.plugs:
            self._unplug(next(iter(self.plugs)))

    def _alloc(self, size, group):
        address = self.torch._C._cuda_cudaCachingAllocator_raw_alloc(size, group.stream)
        self.plugs[address] = size
        self.n_allocations += 1
        return address

    def _unplug(self, address):
        # Forgotten first: releasing it twice would be worse than not at all.
        del self.plugs[address]
        self.torch._C._cuda_cudaCachingAllocator_raw_delete(address)

    def _plug_holes(self, group):
        usable = [
            (hole.address, hole.size)
            for hole in group.holes
            if (self.rules.is_expandable or not hole.units[0].is_expandable)
        ]
        self._plug(usable, group)

    def _plug(self, holes, group):
        """Occupies free blocks. They have to be all free blocks of the group that a request could get."""
        least = 512 if group.is_small else MIB + 512
        queue = [(-size, address) for address, size in holes]
        heapq.heapify(queue)
        sizes = {address: size for address, size in holes}
        made = []
        while queue:
            size, address = heapq.heappop(queue)
            size = -size
            if sizes.get(address) != size:
                continue  # A part of it is taken.
            request = self.rules.floor_size(min(size, MIB) if group.is_small else size)
            if size < least or request < least:
                self.rests.add(address, address + size)
                del sizes[address]
                continue
            got = self._alloc(request, group)
            if got not in sizes:
                raise Disturbed(f"a request of {request} bytes did not take the free block at {address:#x}")
            # Of equal ones any may be taken: all of them have to be.
            if got != address:
                heapq.heappush(queue, (-size, address))
            size = sizes.pop(got)
            rest = size - request
            if self.rules.splits(rest, group.is_small):
                sizes[got + request] = rest
                heapq.heappush(queue, (-rest, got + request))
                size = request
            self.plugs[got] = size
            made.append(got)
        return made

    def _new_segment(self, size, group):
        """New memory of the driver: where it begins and ends, and the plugs that occupy it."""
        if not group.is_small:
            request = self.rules.floor_size(size) if self.rules.is_expandable else size
            address = self._alloc(request, group)
            # Pages may continue a free rest: then as much more is free behind.
            end = size + (self.rests.take_from(address) or address)
            plugs = [address]
            if address + request < end:
                plugs += self._plug([(address + request, end - address - request)], group)
            # What is no plug there may become the beginning of the next new segment.
            end = max(plug + self.plugs[plug] for plug in plugs)
            return address, end, plugs
        # A small request is 1 MiB at most, and a segment for them is 2 MiB.
        plugs = [self._alloc(MIB, group) for _ in range(size // MIB)]
        if any(after != before + MIB for before, after in zip(plugs, plugs[1:])):
            raise Disturbed("two halves of a new segment are not side by side")
        return plugs[0], plugs[0] + size, plugs

    def _fill(self, blocks, address, end, plugs, group, check):
        for block in blocks:
            check()
            if block.need > end - address:
                raise Disturbed(f"no room for {block.need} bytes between {address:#x} and {end:#x}")
            for plug in plugs:
                # A free rest between two is part of the free block again.
                if plug + self.plugs[plug] < end:
                    self.rests.take_from(plug + self.plugs[plug])
                self._unplug(plug)
            address, end = self.rests.merged(address, end)
            self._move(block, address)
            free = []
            if self.rules.splits(end - address - block.need, group.is_small):
                address += block.need
                free.append((address, end - address))
            else:
                address = end
            plugs = []
            if free and block.address == end:
                # One free block now, of which a request gets the low end: this first.
                plugs = self._plug(free, group)
                free = []
            if self.rules.is_expandable or not block.units[0].is_expandable:
                low, high = self.rests.merged(block.address, block.address + block.size)
                free.append((low, high - low))
            plugs += self._plug(free, group)
            plugs = [plug for plug in plugs if address <= plug < end]
            # The last of them may reach into what was vacated beside: that is not for the next block.
            beyond = next((plug for plug in plugs if plug + self.plugs[plug] > end), None)
            if beyond is not None:
                plugs.remove(beyond)
                end = beyond

    def _move(self, block, address):
        storage = block.storage
        # The same size: allocates, copies on the current stream, swaps the pointer, frees the old block.
        storage.untyped.resize_(storage.nbytes)
        self.n_allocations += 1
        storage.address = storage.untyped.data_ptr()
        self.moved.append(storage)
        self.moved_bytes += storage.nbytes
        stats = self.torch._C._cuda_memoryStats(self.device)
        if stats["active"]["all"]["current"] != stats["allocation"]["all"]["current"]:
            # The old block was used on another stream and waits for it. The next request looks again.
            self.lost_streams.append(storage)
            self.torch.cuda.synchronize(self.device)
        if storage.address != address:
            raise Disturbed(f"a storage went to {storage.address:#x} and not to {address:#x}")


class _Rests:
    """Free pieces too small for a request of their group. They become part of what comes free beside them."""

    def __init__(self):
        self.by_start = {}
        self.by_end = {}

    def add(self, start, end):
        start, end = self.merged(start, end)
        self.by_start[start] = end
        self.by_end[end] = start

    def take_from(self, start):
        """Where the rest that starts there ends, and it is one no more."""
        end = self.by_start.pop(start, None)
        if end is not None:
            del self.by_end[end]
        return end

    def merged(self, start, end):
        """The free block that this range becomes part of when it is freed."""
        end = self.take_from(end) or end
        before = self.by_end.get(start)
        if before is not None:
            self.take_from(before)
            start = before
        return start, end
