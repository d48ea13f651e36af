//! Numbers of PyTorch's types in memory: read as one type that holds them all, written back rounded.

use super::Memory;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

/// An element. Integers stay exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    Int(i64),
    Float(f64),
}

impl Type {
    /// The type that a mangled name begins with, and what follows.
    pub(crate) fn mangled(code: &str) -> Option<(Type, &str)> {
        const CODES: &[(&str, Type)] = &[
            ("N3c104HalfE", Type::F16),
            ("N3c108BFloat16E", Type::Bf16),
            ("b", Type::Bool),
            ("h", Type::U8),
            ("a", Type::I8),
            ("s", Type::I16),
            ("i", Type::I32),
            ("l", Type::I64),
            ("f", Type::F32),
            ("d", Type::F64),
        ];
        CODES.iter().find_map(|(name, kind)| code.strip_prefix(name).map(|rest| (*kind, rest)))
    }

    /// The type by PyTorch's number (`c10::ScalarType`).
    pub(crate) fn numbered(number: i8) -> Option<Type> {
        Some(match number {
            0 => Type::U8,
            1 => Type::I8,
            2 => Type::I16,
            3 => Type::I32,
            4 => Type::I64,
            5 => Type::F16,
            6 => Type::F32,
            7 => Type::F64,
            11 => Type::Bool,
            15 => Type::Bf16,
            _ => return None,
        })
    }

    /// A number of one of the two types of 16 bits.
    pub(crate) fn of_bits(self, bits: u16) -> f64 {
        if self == Type::F16 { from_half(bits) } else { f64::from(f32::from_bits(u32::from(bits) << 16)) }
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Type::Bool | Type::U8 | Type::I8 => 1,
            Type::I16 | Type::F16 | Type::Bf16 => 2,
            Type::I32 | Type::F32 => 4,
            Type::I64 | Type::F64 => 8,
        }
    }

    pub(crate) fn read(self, memory: &Memory, offset: u64) -> Value {
        match self {
            Type::Bool => Value::Int(i64::from(memory.read::<1>(offset)[0] != 0)),
            Type::U8 => Value::Int(i64::from(memory.read::<1>(offset)[0])),
            Type::I8 => Value::Int(i64::from(i8::from_le_bytes(memory.read(offset)))),
            Type::I16 => Value::Int(i64::from(i16::from_le_bytes(memory.read(offset)))),
            Type::I32 => Value::Int(i64::from(i32::from_le_bytes(memory.read(offset)))),
            Type::I64 => Value::Int(i64::from_le_bytes(memory.read(offset))),
            Type::F16 | Type::Bf16 => Value::Float(self.of_bits(u16::from_le_bytes(memory.read(offset)))),
            Type::F32 => Value::Float(f64::from(f32::from_le_bytes(memory.read(offset)))),
            Type::F64 => Value::Float(f64::from_le_bytes(memory.read(offset))),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "a store narrows, as on a device")]
    pub(crate) fn write(self, memory: &mut Memory, offset: u64, value: Value) {
        let (int, float) = (value.int(), value.float());
        match self {
            Type::Bool => memory.write(offset, &[u8::from(value.is_true())]),
            Type::U8 | Type::I8 => memory.write(offset, &int.to_le_bytes()[..1]),
            Type::I16 => memory.write(offset, &int.to_le_bytes()[..2]),
            Type::I32 => memory.write(offset, &int.to_le_bytes()[..4]),
            Type::I64 => memory.write(offset, &int.to_le_bytes()),
            Type::F16 => memory.write(offset, &to_half(float as f32).to_le_bytes()),
            Type::Bf16 => memory.write(offset, &to_bfloat(float as f32).to_le_bytes()),
            Type::F32 => memory.write(offset, &(float as f32).to_le_bytes()),
            Type::F64 => memory.write(offset, &float.to_le_bytes()),
        }
    }
}

