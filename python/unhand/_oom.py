"""Tells out-of-memory errors of all libraries from other errors, and makes a caught one let go of what the failed call held."""

import errno
import gc
import re
import sys

from unhand import _actions, _allocator, _counters, _notebook, _tracebacks

# After one of these the context is lost: every later call fails, and no smaller size helps. Whole phrases, because
# PyTorch closes ordinary messages with a hint about "device-side assertions".
_STICKY = re.compile(
    r"illegal memory access|device-side assert triggered|misaligned address|illegal instruction|invalid program counter"
    r"|unspecified launch failure|launch timed out|hardware stack error|uncorrectable|ecc error|gpu is lost"
    r"|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorAssert|CUDA_ERROR_ASSERT|cudaErrorLaunchFailure"
    r"|CUDA_ERROR_LAUNCH_FAILED|mapping of buffer object failed",
    re.IGNORECASE,
)

# A kernel that wants more shared memory or registers than a multiprocessor has. The size of a batch does not change that.
_PER_BLOCK = re.compile(
    r"out of resource: |too many resources requested|shared memory(?! allocation failed).{0,80}(limit|exceed|required)"
    r"|(limit|exceed).{0,60}shared memory|out of shared memory",
    re.IGNORECASE | re.DOTALL,
)

# Kind and text, the first that matches. Where a library has its own words they come before the common ones.
_TEXTS = [
    (kind, re.compile(text, re.IGNORECASE | re.DOTALL))
    for kind, text in [
        ("cublas", r"(cu|hip|roc)blas(lt)?_status_(alloc_failed|memory_error)"),
        ("cudnn", r"cudnn_status_alloc_failed|cudnn_status_internal_error_(host|device)_allocation_failed"),
        ("cudnn", r"miopenStatusAllocFailed"),
        ("cusolver", r"(cu|hip|roc)solver(_mp)?_status_(alloc_failed|memory_error)|magma.{0,40}(alloc|memory)"),
        ("cusparse", r"(cu|hip|roc)sparse_status_(alloc_failed|insufficient_resources|memory_error)"),
        ("cufft", r"(cu|hip)fft_alloc_failed"),
        ("curand", r"(cu|hip)rand_status_allocation_failed"),
        ("nccl", r"[nr]ccl.*(out of memory|cuda failure 2\b|cudaErrorMemoryAllocation)"),
        ("mps", r"mps backend out of memory|mps.{0,80}out of memory|invalid buffer size: |kIOGPUCommandBufferCallbackErrorOutOfMemory"),
        ("xpu", r"xpu out of memory|ur_result_error_out_of_(device|host)_memory|ze_result_error_out_of_(device|host)_memory"),
        ("host", r"defaultcpuallocator|can(no|')t allocate memory|std::bad_alloc(?!.*(cuda|hip))|unable to mmap .*memory"),
        # On a part of a GPU (MIG) the report of the error asks NVML, may not, and fails an assertion of its own.
        ("cuda", r"nvml_success == r.{0,40}internal assert failed.{0,120}cudacachingallocator"),
        ("jax", r"resource_exhausted: .*(out of memory|allocat|oom|memory)"),
        ("cuda", r"cuda_error_out_of_memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory|out[ _]of[ _]memory"),
        ("cuda", r"oom when allocating|failed to allocate memory for requested buffer|bfcarena.{0,80}failed to allocate"),
    ]
]

# Texts that a full device causes, and something else now and then: a library that cannot make its handle has no better
# word for it. Believed unless the driver says that there is plenty of free memory.
_LIKELY = [
    (kind, re.compile(text, re.IGNORECASE | re.DOTALL))
    for kind, text in [
        ("cublas", r"(cu|hip)blas(lt)?_status_not_initialized.*(cu|hip)blas(lt)?create"),
        ("cudnn", r"cudnn_status_not_initialized|unable to find an engine to execute|find was unable to find an engine"),
        ("cusolver", r"cusolver_status_(internal_error|not_initialized).*cusolver\w*create"),
        ("cusparse", r"cusparse_status_not_initialized.*cusparsecreate"),
    ]
]

