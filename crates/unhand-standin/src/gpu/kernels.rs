//! Kernels and variables that libraries register, by name.

use std::collections::HashMap;
use std::ffi::CStr;

use crate::code::Code;
use crate::sys;

/// What a program registered.
#[derive(Default)]
pub(crate) struct Kernels {
    /// The host's stand-in function → its mangled name.
    names: HashMap<u64, &'static CStr>,
    /// The host's stand-in variable → its size, and memory once somebody asked where it is.
    variables: HashMap<u64, Variable>,
    /// Functions of modules loaded at run time, by the handle we gave out.
    last_handle: u64,
}

#[derive(Clone, Copy, Debug)]
struct Variable {
    bytes: u64,
    memory: Option<u64>,
}

impl Kernels {
    /// A library is loaded: about 20,000 calls for PyTorch, so names stay where they are.
    pub(crate) fn register(&mut self, function: u64, name: &'static CStr) {
        self.names.insert(function, name);
    }

    pub(crate) fn name(&self, function: u64) -> Option<&'static CStr> {
        self.names.get(&function).copied()
    }

    pub(crate) fn register_variable(&mut self, variable: u64, bytes: u64) {
        self.variables.insert(variable, Variable { bytes, memory: None });
    }

    /// Memory for a variable, and its size.
    pub(crate) fn variable(&mut self, variable: u64) -> Result<(u64, u64), Code> {
        let entry = self.variables.get_mut(&variable).ok_or(Code::INVALID_SYMBOL)?;
        if entry.memory.is_none() {
            entry.memory = sys::allocate_host(entry.bytes);
        }
        Ok((entry.memory.ok_or(Code::OUT_OF_MEMORY)?, entry.bytes))
    }

    /// A handle for something loaded at run time: a module, a function of it.
    pub(crate) fn handle(&mut self) -> u64 {
        self.last_handle += 0x40;
        0x7000_0000 + self.last_handle
    }
}