impl Value {
    #[allow(clippy::cast_possible_truncation, reason = "conversion to an integer saturates")]
    pub(crate) fn int(self) -> i64 {
        match self {
            Value::Int(value) => value,
            Value::Float(value) => value as i64,
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "a float has 53 bits")]
    pub(crate) fn float(self) -> f64 {
        match self {
            Value::Int(value) => value as f64,
            Value::Float(value) => value,
        }
    }

    pub(crate) fn plus(self, other: Value) -> Value {
        match (self, other) {
            (Value::Int(left), Value::Int(right)) => Value::Int(left.wrapping_add(right)),
            (left, right) => Value::Float(left.float() + right.float()),
        }
    }

    pub(crate) fn times(self, other: Value) -> Value {
        match (self, other) {
            (Value::Int(left), Value::Int(right)) => Value::Int(left.wrapping_mul(right)),
            (left, right) => Value::Float(left.float() * right.float()),
        }
    }

    /// Not zero; a NaN is not.
    pub(crate) fn is_true(self) -> bool {
        match self {
            Value::Int(value) => value != 0,
            Value::Float(value) => value != 0.0,
        }
    }
}

fn from_half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2_f64.powi(-24),
        0x1f if fraction == 0.0 => sign * f64::INFINITY,
        0x1f => f64::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15),
    }
}

/// Rounds to the nearest half, ties to even.
fn to_half(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = u16::try_from(bits >> 16 & 0x8000).unwrap_or(0);
    let magnitude = f64::from(value.abs());
    if value.is_nan() {
        return sign | 0x7e00;
    }
    // Half of the last step above the largest half, from where on values round to infinity.
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    let exponent = if magnitude < 2_f64.powi(-14) { -14 } else { (bits >> 23 & 0xff).cast_signed() - 127 };
    let steps = (magnitude * 2_f64.powi(10 - exponent)).round_ties_even();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2048")]
    let steps = steps as i32;
    // Steps from 1024 on carry into the exponent by themselves.
    let base = if steps >= 1024 { (exponent + 14) * 1024 } else { 0 };
    sign | u16::try_from(base + steps).unwrap_or(0x7c00)
}

/// Rounds to the nearest bfloat16, ties to even.
fn to_bfloat(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let bits = value.to_bits();
    let rounded = bits + 0x7fff + (bits >> 16 & 1);
    u16::try_from(rounded >> 16).unwrap_or(0x7f80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::float_cmp, reason = "these are exact")]
    fn halves_round_to_the_nearest() {
        for (value, bits) in [
            (0.0, 0),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65_504.0, 0x7bff),
            (65_520.0, 0x7c00),
            (1.0 / 16_777_216.0, 1),
            (0.000_061_035_156, 0x0400),
            (2049.0, 0x6800),
            (2051.0, 0x6802),
        ] {
            assert_eq!(to_half(value), bits, "{value}");
        }
        assert!(from_half(to_half(f32::NAN)).is_nan());
        for bits in (0..0x7c00).chain(0x8000..0xfc00) {
            #[allow(clippy::cast_possible_truncation, reason = "a half fits")]
            let back = to_half(from_half(bits) as f32);
            assert_eq!(back, bits);
        }
    }

    #[test]
    fn bfloats_round_to_the_nearest() {
        assert_eq!((to_bfloat(1.0), to_bfloat(f32::INFINITY)), (0x3f80, 0x7f80));
        assert_eq!(to_bfloat(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(to_bfloat(f32::from_bits(0x3f81_8000)), 0x3f82);
    }

    #[test]
    fn knows_types_by_their_mangled_names() {
        assert_eq!(Type::mangled("N3c108BFloat16Ei"), Some((Type::Bf16, "i")));
        assert_eq!(Type::mangled("fE"), Some((Type::F32, "E")));
        assert_eq!(Type::mangled("N3c107complexIfEE"), None);
    }
}
