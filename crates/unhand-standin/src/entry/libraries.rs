//! Functions of NVIDIA's libraries that need more than a zero: handles that differ, descriptors that remember.

mod cublas;
mod cudnn;
mod cudnn_rnn;
mod nccl;
mod nvrtc;

use std::ffi::c_int;

use super::answers;
use crate::gpu::{gpu, log};
use crate::pointers::Text;

answers! {
    /// Every generated stub that stands for work on a device ends here.
    fn unhand_standin_library_call(name: Text) -> c_int {
        if let Some(name) = name.get() {
            log::call(name);
        }
        gpu().library_call();
        0
    }
}
