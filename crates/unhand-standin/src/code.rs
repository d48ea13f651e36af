//! Error numbers: CUDA's runtime and driver use the same ones for what the stand-in can report.

use std::ffi::CStr;

/// A CUDA error. Success has no value of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

/// What an entry point comes to.
pub(crate) type Outcome = Result<(), Code>;

impl Code {
    pub(crate) const INVALID_VALUE: Code = Code(1);
    pub(crate) const OUT_OF_MEMORY: Code = Code(2);
    pub(crate) const INVALID_CONFIGURATION: Code = Code(9);
    pub(crate) const INVALID_SYMBOL: Code = Code(13);
    pub(crate) const INVALID_DEVICE: Code = Code(101);
    pub(crate) const INVALID_HANDLE: Code = Code(400);
    pub(crate) const ILLEGAL_STATE: Code = Code(401);
    pub(crate) const NOT_FOUND: Code = Code(500);
    pub(crate) const NOT_READY: Code = Code(600);
    pub(crate) const ILLEGAL_ADDRESS: Code = Code(700);
    pub(crate) const HOST_ALREADY_REGISTERED: Code = Code(712);
    pub(crate) const HOST_NOT_REGISTERED: Code = Code(713);
    pub(crate) const NOT_SUPPORTED: Code = Code(801);
    pub(crate) const CAPTURE_UNSUPPORTED: Code = Code(900);
    pub(crate) const CAPTURE_INVALIDATED: Code = Code(901);
    pub(crate) const CAPTURE_MERGE: Code = Code(902);
    pub(crate) const CAPTURE_UNMATCHED: Code = Code(903);
    pub(crate) const CAPTURE_UNJOINED: Code = Code(904);
    pub(crate) const CAPTURE_ISOLATION: Code = Code(905);
    pub(crate) const CAPTURE_IMPLICIT: Code = Code(906);
    pub(crate) const CAPTURED_EVENT: Code = Code(907);
    pub(crate) const CAPTURE_WRONG_THREAD: Code = Code(908);
    pub(crate) const UNKNOWN: Code = Code(999);
}

/// Number, name in the runtime, name in the driver, what it means.
type Row = (i32, &'static CStr, &'static CStr, &'static CStr);

const ROWS: &[Row] = &[
    (0, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
    (1, c"cudaErrorInvalidValue", c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"cudaErrorMemoryAllocation", c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (9, c"cudaErrorInvalidConfiguration", c"CUDA_ERROR_UNKNOWN", c"invalid configuration argument"),
    (13, c"cudaErrorInvalidSymbol", c"CUDA_ERROR_UNKNOWN", c"invalid device symbol"),
    (101, c"cudaErrorInvalidDevice", c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (400, c"cudaErrorInvalidResourceHandle", c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (
        401,
        c"cudaErrorIllegalState",
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (500, c"cudaErrorSymbolNotFound", c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"cudaErrorNotReady", c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (
        700,
        c"cudaErrorIllegalAddress",
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"an illegal memory access was encountered",
    ),
    (
        712,
        c"cudaErrorHostMemoryAlreadyRegistered",
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"cudaErrorHostMemoryNotRegistered",
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (801, c"cudaErrorNotSupported", c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        900,
        c"cudaErrorStreamCaptureUnsupported",
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"cudaErrorStreamCaptureInvalidated",
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        902,
        c"cudaErrorStreamCaptureMerge",
        c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"operation would result in a merge of separate capture sequences",
    ),
    (
        903,
        c"cudaErrorStreamCaptureUnmatched",
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"capture was not ended in the same stream as it began",
    ),
    (
        904,
        c"cudaErrorStreamCaptureUnjoined",
        c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"capturing stream has unjoined work",
    ),
    (
        905,
        c"cudaErrorStreamCaptureIsolation",
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        906,
        c"cudaErrorStreamCaptureImplicit",
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"cudaErrorCapturedEvent",
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        908,
        c"cudaErrorStreamCaptureWrongThread",
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
    (999, c"cudaErrorUnknown", c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn row(code: i32) -> &'static Row {
    ROWS.iter().find(|row| row.0 == code).unwrap_or(&ROWS[ROWS.len() - 1])
}

/// `cudaErrorMemoryAllocation`
pub(crate) fn runtime_name(code: i32) -> &'static CStr {
    row(code).1
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(crate) fn driver_name(code: i32) -> &'static CStr {
    row(code).2
}

/// `out of memory`
pub(crate) fn meaning(code: i32) -> &'static CStr {
    row(code).3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_errors_as_cuda_does() {
        assert_eq!(runtime_name(2), c"cudaErrorMemoryAllocation");
        assert_eq!((driver_name(0), meaning(2)), (c"CUDA_SUCCESS", c"out of memory"));
        assert_eq!(runtime_name(12345), c"cudaErrorUnknown");
        assert!(ROWS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
