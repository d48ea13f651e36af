//! How bytes are written and read everywhere in the product: IEC units, one rounding rule.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. Displays as `512 B`, `1.0 MiB`, `14.5 GiB`; serialises as an integer.
///
/// One decimal, halves rounded up, and never a number that belongs to the next unit: one byte less than
/// 1 MiB reads `1.0 MiB`, not `1024.0 KiB`. Width and alignment of the format string are kept.
///
/// ```
/// use unhand_alloc::Bytes;
/// assert_eq!(Bytes(15_569_256_448).to_string(), "14.5 GiB");
/// assert_eq!(Bytes((1 << 20) - 1).to_string(), "1.0 MiB");
/// assert_eq!(format!("{:>9}", Bytes(512)), "    512 B");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Bytes(pub u64);

/// A difference of bytes. Displays as `+1.0 MiB`, `-512 B`, `0 B`; serialises as an integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct BytesChange(pub i64);

/// A text that is not a number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a number of bytes: `{text}` ({reason})")]
pub struct BytesError {
    text: String,
    reason: &'static str,
}

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text(self.0))
    }
}

impl fmt::Display for BytesChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match self.0 {
            0 => "",
            n if n > 0 => "+",
            _ => "-",
        };
        f.pad(&format!("{sign}{}", text(self.0.unsigned_abs())))
    }
}

impl From<u64> for Bytes {
    fn from(bytes: u64) -> Self {
        Bytes(bytes)
    }
}

impl BytesChange {
    /// `after - before`, saturating at the ends of `i64`.
    pub fn between(before: u64, after: u64) -> Self {
        let change = i128::from(after) - i128::from(before);
        BytesChange(i64::try_from(change).unwrap_or(if change > 0 { i64::MAX } else { i64::MIN }))
    }
}

/// Reads `512`, `512 B`, `80 MiB`, `20GiB`, `1.5g`, `5GB`.
///
/// `KiB`, `MiB` … and the single letters `k`, `m`, `g`, `t`, `p`, `e` are binary, as in allocator settings
/// and container limits; `kB`, `MB`, `GB` … are decimal. Case does not matter. A fraction of a byte is
/// dropped.
impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(s: &str) -> Result<Self, BytesError> {
        let refuse = |reason| BytesError { text: s.to_owned(), reason };
        let trimmed = s.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err(refuse("it does not begin with a number"));
        }
        if fraction.contains('.') {
            return Err(refuse("it has two decimal points"));
        }
        let scale =
            scale(unit.trim()).ok_or_else(|| refuse("the unit is none of B, KiB, MiB, GiB, GB, …"))?;
        let too_big = || refuse("it is more than 2^64 - 1 bytes");
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_big())? };
        let mut bytes = whole.checked_mul(scale).ok_or_else(too_big)?;
        // Eighteen digits after the point are below one byte in every unit but EiB, and fit 128 bits there.
        let fraction = &fraction[..fraction.len().min(18)];
        if !fraction.is_empty() {
            let digits: u128 = fraction.parse().map_err(|_| too_big())?;
            let power = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(18));
            bytes += digits * scale / power;
        }
        u64::try_from(bytes).map(Bytes).map_err(|_| too_big())
    }
}

fn scale(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_lowercase();
    let (letter, base) = match unit.as_str() {
        "" | "b" | "byte" | "bytes" => return Some(1),
        u if u.len() == 1 => (u, 1024_u128),
        u if u.len() == 3 && u.ends_with("ib") => (&u[..1], 1024),
        u if u.len() == 2 && u.ends_with('b') => (&u[..1], 1000),
        _ => return None,
    };
    let power = "kmgtpe".find(letter)?;
    Some(base.pow(u32::try_from(power).ok()? + 1))
}

