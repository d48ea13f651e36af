//! How counts, shares and times are written inside sentences.

use std::fmt;

/// A count with thousands separated by commas: `1,242`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u64);

/// A time span in microseconds, written in the unit a person would choose: `850 µs`, `12 ms`, `5.5 s`,
/// `3 min 20 s`, `2 h 5 min`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub i64);

/// A part of a whole as a percentage: `44%`, `<1%`; `100%` only when nothing is missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(pub u64, pub u64);

/// `1 block`, `2 blocks`, `1,242 blocks`.
pub fn plural(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{} {noun}s", Count(n)) }
}

/// Writes `text` broken at spaces so that no line is wider than `width`; lines after the first begin with
/// `indent` spaces. A word longer than the line stays whole, and so do a number and its unit.
pub fn wrap(text: &str, width: usize, indent: usize) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    let mut column = 0;
    let mut words = text.split(' ').filter(|w| !w.is_empty()).peekable();
    while let Some(word) = words.next() {
        let mut word = word.to_owned();
        if word.ends_with(|c: char| c.is_ascii_digit())
            && let Some(unit) = words.next_if(|next| is_unit(next))
        {
            word.push(' ');
            word.push_str(unit);
        }
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(&word);
        column += length;
    }
    out
}

fn is_unit(word: &str) -> bool {
    let word = word.trim_end_matches(|c: char| !c.is_alphanumeric());
    matches!(word, "B" | "KiB" | "MiB" | "GiB" | "TiB" | "PiB" | "EiB" | "µs" | "ms" | "s" | "min" | "h")
}

/// At most `width` characters of `text`, with `…` in place of the *beginning* when it is longer: the end of
/// a path tells more than its start.
pub fn keep_end(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().skip(length - width.saturating_sub(1)).collect();
    format!("…{kept}")
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut out = String::with_capacity(digits.len() + digits.len() / 3);
        for (i, c) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                out.push(',');
            }
            out.push(c);
        }
        f.pad(&out)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.max(0);
        let text = match us {
            0..1_000 => format!("{us} µs"),
            1_000..1_000_000 => format!("{} ms", us / 1_000),
            1_000_000..60_000_000 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
            60_000_000..3_600_000_000 => format!("{} min {} s", us / 60_000_000, us % 60_000_000 / 1_000_000),
            _ => format!("{} h {} min", us / 3_600_000_000, us % 3_600_000_000 / 60_000_000),
        };
        f.pad(&text)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Share(part, whole) = *self;
        if whole == 0 || part == 0 {
            return f.pad("0%");
        }
        let percent = (u128::from(part) * 200 + u128::from(whole)) / (u128::from(whole) * 2);
        let text = match percent {
            0 => "<1%".to_owned(),
            100 if part < whole => ">99%".to_owned(),
            p => format!("{p}%"),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separates_thousands() {
        let shown: Vec<String> = [0, 999, 1000, 1_234_567].map(|n| Count(n).to_string()).to_vec();
        assert_eq!(shown, ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(plural(1, "block"), "1 block");
        assert_eq!(plural(0, "block"), "0 blocks");
    }

    #[test]
    fn chooses_the_unit_of_a_span() {
        let shown: Vec<String> =
            [5, 12_000, 5_560_000, 200_000_000, 7_500_000_000].map(|n| Span(n).to_string()).to_vec();
        assert_eq!(shown, ["5 µs", "12 ms", "5.5 s", "3 min 20 s", "2 h 5 min"]);
    }

    #[test]
    fn shares_never_claim_all_or_nothing_wrongly() {
        assert_eq!(Share(0, 10).to_string(), "0%");
        assert_eq!(Share(1, 1000).to_string(), "<1%");
        assert_eq!(Share(999, 1000).to_string(), ">99%");
        assert_eq!(Share(10, 10).to_string(), "100%");
        assert_eq!(Share(1, 0).to_string(), "0%");
    }

    #[test]
    fn wraps_at_spaces() {
        assert_eq!(wrap("one two three", 8, 2), "one two\n  three");
        assert_eq!(wrap("holds 20.0 MiB, or", 12, 0), "holds\n20.0 MiB, or");
        assert_eq!(keep_end("/very/long/path.py", 8), "…path.py");
    }
}
