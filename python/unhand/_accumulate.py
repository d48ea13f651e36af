"""`accumulate`: the gradients of one batch from smaller parts, exactly, also when a part runs out of memory half way."""

import collections.abc
import contextlib
import sys

from unhand import _allocator, _fitting, _rows
from unhand.errors import Error


# Lines whose `step` was looked through for parameters that are not named. That costs as much as a small backward pass,
# so it is done once for each.
_checked = set()
_MOST_CHECKED = 4096


def accumulate(
    step,
    batch,
    size,
    parameters,
    *,
    reduction="mean",
    count=None,
    min_size=1,
    dim=0,
    device=None,
    backward=None,
    remember=True,
):
    """Add the gradients of a whole batch to `.grad`, at most `size` rows at a time, and return the loss of the batch.

        optimizer.zero_grad()
        loss = unhand.accumulate(lambda part: loss_of(model(part["x"]), part["y"]), batch, 64, model)
        optimizer.step()

    `step(part)` gives the loss of some rows, a tensor with one number. With `reduction="mean"` that is a mean over the
    rows: each part counts with its share of the rows, so that the gradients are those of the mean over the batch, also
    where the parts differ in size. Where the mean is over something else (tokens that are not padding), `count(part)`
    tells how many a part has; it is also asked about the whole batch. With `reduction="sum"` the losses are added up.

    `parameters` are the modules, optimizers or tensors whose gradients `step` computes: one, or several in a list. All
    of them have to be named, because their `.grad` is put back when a part runs out of memory in the middle of its
    backward pass and some gradients have been added already. Then the batch begins again, in smaller parts; where
    nothing was added, only the part comes again. In both cases the random numbers start again from where they were
    (host, and each CUDA device with a context), so that the result is that of a run which had used the final parts
    from the beginning. What `step` changes otherwise (running means of batch norm, lists) happened as often as it ran.

    It needs no memory beyond that of the parts where `.grad` is `None` at the start, as after `zero_grad()`. Where there
    are gradients already they are set aside and added at the end: one more set of them meanwhile.

    `batch` is data as for `unhand.batches`, but no iterable: its rows have to be counted. `min_size`, `dim`, `device`
    and `remember` are as there. `backward(loss)` replaces `loss.backward()`: `lambda loss: scaler.scale(loss).backward()`.
    A module with `no_sync` among `parameters` (DistributedDataParallel) exchanges gradients only with the last part; out
    of memory in that one is raised, because the other processes would not wait again.

    The loss that is returned is detached, on its device, without a wait for it. Not for losses that are no sum over
    rows: contrastive ones and batch norm in training see the part and not the batch. Raises ValueError for a batch
    without rows, `CaptureError` while the current stream captures a CUDA graph, and the error itself, with a note, when
    `min_size` rows do not fit; `.grad` is then what it was before. docs/guides/batches.md has the whole story.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'`reduction` is "mean" or "sum": got {reduction!r}')
    if not _rows.has_rows(batch):
        raise TypeError(f"the rows of a {type(batch).__name__} cannot be counted: a tensor, a list, or a dict or tuple of tensors is needed")
    rows = _rows.Indexed(batch, dim)
    if rows.n_rows == 0:
        raise ValueError("a batch without rows has no loss")
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    place = line if remember is True else remember
    key = None
    if remember is not False:
        key = ("accumulate", place, rows.shape_class(), str(device) if device is not None else rows.device())
    parts = _Parts(
        step=step,
        batch=batch,
        rows=rows,
        dim=dim,
        device=device,
        asked=min(size, rows.n_rows),
        least=min(min_size, rows.n_rows),
        size=_fitting.remembered(key),
        backward=backward or _backward,
        count=count,
        unchecked=line not in _checked,
        whole=None if reduction == "sum" else rows.n_rows if count is None else count(batch),
    )
    gradients = _Gradients(parameters)
    with gradients.set_aside():
        loss = parts.go_through(gradients)
    if len(_checked) < _MOST_CHECKED:
        _checked.add(line)
    return loss


def _backward(loss):
    loss.backward()


class _Parts:
    """The batch and how it is cut."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def go_through(self, gradients):
        attempt = _fitting.Attempt()
        began = _RandomState()
        total = None
        while self.rows.position < self.rows.n_rows:
            _fitting.refuse_capture()
            n = self.rows.count(self.size.choose(self.asked, self.least))
            random, seen = _RandomState(), gradients.versions()
            is_last = self.rows.position + n == self.rows.n_rows
            try:
                total = self.one(n, total, gradients, is_last)
            except Exception as error:
                is_touched = gradients.versions() != seen
                if is_touched and is_last and gradients.are_exchanged():
                    _fitting.add_note(error, "unhand: not tried again, because other processes take part in this backward pass")
                    raise
                if not attempt.recover(error, self.size, n, self.least):
                    raise
            else:
                self.size.fits(n)
                attempt.went_well()
                self.rows.advance(n)
                continue
            if is_touched:
                total, self.rows.position = None, 0
                gradients.clear()
                began.restore()
            else:
                random.restore()
        return total

    def weight(self, part, n):
        """The share of a part in the mean. Counts that are tensors stay on their device: nobody waits for them."""
        own, whole = n if self.count is None else self.count(part), self.whole
        if _rows.is_tensor(own) and not own.is_floating_point() and own.device.type != "mps":
            own = own.double()
        return own / whole

    def one(self, n, total, gradients, is_last):
        """The forward and backward pass of one part; the sum of the losses so far."""
        part = _rows.piece(self.batch, self.rows.position, self.rows.position + n, self.dim)
        if self.device is not None:
            part = _rows.move(part, self.device)
        weight = None if self.whole is None else self.weight(part, n)
        with gradients.exchange(is_last):
            loss = self.step(part)
            del part
            if loss.numel() != 1:
                raise Error(f"`step` gives the loss of some rows as one number: got a tensor of shape {tuple(loss.shape)}")
            if self.unchecked:
                gradients.check_all_are_named(loss)
                self.unchecked = False
            if weight is not None:
                # Half precision has no room for a share with its digits.
                loss = loss.float() if loss.dtype.itemsize < 4 else loss
                loss = loss * (weight.to(loss) if _rows.is_tensor(weight) else weight)
            self.backward(loss)
        loss = loss.detach()
        return loss if total is None else total + loss