# The other way round: mostly something else. Believed only where the driver says that the device is full.
_PERHAPS = [
    (kind, re.compile(text, re.IGNORECASE | re.DOTALL))
    for kind, text in [
        ("cuda", r"internal assert failed.{0,200}cudacachingallocator|cuda driver error: device not ready"),
        ("cublas", r"(cu|hip)blas(lt)?_status_(not_initialized|internal_error)"),
        ("cudnn", r"cudnn_status_(internal_error|not_supported|execution_failed)"),
        ("cusolver", r"cusolver_status_(internal_error|not_initialized)"),
        ("cufft", r"cufft_(internal_error|exec_failed|setup_failed)"),
        ("nccl", r"ncclunhandledcudaerror|nccl.*unhandled cuda error"),
    ]
]

# Where the exceptions come from whose texts are read. Others may speak of memory and mean something else.
_LIBRARIES = frozenset(
    "torch jax jaxlib xla_extension cupy cupy_backends numba cuda pycuda rmm cudf tensorflow onnxruntime paddle triton ray".split()
)

_KINDS_BY_CLASS = {"torch": "cuda", "cupy": "cupy", "cupy_backends": "cupy", "rmm": "cuda", "tensorflow": "cuda", "ray": "host"}

# What `cudaMalloc` answers (cudaErrorMemoryAllocation), and the driver (CUDA_ERROR_OUT_OF_MEMORY).
_CODE_OUT_OF_MEMORY = 2

# A device with less than this is full for a library that wants a handle or a workspace.
_TIGHT_BYTES = 1 << 30
_TIGHT_SHARE = 0.1

