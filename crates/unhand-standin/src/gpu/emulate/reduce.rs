//! Reductions to one number: computed where the operation is known, zero where not, since somebody reads it.

use super::elementwise::offset;
use super::values::{Type, Value};
use super::{Arguments, Effect, Memory};

const MAX_DIMENSIONS: u64 = 25;
/// Words of `ReduceConfig`, and bytes of the offset calculators of inputs (one operand) and outputs (two).
const CONFIG_BYTES: u64 = 64;
const INPUT_CALCULATOR: u64 = 4 + MAX_DIMENSIONS * (12 + 4);
const OUTPUT_CALCULATOR: u64 = 4 + MAX_DIMENSIONS * (12 + 8);

/// A reduction of a whole tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reduce {
    operation: Operation,
    kind: Type,
    n_inputs: u64,
    input: u64,
    sizes: Vec<u64>,
    strides: Vec<u64>,
    output: u64,
    output_kind: Type,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Any,
    All,
    Sum { factor: f64 },
    Max,
    Min,
}

/// Understands a launch of PyTorch's one reduction kernel.
///
/// Its only argument holds, one after the other: the operation, its neutral element, how the work is cut up, how
/// inputs and outputs are laid out, and their addresses.
pub(super) fn parse(name: &str, arguments: &Arguments) -> Option<Effect> {
    let inner = name.split_once("13reduce_kernelI")?.1.split_once("8ReduceOpI")?.1;
    let (kind, operation_name) = Type::mangled(inner)?;
    let output_kind = output_kind(inner, kind)?;
    let is_position = operation_name.contains("ArgMaxOpsI") || operation_name.contains("ArgMinOpsI");
    let config_at = if is_position { 24 } else { config_offset(operation_name, kind) };
    let calculators_at = config_at + CONFIG_BYTES;
    let addresses_at = (calculators_at + INPUT_CALCULATOR + OUTPUT_CALCULATOR).next_multiple_of(8);
    let size =
        |word: u64| u64::try_from(arguments.int(0, config_at + word * 4)?).ok().filter(|size| *size > 0);
    let (n_inputs, n_outputs) = (size(1)?, size(2)?);
    let (input, output) = (arguments.word(0, addresses_at)?, arguments.word(0, addresses_at + 8)?);
    if is_position {
        // Positions are used as indices: zero is one.
        return Some(Effect::Zero(vec![(output, n_outputs * output_kind.bytes())]));
    }
    if n_outputs != 1 {
        return None;
    }
    let Some(operation) = operation(operation_name, arguments) else {
        return Some(Effect::Zero(vec![(output, output_kind.bytes())]));
    };
    let word = |offset: u64| arguments.read::<u32>(0, calculators_at + offset).map(u64::from);
    let n_dimensions = word(0).filter(|n| *n <= MAX_DIMENSIONS)?;
    let sizes = (0..n_dimensions).map(|index| word(4 + index * 12)).collect::<Option<_>>()?;
    let strides_at = 4 + MAX_DIMENSIONS * 12;
    let strides = (0..n_dimensions).map(|index| word(strides_at + index * 4)).collect::<Option<_>>()?;
    Some(Effect::Reduce(Reduce { operation, kind, n_inputs, input, sizes, strides, output, output_kind }))
}

fn operation(name: &str, arguments: &Arguments) -> Option<Operation> {
    if name.contains("14or_kernel_cuda") {
        Some(Operation::Any)
    } else if name.contains("15and_kernel_cuda") {
        Some(Operation::All)
    } else if name.contains("11sum_functorI") {
        Some(Operation::Sum { factor: 1.0 })
    } else if name.contains("7MeanOpsIffff") {
        Some(Operation::Sum { factor: f64::from(arguments.read::<f32>(0, 0)?) })
    } else if name.contains("13MaxNanFunctorI") {
        Some(Operation::Max)
    } else if name.contains("13MinNanFunctorI") {
        Some(Operation::Min)
    } else {
        None
    }
}

/// The operation comes first: nothing (one byte), or the factor of a mean; then the neutral element, of the type
/// that is accumulated.
fn config_offset(name: &str, kind: Type) -> u64 {
    let accumulated = match kind {
        // Halves are added up in single precision, except by functions that only compare.
        Type::F16 | Type::Bf16 if !name.contains("NanFunctorI") => 4,
        kind => kind.bytes(),
    };
    let has_factor = name.contains("7MeanOpsI");
    let neutral_at = if has_factor { accumulated } else { 1_u64.next_multiple_of(accumulated) };
    (neutral_at + accumulated).next_multiple_of(4)
}