class _Gradients:
    """The gradients that the batch is added to, so that a part that failed can be taken back."""

    def __init__(self, owners):
        owners = list(owners) if isinstance(owners, collections.abc.Iterable) and not _is_owner(owners) else [owners]
        self.modules = [owner for owner in owners if hasattr(owner, "no_sync")]
        found = {}
        for owner in owners:
            for tensor in _tensors_of(owner):
                if tensor.requires_grad and tensor.is_leaf:
                    found[id(tensor)] = tensor
        if not found:
            raise Error("`parameters` names no tensor that gets a gradient")
        self.tensors = list(found.values())

    @contextlib.contextmanager
    def set_aside(self):
        """Starts from nothing; adds what was there at the end, and puts it back if nothing came of it."""
        before = [(tensor, tensor.grad) for tensor in self.tensors if tensor.grad is not None]
        self.clear()
        try:
            yield
        except BaseException:
            self.clear()
            for tensor, grad in before:
                tensor.grad = grad
            raise
        with sys.modules["torch"].no_grad():
            for tensor, grad in before:
                tensor.grad = grad if tensor.grad is None else _added(grad, tensor.grad)

    def versions(self):
        """Changes whenever a gradient is added."""
        return [None if tensor.grad is None else (id(tensor.grad), tensor.grad._version) for tensor in self.tensors]

    def clear(self):
        for tensor in self.tensors:
            tensor.grad = None

    def check_all_are_named(self, loss):
        """Whether the graph of a loss ends in these tensors only. What recomputed parts lead to is not seen."""
        known = {id(tensor) for tensor in self.tensors}
        parameter = sys.modules["torch"].nn.Parameter
        # The objects that stand for nodes live as long as they are kept, and so do their identities.
        seen, waiting = {}, [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            tensor = getattr(node, "variable", None)
            # Other leaves may have been made by `step` itself, and are gone with the part.
            if isinstance(tensor, parameter) and id(tensor) not in known:
                raise Error(f"`parameters` does not name a tensor of shape {tuple(tensor.shape)} that gets a gradient from `step`")
            waiting += [following for following, _ in node.next_functions]

    def are_exchanged(self):
        return bool(self.modules)

    def exchange(self, is_last):
        """What the passes of a part run in: without exchange between processes, unless it is the last."""
        stack = contextlib.ExitStack()
        if not is_last:
            for module in self.modules:
                stack.enter_context(module.no_sync())
        return stack


def _added(old, new):
    # In place, as autograd does it, so that whoever keeps the old tensor sees the sum. Needs no memory.
    if old.is_sparse != new.is_sparse:
        return old + new
    return old.add_(new)


def _is_owner(thing):
    return _rows.is_tensor(thing) or hasattr(thing, "param_groups") or callable(getattr(thing, "parameters", None))


def _tensors_of(owner):
    if _rows.is_tensor(owner):
        return [owner]
    if hasattr(owner, "param_groups"):
        return [tensor for group in owner.param_groups for tensor in group["params"]]
    if callable(getattr(owner, "parameters", None)):
        return owner.parameters()
    raise Error(f"a {type(owner).__name__} has no gradients: name modules, optimizers or tensors")


class _RandomState:
    """Where the generators of random numbers are: of the host, and of each CUDA device with a context."""

    def __init__(self):
        torch = sys.modules["torch"]
        self.host = torch.random.get_rng_state()
        self.devices = [(device, torch.cuda.get_rng_state(device)) for device in _allocator.devices()]

    def restore(self):
        torch = sys.modules["torch"]
        torch.random.set_rng_state(self.host)
        for device, state in self.devices:
            torch.cuda.set_rng_state(state, device)