_with_context = set()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, so that the same with less may work.

    Known are: PyTorch on CUDA, ROCm, XPU, MPS and in host memory (MemoryError and NumPy's too); cuBLAS, cuDNN, cuSOLVER,
    cuSPARSE, cuFFT, cuRAND and NCCL, whose messages do not say "out of memory"; the assertion that PyTorch fails on a
    part of a GPU (MIG); CuPy, Numba, RMM, JAX, TensorFlow, ONNX Runtime. Where a message may mean a full device and
    something else (`CUBLAS_STATUS_NOT_INITIALIZED`), the driver is asked for its free memory, if CUDA is started.

    An exception raised from another (`raise … from`) is what it was raised from. One that came while another was being
    handled counts only if it is a RuntimeError, as PyTorch's are, since a KeyError in a handler is a fault of its own. A
    group counts if each of its members does.

    Not out of memory: errors after which the device is lost (illegal access, a failed assertion on the device), a
    kernel that wants too much shared memory (Triton's `OutOfResources`), KeyboardInterrupt and whatever else is no
    `Exception`. It is asked in an `except` block, changes nothing, and raises nothing.
    """
    return kind(error) is not None


def kind(error):
    """Who ran out of memory: `cuda`, `cublas`, `cudnn`, `nccl`, `mps`, `host`, `jax` and so on; `None` for another error."""
    return _kind(error, set())


def _kind(error, seen):
    if not isinstance(error, Exception) or id(error) in seen:
        return None
    seen.add(id(error))
    members = getattr(error, "exceptions", None)
    if isinstance(members, tuple) and members:
        kinds = [_kind(member, seen) for member in members]
        return kinds[0] if None not in kinds else None
    text = _text(error)
    if _STICKY.search(text):
        return None
    own = _own_kind(error, text)
    if own is not None:
        return own
    if error.__cause__ is not None:
        return _kind(error.__cause__, seen)
    if error.__context__ is not None and not error.__suppress_context__ and _is_runtime_error(error):
        return _kind(error.__context__, seen)
    return None


def _own_kind(error, text):
    """What this exception says by itself."""
    names = {one.__name__ for one in type(error).__mro__}
    library = _library(error)
    if "OutOfResources" in names or _PER_BLOCK.search(text):
        return None
    if names & {"OutOfMemoryError", "ResourceExhaustedError"} and library in _KINDS_BY_CLASS:
        # XPU's errors have the same class, and their own words.
        return _KINDS_BY_CLASS[library] if library != "torch" else _first(_TEXTS, text) or "cuda"
    if library == "torch" and getattr(error, "error_code", None) == _CODE_OUT_OF_MEMORY:
        return "cuda"
    if isinstance(error, MemoryError):
        return _first(_TEXTS, text) or "host"
    if isinstance(error, OSError):
        return "host" if error.errno == errno.ENOMEM else None
    if type(error) is not RuntimeError and library not in _LIBRARIES:
        return None
    found = _first(_TEXTS, text)
    if found is not None:
        return found
    likely = _first(_LIKELY, text)
    if likely is not None:
        return likely if _is_tight() is not False else None
    perhaps = _first(_PERHAPS, text)
    return perhaps if perhaps is not None and _is_tight() else None


def _first(patterns, text):
    return next((kind for kind, pattern in patterns if pattern.search(text)), None)


def _text(error):
    try:
        # Messages of compilers are megabytes long; what went wrong is at the beginning or the end.
        text = str(error)
    except Exception:  # noqa: BLE001
        return ""
    return text if len(text) < 20_000 else text[:10_000] + text[-10_000:]


def _library(error):
    """The package that the most special class with a known package is from."""
    for one in type(error).__mro__:
        root = (one.__module__ or "").partition(".")[0]
        if root in _LIBRARIES:
            return root
    return None


def _is_runtime_error(error):
    return type(error) is RuntimeError or _library(error) is not None


def _is_tight():
    """Whether a device is nearly full, in the driver's words; `None` where nobody can be asked."""
    torch = _allocator.started_torch()
    if torch is None:
        return None
    known = False
    for device in _allocator.devices():
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        except Exception:  # noqa: BLE001
            # A device after an error; what it was is in the message.
            continue
        known = True
        if free_bytes < min(_TIGHT_BYTES, total_bytes * _TIGHT_SHARE):
            return True
    return False if known else None


def allocated():
    """Allocated bytes of all devices on which this process has a context, to tell `let_go` where an attempt began."""
    torch = _allocator.started_torch()
    if torch is None:
        return None
    total_bytes = 0
    for device in range(torch.cuda.device_count()):
        # A context stays, and asking for it takes longer than all the rest.
        if device not in _with_context:
            if not _allocator.has_context(device):
                continue
            _with_context.add(device)
        counters = _counters.read(device)
        if counters is None:
            return None
        total_bytes += counters.allocated_bytes
    return total_bytes


def let_go(error, outer=None, began_bytes=None, thorough=True):
    """Lets go of all that the failed call behind a caught exception held, so that the next attempt has the memory.

    The frames of the traceback, and of what the exception came from, lose their locals, and the exception its
    traceback, cause and context; its message stays. `sys.last_*` and what IPython remembers are forgotten. Dead cycles
    are collected unless `began_bytes`, the figure of `allocated` before the attempt, is reached again without; young
    ones only, which takes no time and is where those of the attempt are, if not `thorough`. Then the cache goes back to
    the driver, since a library beside PyTorch, or another process, may be who needs it.

    `outer` is what `sys.exc_info()[1]` was before the attempt: the caller's handlers may be at work on it, so it is left
    whole. Frames that run or will go on are left alone. While a debugger looks at frames, only the cache goes. Nothing
    here raises, and no other error is hidden: the caller has decided that this one is to be forgotten.
    """
    is_of_host = kind(error) == "host"
    if not _tracebacks.debugger_is_open():
        _tracebacks.unwind(error, outer)
        if any(hasattr(sys, name) for name in _tracebacks.LAST) or _notebook.running_shell() is not None:
            _actions.tracebacks()
        if began_bytes is None or (allocated() or 0) > began_bytes:
            gc.collect(2 if thorough else 1)
    if not is_of_host and _allocator.started_torch() is not None:
        _actions.empty_cache(_actions.Scene(_allocator.is_capturing(), None))
