//! Kernels with one result for each element: fills, copies, casts, comparisons, ranges.

use super::values::{Type, Value};
use super::{Arguments, Memory};

/// Dimensions that PyTorch's offset calculators have room for.
const MAX_DIMENSIONS: u64 = 25;

/// Elements, and what becomes of each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Elementwise {
    count: u64,
    output: Operand,
    inputs: Vec<Operand>,
    operation: Operation,
    /// Sizes of the dimensions, the fastest first. Empty: everything is contiguous.
    sizes: Vec<u64>,
}

/// Where a tensor is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Operand {
    address: u64,
    kind: Type,
    /// Bytes from one element to the next, for each dimension.
    strides: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Fill(Value),
    Copy,
    CompareTo(Comparison, Value),
    Compare(Comparison),
    Add(Value),
    Range { start: Value, step: Value },
}

/// How two values are compared, in the order of PyTorch's own enumerations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    GreaterEqual,
    Greater,
    LessEqual,
    Less,
    Equal,
    NotEqual,
}

/// Understands a launch of an elementwise kernel, if it is one of those we know.
pub(super) fn parse(name: &str, arguments: &Arguments) -> Option<Elementwise> {
    if name.contains("elementwise_kernel_with_index") {
        return parse_range(name, arguments);
    }
    let is_vectorized = name.contains("29vectorized_elementwise_kernel");
    if is_vectorized || name.contains("27unrolled_elementwise_kernel") {
        return parse_contiguous(name, arguments, is_vectorized);
    }
    let is_copy = name.contains("gpu_kernel_impl_nocastI") && name.contains("23direct_copy_kernel_cuda");
    if name.contains("18elementwise_kernelI") && is_copy { parse_strided_copy(name, arguments) } else { None }
}

/// `(int count, functor, array of addresses, …)`
fn parse_contiguous(name: &str, arguments: &Arguments, is_vectorized: bool) -> Option<Elementwise> {
    let count = u64::try_from(arguments.int(0, 0)?).ok()?;
    let at = |index: u64, kind: Type| {
        Some(Operand { address: arguments.word(2, index * 8)?, kind, strides: Vec::new() })
    };
    let work = |output: Type, inputs: &[Type], operation: Operation| {
        let inputs = (1..).zip(inputs).map(|(index, kind)| at(index, *kind)).collect::<Option<Vec<_>>>()?;
        Some(Elementwise { count, output: at(0, output)?, inputs, operation, sizes: Vec::new() })
    };
    if let Some(kind) = type_after(name, "11FillFunctorI") {
        return work(kind, &[], Operation::Fill(read(arguments, 1, 0, kind)?));
    }
    if name.contains("23direct_copy_kernel_cuda") {
        if is_vectorized {
            let kind = lambda_type(name)?;
            return work(kind, &[kind], Operation::Copy);
        }
        // Loader and storer begin with the types they convert from and to.
        if name.contains("12LoadWithCastILi1EEE") && name.contains("13StoreWithCastILi1EEE") {
            let (from, to) = (Type::numbered(arguments.read(5, 0)?)?, Type::numbered(arguments.read(6, 0)?)?);
            return work(to, &[from], Operation::Copy);
        }
        return None;
    }
    if !is_vectorized {
        return None;
    }
    let half_casts = [("24float16_copy_kernel_cuda", Type::F16), ("25bfloat16_copy_kernel_cuda", Type::Bf16)];
    if let Some((_, to)) = half_casts.iter().find(|(part, _)| name.contains(part)) {
        return work(*to, &[lambda_type(name)?], Operation::Copy);
    }
    if name.contains("bfloat16tofloat32_copy_kernel_cuda") {
        return work(Type::F32, &[Type::Bf16], Operation::Copy);
    }
    if name.contains("float16tofloat32_copy_kernel_cuda") {
        return work(Type::F32, &[Type::F16], Operation::Copy);
    }
    // The number, and what it is multiplied with before.
    if let Some(kind @ (Type::F32 | Type::F64 | Type::I64)) = type_after(name, "21CUDAFunctorOnSelf_addI") {
        let (number, factor) = (read(arguments, 1, 0, kind)?, read(arguments, 1, kind.bytes(), kind)?);
        return work(kind, &[kind], Operation::Add(number.times(factor)));
    }
    // Since 2.15: from one type to another, both named.
    if let Some((from, rest)) =
        name.split_once("27converting_copy_kernel_cudaI").and_then(|(_, rest)| Type::mangled(rest))
    {
        return work(Type::mangled(rest)?.0, &[from], Operation::Copy);
    }
    // A lambda that keeps the kind of comparison and the number.
    if let Some(kind) = type_after(name, "21compare_scalar_kernelI") {
        let value = read(arguments, 1, kind.bytes().max(4), kind)?;
        return work(Type::Bool, &[kind], Operation::CompareTo(ordering(arguments.int(1, 0)?)?, value));
    }
    let comparison = |offset| {
        if name.contains("16CompareEqFunctorI") {
            equality(arguments.int(1, offset)?)
        } else if name.contains("14CompareFunctorI") {
            ordering(arguments.int(1, offset)?)
        } else {
            None
        }
    };
    if let Some(kind) = type_after(name, "13BinaryFunctorI") {
        return work(Type::Bool, &[kind, kind], Operation::Compare(comparison(0)?));
    }
    if let Some(kind) = type_after(name, "13AUnaryFunctorI") {
        // The functor, then the number on the left side; equality does not mind sides.
        let value = read(arguments, 1, kind.bytes().max(4), kind)?;
        let comparison = comparison(0)?;
        let is_symmetric = matches!(comparison, Comparison::Equal | Comparison::NotEqual);
        return if is_symmetric {
            work(Type::Bool, &[kind], Operation::CompareTo(comparison, value))
        } else {
            None
        };
    }
    let is_plain_comparison = !name.contains("UnaryFunctorI") && !name.contains("EUl");
    let kind = type_after(name, "14CompareFunctorI").filter(|_| is_plain_comparison)?;
    work(Type::Bool, &[kind, kind], Operation::Compare(comparison(0)?))
}

