//! Counters on the device: optimizers add one to them with one launch for many tensors, and some read them back.

use super::values::{Type, Value};
use super::{Arguments, Memory};

/// How many tensors one launch has room for: until 2.11, and what was found in 2.15.
const CAPACITIES: [u64; 2] = [110, 770];

/// Numbers to which another is added.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Steps {
    counters: Vec<u64>,
    increment: f32,
}

/// Understands `_foreach_add_` of a number to single-precision tensors, of which those with one element are taken.
///
/// The first argument begins with the addresses of the tensors and then their lengths; each array has room for as many
/// tensors as a launch can have. Each block of threads works on one tensor or on a part of one.
pub(super) fn parse(name: &str, arguments: &Arguments, n_blocks: u64) -> Option<Steps> {
    if !name.contains("25multi_tensor_apply_kernelI")
        || !name.contains("21BinaryOpScalarFunctorIfLi1ELi1ELi0E")
    {
        return None;
    }
    if !name.contains("St4plusIfE") {
        return None;
    }
    let increment = arguments.read::<f32>(3, 0)?;
    CAPACITIES.iter().find_map(|capacity| {
        let counters: Vec<u64> = (0..n_blocks.min(*capacity))
            .map_while(|index| {
                let (address, length) =
                    (arguments.word(0, index * 8)?, arguments.word(0, (capacity + index) * 8)?);
                let bytes = length.checked_mul(4).filter(|bytes| *bytes > 0)?;
                // A length that does not fit into the memory there is none: the arrays are longer, or at their end.
                Memory::is_live(address, bytes).then_some((address, length))
            })
            .filter(|(_, length)| *length == 1)
            .map(|(address, _)| address)
            .collect();
        (!counters.is_empty()).then_some(Steps { counters, increment })
    })
}

impl Steps {
    pub(super) fn apply(&self) {
        for address in &self.counters {
            if let Some(mut memory) = Memory::new(*address, 4) {
                let value = Type::F32.read(&memory, 0).float() + f64::from(self.increment);
                Type::F32.write(&mut memory, 0, Value::Float(value));
            }
        }
    }
}
