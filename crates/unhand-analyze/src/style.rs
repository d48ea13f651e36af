//! How much decoration the text answers carry: none, or the few escape codes of a terminal.

use std::fmt::{self, Display};

/// Decoration of text answers. [`Style::PLAIN`] writes no escape code, so that a pipe stays clean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Whether ANSI escape codes are written.
    pub ansi: bool,
}

impl Style {
    /// No decoration.
    pub const PLAIN: Style = Style { ansi: false };
    /// ANSI escape codes for headings and the figures to look at first.
    pub const ANSI: Style = Style { ansi: true };

    /// A heading or a figure to look at first.
    pub fn strong<T: Display>(self, value: T) -> Painted<T> {
        Painted { value, code: self.ansi.then_some("1") }
    }

    /// Something that needs attention.
    pub fn warning<T: Display>(self, value: T) -> Painted<T> {
        Painted { value, code: self.ansi.then_some("33") }
    }

    /// What may be skipped at a first reading.
    pub fn faint<T: Display>(self, value: T) -> Painted<T> {
        Painted { value, code: self.ansi.then_some("2") }
    }
}

/// A value with its decoration, ready to be displayed.
#[derive(Clone, Copy, Debug)]
pub struct Painted<T> {
    value: T,
    code: Option<&'static str>,
}

impl<T: Display> Display for Painted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => {
                write!(f, "\x1b[{code}m")?;
                self.value.fmt(f)?;
                f.write_str("\x1b[0m")
            }
            None => self.value.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_writes_the_value_alone() {
        assert_eq!(format!("{:>4}", Style::PLAIN.strong("a")), "   a");
        assert_eq!(format!("{:>4}", Style::ANSI.strong("a")), "\x1b[1m   a\x1b[0m");
    }
}