/// The type before the last two numbers of the name.
fn output_kind(inner: &str, kind: Type) -> Option<Type> {
    let before = inner.split_once("ELi4E").and_then(|_| inner.rfind("Li4ELi")).map(|at| &inner[..at])?;
    if before.ends_with('_') || before.ends_with("HalfE") || before.ends_with("BFloat16E") {
        return Some(kind);
    }
    // The type of indices stands before it.
    let last = before.len().checked_sub(1)?;
    Type::mangled(before.get(last..)?).map(|(kind, _)| kind)
}

impl Reduce {
    pub(super) fn apply(&self) {
        let Some(mut output) = Memory::new(self.output, self.output_kind.bytes()) else { return };
        let last = self.sizes.iter().zip(&self.strides).map(|(size, stride)| size.saturating_sub(1) * stride);
        let n_bytes = if self.sizes.is_empty() {
            self.n_inputs.saturating_mul(self.kind.bytes())
        } else {
            last.sum::<u64>() + self.kind.bytes()
        };
        // What is too large to look at reduces to zero: a result, if not the right one.
        let result = Memory::new(self.input, n_bytes).map_or(Value::Int(0), |input| self.reduce(&input));
        self.output_kind.write(&mut output, 0, result);
    }

    fn reduce(&self, input: &Memory) -> Value {
        let at = |index: u64| {
            if self.sizes.is_empty() {
                index * self.kind.bytes()
            } else {
                offset(&self.sizes, &self.strides, index)
            }
        };
        let mut values = (0..self.n_inputs).map(|index| self.kind.read(input, at(index)));
        match self.operation {
            Operation::Any => Value::Int(i64::from(values.any(Value::is_true))),
            Operation::All => Value::Int(i64::from(values.all(Value::is_true))),
            Operation::Sum { factor } => {
                let (int, float) = values.fold((0_i64, 0.0), |(int, float), value| match value {
                    Value::Int(value) => (int.wrapping_add(value), float),
                    Value::Float(value) => (int, float + value),
                });
                match self.kind {
                    Type::F16 | Type::Bf16 | Type::F32 | Type::F64 => Value::Float(float * factor),
                    _ => Value::Int(int),
                }
            }
            Operation::Max => {
                values.reduce(|left, right| extreme(left, right, true)).unwrap_or(Value::Int(0))
            }
            Operation::Min => {
                values.reduce(|left, right| extreme(left, right, false)).unwrap_or(Value::Int(0))
            }
        }
    }
}

/// The larger or smaller of two; what is not a number wins.
fn extreme(left: Value, right: Value, wants_larger: bool) -> Value {
    match (left, right) {
        (Value::Int(first), Value::Int(second)) => {
            Value::Int(if wants_larger { first.max(second) } else { first.min(second) })
        }
        (left, _) if left.float().is_nan() => left,
        (_, right) if right.float().is_nan() => right,
        (left, right) => {
            if (left.float() > right.float()) == wants_larger {
                left
            } else {
                right
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_where_the_parts_of_the_argument_lie() {
        // As a C++ compiler lays them out.
        assert_eq!(config_offset("14func_wrapper_tIbZZ14or_kernel_cuda", Type::Bool), 4);
        assert_eq!(config_offset("14func_wrapper_tIfZ11sum_functorIfff", Type::F32), 8);
        assert_eq!(config_offset("14func_wrapper_tIlZ11sum_functorIlll", Type::I64), 16);
        assert_eq!(config_offset("7MeanOpsIffffE", Type::F32), 8);
        assert_eq!(config_offset("14func_wrapper_tIN3c104HalfENS0_13MaxNanFunctorI", Type::F16), 4);
    }

    #[test]
    fn knows_the_type_of_the_result() {
        let name = "fNS0_14func_wrapper_tIfZNS0_11sum_functorIfffEclERNS_14TensorIteratorEEUlffE_EEjfLi4ELi4EEEEEvT1_";
        assert_eq!(output_kind(name, Type::F32), Some(Type::F32));
        assert_eq!(output_kind("fNS0_9ArgMaxOpsIfEEjlLi4ELi4EEEEEvT1_", Type::F32), Some(Type::I64));
    }

    #[test]
    fn extremes_keep_what_is_not_a_number() {
        let nan = Value::Float(f64::NAN);
        assert!(extreme(Value::Float(1.0), nan, true).float().is_nan());
        assert_eq!(extreme(Value::Int(1), Value::Int(2), false), Value::Int(1));
        assert_eq!(extreme(Value::Float(1.0), Value::Float(2.0), true), Value::Float(2.0));
    }
}
