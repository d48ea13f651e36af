"""Rows of whatever holds some: tensors, arrays, sequences, structures of them, iterables. Takes pieces, moves them, joins them.

A tuple or mapping of tensors or arrays of equal length is one structure, whose rows go together; a list is a sequence of
rows. Imports no library: PyTorch and NumPy are asked for where their objects are.
"""

import collections.abc
import copy
import itertools
import sys


def open_rows(data, dim=0):
    """A reader for the rows of `data`, from the first on."""
    if has_rows(data):
        return Indexed(data, dim)
    if isinstance(data, collections.abc.Iterable):
        return Streamed(data)
    raise TypeError(f"a {type(data).__name__} has no rows: a tensor, an array, a sequence, an iterable or a dict of them is needed")


class Indexed:
    """Rows that can be taken from anywhere."""

    def __init__(self, data, dim):
        self._data, self._dim = data, dim
        self.n_rows = length(data, dim)
        self.position = 0

    def take(self, n):
        """Up to `n` rows from the current one on, as (rows, how many)."""
        n = min(n, self.n_rows - self.position)
        return piece(self._data, self.position, self.position + n, self._dim), n

    def count(self, n):
        """How many rows `take(n)` would give."""
        return min(n, self.n_rows - self.position)

    def advance(self, n):
        self.position += n

    def shape_class(self):
        return shape_class(self._data, self._dim)

    def device(self):
        return device_of(self._data)


class Streamed:
    """Rows that come one after the other: what was taken stays until `advance`, so that it can be taken again."""

    def __init__(self, data):
        self._items = iter(data)
        self._waiting = []
        self.n_rows = None
        self.position = 0

    def take(self, n):
        n = self.count(n)
        return self._waiting[:n], n

    def count(self, n):
        if len(self._waiting) < n:
            self._waiting += itertools.islice(self._items, n - len(self._waiting))
        return min(n, len(self._waiting))

    def advance(self, n):
        del self._waiting[:n]
        self.position += n

    def shape_class(self):
        return shape_class(self._waiting[0], 0) if self.count(1) else None

    def device(self):
        return device_of(self._waiting[0]) if self.count(1) else None


def has_rows(data):
    """Whether the rows of `data` can be taken from anywhere."""
    return (
        is_array(data)
        or _is_structure(data)
        or hasattr(data, "iloc")
        or isinstance(data, collections.abc.Sequence)
        or (hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__") and not isinstance(data, collections.abc.Mapping))
    )


def is_tensor(thing):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def is_array(thing):
    """A tensor, or an array of NumPy, CuPy or JAX, with at least one dimension."""
    shape = getattr(thing, "shape", None)
    if isinstance(thing, type) or hasattr(thing, "iloc"):
        return False
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(thing, "dtype") and hasattr(type(thing), "__getitem__")


def _is_structure(data):
    if isinstance(data, collections.abc.Mapping):
        return any(_is_part(value) for value in data.values())
    return isinstance(data, tuple) and any(_is_part(value) for value in data)


def _is_part(value):
    return is_array(value) or _is_structure(value) or hasattr(value, "iloc")


def _parts(data):
    """The members of a structure that have rows. A list beside them counts, a number or a text does not."""
    values = data.values() if isinstance(data, collections.abc.Mapping) else data
    return [value for value in values if _is_part(value) or isinstance(value, list)]


def length(data, dim=0):
    """How many rows there are. ValueError where the members of a structure do not agree."""
    if is_array(data):
        return data.shape[dim]
    if _is_structure(data):
        lengths = {length(value, dim) for value in _parts(data)}
        if len(lengths) != 1:
            raise ValueError(f"the members have different numbers of rows: {sorted(lengths)}")
        return lengths.pop()
    return len(data)


def piece(data, start, stop, dim=0):
    """Some of the rows. Of tensors and arrays that is a view, without a copy."""
    if is_tensor(data):
        return data.narrow(dim, start, stop - start)
    if is_array(data):
        place = dim if dim >= 0 else len(data.shape) + dim
        return data[(slice(None),) * place + (slice(start, stop),)]
    if _is_structure(data):
        return map_members(data, lambda value: piece(value, start, stop, dim) if _is_part(value) or isinstance(value, list) else value)
    if hasattr(data, "iloc"):
        return data.iloc[start:stop]
    if isinstance(data, collections.abc.Sequence):
        return data[start:stop]
    # Data sets of PyTorch take one index.
    return [data[index] for index in range(start, stop)]


def map_members(data, function):
    """A structure of the same type with other members."""
    if isinstance(data, collections.abc.Mapping):
        changed = {key: function(value) for key, value in data.items()}
        if type(data) is dict:
            return changed
        # Subclasses (an `OrderedDict`, transformers' `BatchEncoding`) keep their type where they can be written to.
        twin = copy.copy(data)
        try:
            for key, value in changed.items():
                twin[key] = value
        except TypeError:
            return changed
        return twin
    values = [function(value) for value in data]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)