/// `(int count, lambda)`, where the lambda keeps an offset calculator and two addresses.
fn parse_strided_copy(name: &str, arguments: &Arguments) -> Option<Elementwise> {
    let kind = lambda_type(name)?;
    let count = u64::try_from(arguments.int(0, 0)?).ok()?;
    let n_dimensions = u64::try_from(arguments.int(1, 0)?).ok().filter(|n| *n <= MAX_DIMENSIONS)?;
    // Dimensions; a divider of three words for each size; for each size the strides of output and input.
    let word = |offset: u64| arguments.read::<u32>(1, offset).map(u64::from);
    let strides_at = 4 + MAX_DIMENSIONS * 12;
    let sizes = (0..n_dimensions).map(|index| word(4 + index * 12)).collect::<Option<Vec<_>>>()?;
    let strides = |operand: u64| {
        (0..n_dimensions).map(|index| word(strides_at + index * 8 + operand * 4)).collect::<Option<Vec<_>>>()
    };
    let addresses_at = (strides_at + MAX_DIMENSIONS * 8).next_multiple_of(8);
    let operand = |index: u64| {
        let address = arguments.word(1, addresses_at + index * 8)?;
        Some(Operand { address, kind, strides: strides(index)? })
    };
    let (output, input) = (operand(0)?, operand(1)?);
    Some(Elementwise { count, output, inputs: vec![input], operation: Operation::Copy, sizes })
}

/// `(int count, lambda, address)`, where the lambda keeps start and step as the type that it computes in.
fn parse_range(name: &str, arguments: &Arguments) -> Option<Elementwise> {
    if !name.contains("15arange_cuda_out") {
        return None;
    }
    let count = u64::try_from(arguments.int(0, 0)?).ok()?;
    // Which lambda of the dispatch over types it is.
    let nth = name.split_once("EENKUlvE_clEvENKUlvE")?.1.split_once('_')?.0;
    let (kind, computed) = match nth {
        "2" => (Type::I64, Type::I64),
        "1" => (Type::I32, Type::I64),
        "5" => (Type::F32, Type::F32),
        "4" => (Type::F64, Type::F64),
        _ => return None,
    };
    let output = Operand { address: arguments.word(2, 0)?, kind, strides: Vec::new() };
    let start = read(arguments, 1, 0, computed)?;
    let step = read(arguments, 1, computed.bytes(), computed)?;
    Some(Elementwise {
        count,
        output,
        inputs: Vec::new(),
        operation: Operation::Range { start, step },
        sizes: Vec::new(),
    })
}

impl Elementwise {
    pub(super) fn apply(&self) {
        let Some(mut output) = self.memory(&self.output) else { return };
        let inputs: Option<Vec<Memory>> = self.inputs.iter().map(|input| self.memory(input)).collect();
        let Some(inputs) = inputs else { return };
        for index in 0..self.count {
            let value = |nth: usize| {
                let input = &self.inputs[nth];
                input.kind.read(&inputs[nth], self.offset(input, index))
            };
            let truth = |is_true: bool| Value::Int(i64::from(is_true));
            let result = match self.operation {
                Operation::Fill(value) => value,
                Operation::Copy => value(0),
                Operation::CompareTo(comparison, right) => truth(comparison.holds(value(0), right)),
                Operation::Compare(comparison) => truth(comparison.holds(value(0), value(1))),
                Operation::Add(number) => value(0).plus(number),
                Operation::Range { start, step } => nth_of_range(start, step, index),
            };
            self.output.kind.write(&mut output, self.offset(&self.output, index), result);
        }
    }

