//! The run-time compiler: every program compiles to nothing.

use std::ffi::{c_char, c_int};

use crate::entry::entries;
use crate::gpu::config;
use crate::pointers::{Out, Text};

entries! { plain:
    fn nvrtcVersion(major: Out<c_int>, minor: Out<c_int>) {
        major.set(config().cuda_version / 1000)?;
        minor.set(config().cuda_version % 1000 / 10)
    }
    fn nvrtcGetPTXSize(_program: u64, bytes: Out<usize>) {
        bytes.set(1)
    }
    fn nvrtcGetPTX(_program: u64, text: Out<c_char>) {
        text.set(0)
    }
    fn nvrtcGetCUBINSize(_program: u64, bytes: Out<usize>) {
        bytes.set(1)
    }
    fn nvrtcGetCUBIN(_program: u64, text: Out<c_char>) {
        text.set(0)
    }
    fn nvrtcGetProgramLogSize(_program: u64, bytes: Out<usize>) {
        bytes.set(1)
    }
    fn nvrtcGetProgramLog(_program: u64, text: Out<c_char>) {
        text.set(0)
    }
    fn nvrtcGetLoweredName(_program: u64, name: Text, lowered: Out<u64>) {
        // The caller's own text outlives its question, and names a kernel as well as any.
        lowered.set(name.address())
    }
}