def move(data, device):
    """The same with every tensor on a device; arrays of NumPy become tensors there. Other things stay as they are."""
    if is_tensor(data):
        # Towards the host nobody would wait for the copy before the values are read.
        return data.to(device, non_blocking=str(device) != "cpu")
    if type(data).__module__ == "numpy" and is_array(data):
        return move(sys.modules["torch"].as_tensor(data), device)
    if is_structure_of_things(data):
        return map_members(data, lambda value: move(value, device))
    return data.to(device) if moves_itself(data) else data


def is_structure_of_things(data):
    """Whether it is moved member by member. PyTorch's `PackedSequence` is a tuple that must not be."""
    return isinstance(data, collections.abc.Mapping) or (isinstance(data, tuple | list) and not moves_itself(data))


def moves_itself(thing):
    """Whether it is an object with a method `to`, as batches of graph libraries are. Dicts that have one are dicts."""
    return not isinstance(thing, type | collections.abc.Mapping) and callable(getattr(type(thing), "to", None))


def tensors_in(data):
    """The tensors of a structure."""
    if is_tensor(data):
        return [data]
    if isinstance(data, collections.abc.Mapping):
        return [tensor for value in data.values() for tensor in tensors_in(value)]
    if isinstance(data, tuple | list):
        return [tensor for value in data for tensor in tensors_in(value)]
    return []


def shape_class(data, dim=0):
    """What two pieces have in common that need the same memory for each row."""
    if is_array(data):
        shape = list(data.shape)
        del shape[dim]
        return (tuple(shape), str(getattr(data, "dtype", "")))
    if isinstance(data, collections.abc.Mapping):
        return tuple((key, shape_class(value, dim)) for key, value in data.items() if _is_part(value))
    if isinstance(data, tuple):
        return tuple(shape_class(value, dim) for value in data if _is_part(value))
    return type(data).__qualname__


def device_of(data):
    """The device of the first tensor or array, as text."""
    if isinstance(data, collections.abc.Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        return next((found for found in map(device_of, itertools.islice(data, 8)) if found is not None), None)
    return str(device) if is_array(data) and (device := getattr(data, "device", None)) is not None else None


def join(results, dim=0):
    """Results one after the other, along `dim`: of tensors, of arrays, of lists, of structures of these."""
    first = results[0]
    if is_tensor(first) and first.dim() > 0:
        return first if len(results) == 1 else sys.modules["torch"].cat(results, dim)
    if isinstance(first, collections.abc.Mapping):
        return type(first)({key: join([result[key] for result in results], dim) for key in first})
    if isinstance(first, tuple):
        values = [join(list(members), dim) for members in zip(*results, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if is_array(first):
        library = sys.modules[type(first).__module__.partition(".")[0].replace("jaxlib", "jax")]
        library = getattr(library, "numpy", library) if library.__name__ == "jax" else library
        return library.concatenate(results, dim)
    raise TypeError(f"results of type {type(first).__name__} have no rows to join: go through them with `map`")