    /// All memory that an operand touches.
    fn memory(&self, operand: &Operand) -> Option<Memory> {
        let bytes = if self.sizes.is_empty() {
            self.count.checked_mul(operand.kind.bytes())?
        } else {
            let last =
                self.sizes.iter().zip(&operand.strides).map(|(size, stride)| size.saturating_sub(1) * stride);
            last.sum::<u64>() + operand.kind.bytes()
        };
        Memory::new(operand.address, bytes)
    }

    fn offset(&self, operand: &Operand, index: u64) -> u64 {
        if self.sizes.is_empty() {
            return index * operand.kind.bytes();
        }
        offset(&self.sizes, &operand.strides, index)
    }
}

/// The offset of an element, counted along the dimensions.
pub(super) fn offset(sizes: &[u64], strides: &[u64], mut index: u64) -> u64 {
    let mut offset = 0;
    for (size, stride) in sizes.iter().zip(strides) {
        offset += index % size.max(&1) * stride;
        index /= size.max(&1);
    }
    offset
}

#[allow(clippy::cast_precision_loss, reason = "PyTorch multiplies in the type of the result, too")]
fn nth_of_range(start: Value, step: Value, index: u64) -> Value {
    match (start, step) {
        (Value::Int(start), Value::Int(step)) => {
            Value::Int(start.wrapping_add(step.wrapping_mul(index.cast_signed())))
        }
        (start, step) => Value::Float(start.float() + step.float() * index as f64),
    }
}

impl Comparison {
    fn holds(self, left: Value, right: Value) -> bool {
        let order = match (left, right) {
            (Value::Int(left), Value::Int(right)) => Some(left.cmp(&right)),
            (left, right) => left.float().partial_cmp(&right.float()),
        };
        match self {
            Comparison::GreaterEqual => order.is_some_and(std::cmp::Ordering::is_ge),
            Comparison::Greater => order.is_some_and(std::cmp::Ordering::is_gt),
            Comparison::LessEqual => order.is_some_and(std::cmp::Ordering::is_le),
            Comparison::Less => order.is_some_and(std::cmp::Ordering::is_lt),
            Comparison::Equal => order.is_some_and(std::cmp::Ordering::is_eq),
            Comparison::NotEqual => !order.is_some_and(std::cmp::Ordering::is_eq),
        }
    }
}

fn ordering(number: i32) -> Option<Comparison> {
    [Comparison::GreaterEqual, Comparison::Greater, Comparison::LessEqual, Comparison::Less]
        .get(usize::try_from(number).ok()?)
        .copied()
}

fn equality(number: i32) -> Option<Comparison> {
    [Comparison::Equal, Comparison::NotEqual].get(usize::try_from(number).ok()?).copied()
}

fn read(arguments: &Arguments, index: u64, offset: u64, kind: Type) -> Option<Value> {
    Some(match kind {
        Type::Bool => Value::Int(i64::from(arguments.read::<u8>(index, offset)? != 0)),
        Type::U8 => Value::Int(i64::from(arguments.read::<u8>(index, offset)?)),
        Type::I8 => Value::Int(i64::from(arguments.read::<i8>(index, offset)?)),
        Type::I16 => Value::Int(i64::from(arguments.read::<i16>(index, offset)?)),
        Type::I32 => Value::Int(i64::from(arguments.int(index, offset)?)),
        Type::I64 => Value::Int(arguments.read::<i64>(index, offset)?),
        Type::F32 => Value::Float(f64::from(arguments.read::<f32>(index, offset)?)),
        Type::F64 => Value::Float(arguments.read::<f64>(index, offset)?),
        Type::F16 | Type::Bf16 => {
            let bits = arguments.read::<u16>(index, offset)?;
            Value::Float(kind.of_bits(bits))
        }
    })
}

/// The type named right after a part of a mangled name.
pub(super) fn type_after(name: &str, part: &str) -> Option<Type> {
    Type::mangled(name.split_once(part)?.1).map(|(kind, _)| kind)
}

/// The argument of the innermost lambda: `…EUlfE_…`.
fn lambda_type(name: &str) -> Option<Type> {
    name.match_indices("EUl").find_map(|(at, part)| {
        let (kind, rest) = Type::mangled(&name[at + part.len()..])?;
        rest.starts_with('E').then_some(kind)
    })
}
