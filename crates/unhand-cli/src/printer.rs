//! The one way to stdout: buffered, styled for the reader, and quiet when the reader goes away.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufWriter, IsTerminal, Write};

use anstream::stream::RawStream;
use serde::Serialize;
use unhand_analyze::Style;

use crate::arguments::Color;
use crate::failure::Failure;

/// Lines are never broken wider than this, even on a wider terminal: nobody reads 250 columns.
const MAX_WIDTH: usize = 120;
/// What a pipe or a file gets.
const DEFAULT_WIDTH: usize = 100;

/// Where answers go. `write!` and `writeln!` work on it and fail with a [`Failure`].
pub(crate) struct Printer {
    out: BufWriter<Box<dyn Write>>,
    style: Style,
    width: usize,
}

impl Printer {
    /// A printer for the terminal, pipe or file behind stdout.
    pub(crate) fn stdout(color: Color) -> Printer {
        let stdout = io::stdout();
        let style = style_of(color, &stdout);
        let width = if stdout.is_terminal() { terminal_width() } else { DEFAULT_WIDTH };
        Printer { out: BufWriter::new(Box::new(stdout)), style, width }
    }

    /// The decoration that the reader can show.
    pub(crate) fn style(&self) -> Style {
        self.style
    }

    /// How many columns a line may have.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// What `write!` calls. Texts from a file cannot control the terminal, see [`harmless`].
    pub(crate) fn write_fmt(&mut self, arguments: fmt::Arguments<'_>) -> Result<(), Failure> {
        let text = arguments.to_string();
        self.out.write_all(harmless(&text).as_bytes()).map_err(|error| Failure::stdout(&error))
    }

    /// One JSON document, indented, with a line end.
    pub(crate) fn json(&mut self, document: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(document)
            .map_err(|error| Failure::bad_input("cannot write the answer as JSON").because(&error))?;
        writeln!(self, "{text}")
    }

    /// Lets `write` fill stdout as a plain stream.
    pub(crate) fn stream<E>(
        &mut self,
        write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    ) -> Result<Result<(), E>, Failure> {
        let mut watch = Watch { out: &mut self.out, error: None };
        let result = write(&mut watch);
        match watch.error {
            Some(error) => Err(Failure::stdout(&error)),
            None => Ok(result),
        }
    }

    /// Sends out what is still buffered. Dropping a printer would hide an error.
    pub(crate) fn finish(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|error| Failure::stdout(&error))
    }
}

/// Keeps the first error of a stream, however the writer above wraps it.
struct Watch<'a> {
    out: &'a mut BufWriter<Box<dyn Write>>,
    error: Option<io::Error>,
}

impl Watch<'_> {
    fn keep<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let kind = error.kind();
            self.error.get_or_insert(error);
            kind.into()
        })
    }
}

impl Write for Watch<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = self.out.write(bytes);
        self.keep(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.out.flush();
        self.keep(result)
    }
}

/// `text` without control characters, except line ends, tabs and colours. The names in a snapshot come from
/// whoever made it, and a terminal obeys more than colours: titles, cursor, clipboard.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let is_suspect = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_suspect) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(is_suspect) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = color_length(rest).unwrap_or_else(|| {
            out.push(char::REPLACEMENT_CHARACTER);
            0
        });
        out.push_str(&rest[..length]);
        let control = rest.chars().next().map_or(0, char::len_utf8);
        rest = &rest[length.max(control)..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// The length of the colour code that `text` begins with: `ESC [`, digits and semicolons, `m`.
fn color_length(text: &str) -> Option<usize> {
    let code = text.strip_prefix("\x1b[")?;
    let end = code.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    code[end..].starts_with('m').then_some("\x1b[".len() + end + 1)
}

/// Whether `stream` gets escape codes, by the option first, then by the stream and the environment.
pub(crate) fn style_of(color: Color, stream: &impl RawStream) -> Style {
    let is_colored = match color {
        Color::Always => true,
        Color::Never => false,
        Color::Auto => anstream::AutoStream::choice(stream) != anstream::ColorChoice::Never,
    };
    if is_colored { Style::ANSI } else { Style::PLAIN }
}

fn terminal_width() -> usize {
    let (terminal_size::Width(width), _) =
        terminal_size::terminal_size().unwrap_or((terminal_size::Width(0), terminal_size::Height(0)));
    match usize::from(width) {
        // Some terminals (a serial line, an editor's console) do not know their own width.
        0 => DEFAULT_WIDTH,
        width => width.clamp(40, MAX_WIDTH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that goes away after a few bytes.
    struct Closing(usize);

    impl Write for Closing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let n_taken = bytes.len().min(self.0);
            self.0 -= n_taken;
            Ok(n_taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn printer_to(out: impl Write + 'static) -> Printer {
        Printer { out: BufWriter::with_capacity(8, Box::new(out)), style: Style::PLAIN, width: 80 }
    }

    #[test]
    fn a_reader_that_goes_away_ends_the_command_quietly() {
        let mut printer = printer_to(Closing(10));
        let result = (0..100).try_for_each(|n| writeln!(printer, "line {n}"));
        assert_eq!(result.expect_err("the pipe is closed").exit_code(), 0);
    }

    #[test]
    fn only_colours_reach_the_terminal() {
        assert_eq!(harmless("plain\n\ttext é"), "plain\n\ttext é");
        assert_eq!(
            harmless("\x1b[1mbold\x1b[0m \x1b[1;31mred\x1b[m"),
            "\x1b[1mbold\x1b[0m \x1b[1;31mred\x1b[m"
        );
        assert_eq!(harmless("a\x1b[2Jb"), "a\u{fffd}[2Jb");
        assert_eq!(harmless("\x1b]0;title\x07"), "\u{fffd}]0;title\u{fffd}");
        assert_eq!(harmless("\u{9b}2J\r\x1b"), "\u{fffd}2J\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_stream_reports_the_closed_pipe_and_not_what_became_of_it() {
        let mut printer = printer_to(Closing(10));
        let result =
            printer.stream(|out| out.write_all(&[b'x'; 100]).map_err(|_| "some error of another crate"));
        assert_eq!(result.expect_err("the pipe is closed").exit_code(), 0);
    }
}
