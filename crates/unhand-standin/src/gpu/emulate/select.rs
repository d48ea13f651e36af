//! Kernels behind data-dependent sizes: how many elements are not zero, and which.

use super::elementwise::type_after;
use super::values::{Type, Value};
use super::{Arguments, Memory};

/// What is counted or chosen.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Select {
    /// How many elements of `flags` are not zero.
    Count { flags: u64, kind: Type, n_flags: u64, output: u64, n_outputs: u64 },
    /// The sum of partial counts.
    Sum { parts: u64, n_parts: u64, output: u64 },
    /// The indices of elements that are not zero.
    Indices { flags: u64, kind: Type, n_flags: u64, output: u64, first: i64 },
    /// Flat indices, made into one for each dimension.
    Coordinates { indices: u64, sizes: Vec<i64>, count: u64 },
    /// How many are distinct: all of them, since nothing was sorted.
    Distinct { count: i64, output: u64 },
}

/// Understands a launch of one of these kernels.
pub(super) fn parse(name: &str, arguments: &Arguments, n_blocks: u64) -> Option<Select> {
    // An iterator over flags is an address and an empty operation; until 2.10 the operation came first.
    let address_at = if name.contains("22TransformInputIteratorI") { 8 } else { 0 };
    let flags = || Some((arguments.word(0, address_at)?, type_after(name, "9NonZeroOpI")?));
    let size = |index: u64| u64::try_from(arguments.int(index, 0)?).ok();
    if name.contains("28DeviceReduceSingleTileKernelI") {
        let output = arguments.word(1, 0)?;
        return match flags() {
            Some((flags, kind)) => {
                Some(Select::Count { flags, kind, n_flags: arguments.word(2, 0)?, output, n_outputs: 1 })
            }
            // The second pass over many elements: partial counts are added up.
            None if name.contains("4plusIvE") && name.contains("Pi") => {
                Some(Select::Sum { parts: arguments.word(0, 0)?, n_parts: size(2)?, output })
            }
            None => None,
        };
    }
    if name.contains("18DeviceReduceKernelI") {
        // The first pass: a partial count for each block of threads. All of it goes into the first.
        let (flags, kind) = flags()?;
        let (output, n_flags) = (arguments.word(1, 0)?, arguments.word(2, 0)?);
        return Some(Select::Count { flags, kind, n_flags, output, n_outputs: n_blocks });
    }
    if name.contains("23DeviceSelectSweepKernelI") {
        let counts = name.contains("17counting_iteratorIl") || name.contains("21CountingInputIteratorIl");
        if name.contains("9NonZeroOpI") && counts {
            // Iterator of indices, iterator of flags, output, count, state, two operations, number of elements.
            let kind = type_after(name, "9NonZeroOpI")?;
            let (first, flags, output) =
                (arguments.read(0, 0)?, arguments.word(1, address_at)?, arguments.word(2, 0)?);
            return Some(Select::Indices { flags, kind, n_flags: size(7)?, output, first });
        }
        if name.contains("8equal_toI") {
            return Some(Select::Distinct {
                count: i64::from(arguments.int(7, 0)?),
                output: arguments.word(3, 0)?,
            });
        }
        return None;
    }
    if name.contains("13write_indicesI") {
        let n_dimensions = size(2).filter(|n| *n <= 16)?;
        let sizes =
            (0..n_dimensions).map(|index| arguments.read::<i64>(1, index * 8)).collect::<Option<_>>()?;
        let count = size(3)?;
        return Some(Select::Coordinates { indices: arguments.word(0, 0)?, sizes, count });
    }
    None
}

impl Select {
    pub(super) fn apply(&self) {
        match self {
            Select::Count { flags, kind, n_flags, output, n_outputs } => {
                let count = chosen(*flags, *kind, *n_flags).count();
                write_int(*output, i32::try_from(count).unwrap_or(i32::MAX));
                for index in 1..*n_outputs {
                    write_int(output + index * 4, 0);
                }
            }
            Select::Sum { parts, n_parts, output } => {
                let Some(memory) = Memory::new(*parts, n_parts * 4) else { return };
                let values = (0..*n_parts).map(|index| i32::from_le_bytes(memory.read(index * 4)));
                write_int(*output, values.fold(0, i32::wrapping_add));
            }
            Select::Indices { flags, kind, n_flags, output, first } => {
                for (place, index) in (0..).zip(chosen(*flags, *kind, *n_flags)) {
                    if let Some(mut memory) = Memory::new(output + place * 8, 8) {
                        memory.write(0, &(first + index.cast_signed()).to_le_bytes());
                    }
                }
            }
            Select::Coordinates { indices, sizes, count } => {
                let n_dimensions = sizes.len() as u64;
                let Some(mut memory) = Memory::new(*indices, count * n_dimensions * 8) else { return };
                for index in 0..*count {
                    let mut rest = i64::from_le_bytes(memory.read(index * 8));
                    for (dimension, size) in (0_u64..).zip(sizes).collect::<Vec<_>>().into_iter().rev() {
                        let coordinate = rest.checked_rem(*size).unwrap_or(0);
                        rest = rest.checked_div(*size).unwrap_or(0);
                        memory.write((index + dimension * count) * 8, &coordinate.to_le_bytes());
                    }
                }
            }
            Select::Distinct { count, output } => {
                if let Some(mut memory) = Memory::new(*output, 8) {
                    memory.write(0, &count.to_le_bytes());
                }
            }
        }
    }
}

/// The indices of elements that are not zero; none if there are too many elements to look at.
fn chosen(flags: u64, kind: Type, n_flags: u64) -> impl Iterator<Item = u64> {
    let memory = n_flags.checked_mul(kind.bytes()).and_then(|bytes| Memory::new(flags, bytes));
    let n_flags = if memory.is_some() { n_flags } else { 0 };
    (0..n_flags).filter(move |index| {
        let value = memory.as_ref().map_or(Value::Int(0), |memory| kind.read(memory, index * kind.bytes()));
        // Not a number is not zero, and is chosen.
        value.is_true() || value.float().is_nan()
    })
}

fn write_int(address: u64, value: i32) {
    if let Some(mut memory) = Memory::new(address, 4) {
        memory.write(0, &value.to_le_bytes());
    }
}
