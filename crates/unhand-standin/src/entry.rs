//! The way in from C: every entry point is one guarded line, so that no panic leaves it.
//!
//! Names are exported without a version. The loader takes such a definition for any version that a library asks
//! for, which is how one object serves wheels of all CUDA releases.

mod driver;
mod driver_memory;
mod libraries;
mod nvml;
mod runtime_device;
mod runtime_graph;
mod runtime_launch;
mod runtime_memory;
mod runtime_module;
mod runtime_stream;

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{Code, Outcome};

thread_local! {
    /// What `cudaGetLastError` returns.
    static LAST_ERROR: Cell<c_int> = const { Cell::new(0) };
}

/// Runs the body of an entry point. A panic is a bug of ours, and an unknown error to the caller.
pub(crate) fn guard(body: impl FnOnce() -> Outcome) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// The same for the runtime, which remembers a thread's last error.
pub(crate) fn guard_runtime(body: impl FnOnce() -> Outcome) -> c_int {
    let code = guard(body);
    if code != 0 {
        LAST_ERROR.set(code);
    }
    code
}

/// The thread's last error; taking it clears it.
pub(crate) fn last_error(take: bool) -> c_int {
    if take { LAST_ERROR.replace(0) } else { LAST_ERROR.get() }
}

/// Entry points that return an error number. The first word says who remembers the error: `runtime` does,
/// `plain` (driver, NVML, libraries) does not.
macro_rules! entries {
    (runtime: $($rest:tt)*) => { $crate::entry::entries!(@ guard_runtime $($rest)*); };
    (plain: $($rest:tt)*) => { $crate::entry::entries!(@ guard $($rest)*); };
    (@ $guard:ident $($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[allow(unsafe_code, non_snake_case, clippy::too_many_arguments, reason = "an entry point's name is CUDA's")]
        extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            $crate::entry::$guard(|| $body)
        }
    )* };
}

/// Entry points that return something else. They must be too simple to panic.
macro_rules! answers {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => { $(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[allow(unsafe_code, non_snake_case, clippy::too_many_arguments, reason = "an entry point's name is CUDA's")]
        extern "C" fn $name($($argument: $type),*) -> $result $body
    )* };
}

pub(crate) use {answers, entries};