fn text(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = 1_u128;
    let mut tenths = 0;
    let mut name = "";
    for candidate in UNITS {
        unit *= 1024;
        name = candidate;
        tenths = (u128::from(bytes) * 10 + unit / 2) / unit;
        // Rounded first, judged afterwards: 1023.96 KiB is 1.0 MiB.
        if tenths < 10_240 {
            break;
        }
    }
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(s: &str) -> u64 {
        s.parse::<Bytes>().expect("a number of bytes").0
    }

    #[test]
    fn writes_unit_boundaries_in_the_larger_unit() {
        let cases: [(u64, &str); 12] = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_048_524, "1023.9 KiB"),
            (1_048_525, "1.0 MiB"),
            (1 << 20, "1.0 MiB"),
            ((1 << 30) - 1, "1.0 GiB"),
            (1 << 30, "1.0 GiB"),
            (3 << 19, "1.5 MiB"),
            (2_097_152, "2.0 MiB"),
            (u64::MAX, "16.0 EiB"),
            (17_760_780_288, "16.5 GiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(Bytes(bytes).to_string(), expected, "{bytes}");
        }
    }

    #[test]
    fn writes_changes_with_a_sign() {
        assert_eq!(BytesChange(0).to_string(), "0 B");
        assert_eq!(BytesChange(1 << 20).to_string(), "+1.0 MiB");
        assert_eq!(BytesChange(-512).to_string(), "-512 B");
        assert_eq!(BytesChange::between(u64::MAX, 0).0, i64::MIN);
        assert_eq!(BytesChange::between(5, 7).0, 2);
    }

    #[test]
    fn reads_what_people_write() {
        assert_eq!(parse("20GiB"), 20 << 30);
        assert_eq!(parse("5GB"), 5_000_000_000);
        assert_eq!(parse("80 MiB"), 80 << 20);
        assert_eq!(parse("1.5g"), 3 << 29);
        assert_eq!(parse(" 512 "), 512);
        assert_eq!(parse("512b"), 512);
        assert_eq!(parse("0.5k"), 512);
        assert_eq!(parse(".5k"), 512);
        assert_eq!(parse("1kB"), 1000);
        assert_eq!(parse("18446744073709551615"), u64::MAX);
    }

    #[test]
    fn refuses_what_is_no_number_of_bytes() {
        for bad in [
            "",
            "GiB",
            "-1",
            "1.2.3G",
            "5 apples",
            "16EiB",
            "5 GiBs",
            "1e9",
            "99999999999999999999999999999999999999999",
        ] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
        let error = "5 apples".parse::<Bytes>().expect_err("no unit");
        assert_eq!(
            error.to_string(),
            "not a number of bytes: `5 apples` (the unit is none of B, KiB, MiB, GiB, GB, …)"
        );
    }

    proptest! {
        #[test]
        fn prop_written_within_half_a_tenth_and_below_the_next_unit(bytes in any::<u64>()) {
            let written = Bytes(bytes).to_string();
            let (number, unit) = written.split_once(' ').expect("a number and a unit");
            let value: f64 = number.parse().expect("a number");
            let exponent = UNITS.iter().position(|u| *u == unit).map_or(0, |i| i32::try_from(i).expect("six units") + 1);
            prop_assert!(value < 1024.0, "{}", written);
            prop_assert!(exponent == 0 || value >= 1.0, "{}", written);
            #[expect(clippy::cast_precision_loss, reason = "the comparison allows for it")]
            let exact = bytes as f64 / 1024_f64.powi(exponent);
            prop_assert!((exact - value).abs() <= 0.050_001, "{} for {}", written, bytes);
        }

        #[test]
        fn prop_order_is_kept(a in any::<u64>(), b in any::<u64>()) {
            let read = |n: u64| parse(&Bytes(n.min(1 << 62)).to_string());
            prop_assert_eq!(a.min(1 << 62) <= b.min(1 << 62) || read(a) >= read(b), true);
        }

        #[test]
        fn prop_whole_units_read_back(n in 0_u64..1024, unit in 0_usize..5) {
            let bytes = n << (10 * (unit + 1));
            prop_assert_eq!(parse(&Bytes(bytes).to_string()), bytes);
            prop_assert_eq!(parse(&format!("{n}{}", UNITS[unit])), bytes);
        }

        #[test]
        fn prop_reading_never_panics(s in "\\PC{0,24}") {
            let _ = s.parse::<Bytes>();
        }
    }
}
