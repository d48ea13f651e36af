"""Which errors are out-of-memory errors, and that a caught one lets go of everything. Needs no torch."""

import errno
import gc
import os
import sys
import weakref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main

import unhand
from unhand import _oom


def of_module(name, module, base=RuntimeError, **attributes):
    """A class like that of a library that need not be installed."""
    return type(name, (base,), {"__module__": module, **attributes})


TorchOutOfMemory = of_module("OutOfMemoryError", "torch")
AcceleratorError = of_module("AcceleratorError", "torch")
XlaRuntimeError = of_module("XlaRuntimeError", "jaxlib.xla_extension")
OutOfResources = of_module("OutOfResources", "triton.runtime.errors", Exception)
FOOTER = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)

# What the libraries say, shortened.
OUT_OF_MEMORY = [
    ("cuda", TorchOutOfMemory("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.89 GiB")),
    ("cuda", TorchOutOfMemory("Allocation on device 0 would exceed allowed memory. (out of memory)")),
    ("xpu", TorchOutOfMemory("XPU out of memory. Tried to allocate 64.00 GiB.")),
    ("cuda", RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")),
    ("cuda", RuntimeError("HIP out of memory. Tried to allocate 2.00 MiB")),
    ("cuda", RuntimeError("CUDA error: out of memory" + FOOTER)),
    ("cuda", AcceleratorError("CUDA error: out of memory" + FOOTER)),
    ("cuda", RuntimeError("CUDA driver error: out of memory")),
    ("cuda", RuntimeError("Triton Error [CUDA]: out of memory")),
    ("cuda", RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report')),
    ("cublas", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("cublas", RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")),
    ("cublas", RuntimeError("CUDA error: CUBLASLT_STATUS_ALLOC_FAILED when calling `cublasLtMatmul`")),
    ("cublas", RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`")),
    ("cudnn", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("cudnn", RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    ("cudnn", RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")),
    ("cudnn", RuntimeError("GET was unable to find an engine to execute this computation")),
    ("cudnn", RuntimeError("FIND was unable to find an engine to execute this computation")),
    ("cusolver", RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`")),
    ("cusolver", RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`")),
    ("cusparse", RuntimeError("CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM`")),
    ("cufft", RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED")),
    ("curand", RuntimeError("CURAND_STATUS_ALLOCATION_FAILED")),
    ("nccl", RuntimeError("NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")),
    ("mps", RuntimeError("MPS backend out of memory (MPS allocated: 8.87 GB, other allocations: 1.1 GB, max allowed: 9.07 GB).")),
    ("mps", RuntimeError("Invalid buffer size: 24.00 GiB")),
    ("host", RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")),
    ("host", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. Error code 12")),
    ("host", MemoryError()),
    ("host", MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)")),
    ("host", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ("cuda", MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp:70: cudaErrorMemoryAllocation")),
    ("jax", XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")),
    ("cupy", of_module("OutOfMemoryError", "cupy.cuda.memory", MemoryError)("Out of memory allocating 512 bytes")),
    ("cuda", of_module("CudaAPIError", "numba.cuda.cudadrv.driver", Exception)("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")),
    ("cuda", of_module("ResourceExhaustedError", "tensorflow.python.framework.errors_impl", Exception)("OOM when allocating tensor")),
    ("cuda", of_module("RuntimeException", "onnxruntime.capi", Exception)("Failed to allocate memory for requested buffer of size 8")),
]

SOMETHING_ELSE = [
    RuntimeError("CUDA error: an illegal memory access was encountered" + FOOTER),
    AcceleratorError("CUDA error: device-side assert triggered" + FOOTER),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: invalid device ordinal" + FOOTER),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(handle, …)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
    OutOfResources("out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes may help."),
    XlaRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000, available: 232448"),
    of_module("RpcError", "grpc", Exception)("RESOURCE_EXHAUSTED: Received message larger than max (out of memory)"),
    ValueError("this configuration runs out of memory, choose another"),
    KeyError("out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. The workers are out of shared memory."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RecursionError("maximum recursion depth exceeded"),
    KeyboardInterrupt(),
    SystemExit("out of memory"),
]


class BadlyWritten(RuntimeError):
    def __str__(self):
        raise ValueError("no text")


def check_what_is_out_of_memory():
    wrong = [(expected, _oom.kind(error), error) for expected, error in OUT_OF_MEMORY if _oom.kind(error) != expected]
    assert not wrong, "\n".join(map(repr, wrong))
    assert all(unhand.is_out_of_memory(error) is True for _, error in OUT_OF_MEMORY)


def check_what_is_not():
    wrong = [error for error in SOMETHING_ELSE if unhand.is_out_of_memory(error)]
    assert not wrong, wrong
    assert not unhand.is_out_of_memory(BadlyWritten()) and not unhand.is_out_of_memory(None)


def raised(error, cause=None, context=None, suppress=False):
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = suppress or cause is not None
    return error


def check_what_an_exception_came_from():
    def full():
        return TorchOutOfMemory("CUDA out of memory.")

    assert unhand.is_out_of_memory(raised(ValueError("step failed"), cause=full()))
    assert unhand.is_out_of_memory(raised(ValueError("a"), cause=raised(RuntimeError("b"), context=full())))
    assert unhand.is_out_of_memory(raised(RuntimeError("cleaning up failed"), context=full()))
    # A fault in the code that handles the error is its own.
    assert not unhand.is_out_of_memory(raised(NameError("batchsize"), context=full()))
    assert not unhand.is_out_of_memory(raised(NotImplementedError(), context=full()))
    assert not unhand.is_out_of_memory(raised(RuntimeError("give up"), context=full(), suppress=True))
    assert not unhand.is_out_of_memory(raised(KeyboardInterrupt(), cause=full()))
    # The device was lost while the first error was handled, and before.
    assert not unhand.is_out_of_memory(raised(RuntimeError("CUDA error: an illegal memory access"), cause=full()))
    circle = RuntimeError("a")
    circle.__context__ = raised(RuntimeError("b"), context=circle)
    assert not unhand.is_out_of_memory(circle)


def check_groups():
    if sys.version_info < (3, 11):
        return
    full, other = TorchOutOfMemory("CUDA out of memory."), ValueError("wrong")
    assert unhand.is_out_of_memory(ExceptionGroup("tasks", [full, MemoryError()]))
    assert unhand.is_out_of_memory(ExceptionGroup("tasks", [ExceptionGroup("inner", [full])]))
    assert not unhand.is_out_of_memory(ExceptionGroup("tasks", [full, other]))
    assert not unhand.is_out_of_memory(BaseExceptionGroup("tasks", [full, KeyboardInterrupt()]))


class Big:
    """Stands for a tensor."""


def fail(watches, depth=3):
    big = Big()
    big.itself = big if depth == 0 else None
    watches.append(weakref.ref(big))
    if depth == 0:
        raise RuntimeError("CUDA out of memory.")
    try:
        fail(watches, depth - 1)
    except RuntimeError as error:
        if depth == 2:
            raise RuntimeError("layer failed") from error
        if depth == 1:
            # The frame keeps the exception that keeps the frame.
            kept = error  # noqa: F841
        raise


def check_everything_is_let_go():
    watches = []
    gc.disable()
    try:
        try:
            fail(watches)
        except RuntimeError as error:
            assert unhand.is_out_of_memory(error)
            _oom.let_go(error)
            # Still in the handler: this is when the next attempt begins.
            assert [watch() for watch in watches] == [None] * 4
            assert error.__traceback__ is error.__cause__ is error.__context__ is None and str(error) == "layer failed"
            caught = error
        assert str(caught) == "layer failed"
    finally:
        gc.enable()


def check_groups_are_let_go():
    if sys.version_info < (3, 11):
        return
    watches = []

    def both():
        errors = []
        for _ in range(2):
            try:
                fail(watches)
            except RuntimeError as error:
                errors.append(error)
        raise ExceptionGroup("tasks", errors)

    try:
        both()
    except ExceptionGroup as error:
        _oom.let_go(error)
        assert [watch() for watch in watches] == [None] * 8 and len(error.exceptions) == 2


def check_remembered_exceptions_are_let_go():
    watches = []
    try:
        fail(watches)
    except RuntimeError as error:
        sys.last_value = sys.last_exc = error
        sys.last_traceback = error.__traceback__
    assert watches[0]() is not None
    try:
        raise RuntimeError("CUDA out of memory.")
    except RuntimeError as error:
        _oom.let_go(error)
    assert [watch() for watch in watches] == [None] * 4 and not hasattr(sys, "last_value")


def check_what_the_caller_handles_stays():
    watches, big = [], Big()
    try:
        fail(watches)
    except RuntimeError:
        outer = sys.exc_info()[1]
        try:
            raise RuntimeError("CUDA out of memory.")
        except RuntimeError as error:
            assert error.__context__ is outer
            _oom.let_go(error, outer)
        assert outer.__traceback__ is not None and watches[0]() is not None and big is not None
        assert outer.__cause__ is not None
        del outer


def check_a_generator_that_waits_goes_on():
    def counting():
        try:
            yield 1
            raise RuntimeError("CUDA out of memory.")
        finally:
            pass

    def steps(inner):
        next(inner)
        try:
            next(inner)
        except RuntimeError as error:
            _oom.let_go(error)
        yield 2
        yield 3

    going = steps(counting())
    assert next(going) == 2 and next(going) == 3


def check_nothing_is_imported():
    assert "torch" not in sys.modules and "IPython" not in sys.modules


if __name__ == "__main__":
    main(globals())
