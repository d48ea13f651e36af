//! How a command ends: fine, with something found, or with `error: …`, its causes and a `hint: …`.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;

use anstyle::AnsiColor;
use unhand_analyze::{Style, wrap};

use crate::arguments::Color;
use crate::printer;

/// Hints are sentences, and break like them. Messages and causes stay on one line, for whoever searches for them.
const HINT_WIDTH: usize = 100;

/// How a command ends when it could do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Fine,
    /// What `--fail-on` asked to be told about is there.
    Found,
    /// A program that was run for somebody ended like that.
    Program(u8),
}

impl Outcome {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Outcome::Fine => 0,
            Outcome::Found => 1,
            Outcome::Program(code) => code,
        }
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The command line asks for something that cannot be.
    Use,
    /// A file, or what is in it.
    Input,
    /// The reader of our output went away (`| head`): they have what they wanted.
    Closed,
}

impl Failure {
    pub(crate) fn bad_use(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Use, message: message.into(), causes: Vec::new(), hint: None }
    }

    pub(crate) fn bad_input(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Input, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// A question about the snapshot `name` that has no answer.
    pub(crate) fn unanswered(name: &str, error: &unhand_analyze::Error) -> Failure {
        let message = format!("no answer about `{name}`");
        match error {
            unhand_analyze::Error::NoSuchDevice { .. } => Failure::bad_use(message).because(error),
            unhand_analyze::Error::NoHistory { .. } => Failure::bad_input(message)
                .because(error)
                .hint("call `torch.cuda.memory._record_memory_history()` before what is to be recorded"),
            _ => Failure::bad_input(message).because(error),
        }
    }

    /// What a write to stdout says. A closed pipe is the one error that is none.
    pub(crate) fn stdout(error: &std::io::Error) -> Failure {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Failure { kind: Kind::Closed, ..Failure::bad_input("") };
        }
        Failure::bad_input("cannot write to stdout").because(error)
    }

    /// Adds an error and everything behind it, outermost first.
    pub(crate) fn because(mut self, error: &dyn Error) -> Failure {
        let mut cause = Some(error);
        while let Some(error) = cause {
            let text = error.to_string();
            // Some errors repeat their source in their own text; once is enough.
            if !self.causes.last().is_some_and(|last| last.contains(&text)) {
                self.causes.push(text);
            }
            cause = error.source();
        }
        self
    }

    /// Adds a cause that is no error of this program.
    pub(crate) fn because_text(mut self, cause: &str) -> Failure {
        self.causes.push(cause.to_owned());
        self
    }

    /// Adds an error of the operating system, without the path that `fs_err` adds: the message has it.
    pub(crate) fn because_io(self, error: &std::io::Error) -> Failure {
        match error.get_ref().and_then(|error| error.source()) {
            Some(bare) => self.because(bare),
            None => self.because(error),
        }
    }

    /// Adds what the reader can do now.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Closed => 0,
            Kind::Use => 2,
            Kind::Input => 3,
        }
    }

    /// Writes the message to stderr; nothing when the reader went away.
    pub(crate) fn report(&self, color: Color) {
        if self.kind == Kind::Closed {
            return;
        }
        let style = printer::style_of(color, &std::io::stderr());
        // If stderr is closed as well, the exit code still tells.
        let text = self.text(style);
        let _ = std::io::stderr().lock().write_all(printer::harmless(&text).as_bytes());
    }

    fn text(&self, style: Style) -> String {
        let red = if style.ansi { AnsiColor::Red.on_default().bold() } else { anstyle::Style::new() };
        let mut text = format!("{red}error{red:#}: {}\n", self.message);
        for cause in &self.causes {
            let _ = writeln!(text, "  caused by: {cause}");
        }
        if let Some(hint) = &self.hint {
            let hint = wrap(hint, HINT_WIDTH, 0);
            let _ = writeln!(text, "\n{}: {hint}", style.strong("hint"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl std::fmt::Display for Layer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|layer| layer as &(dyn Error + 'static))
        }
    }

    #[test]
    fn reads_from_the_outermost_cause_to_what_to_do() {
        let inner = Layer("not there", None);
        let outer = Layer("cannot open: `a`", Some(Box::new(inner)));
        let failure = Failure::bad_input("cannot read: `a`").because(&outer).hint("record it first");
        let expected = "error: cannot read: `a`\n  caused by: cannot open: `a`\n  caused by: not there\n\n\
                        hint: record it first\n";
        assert_eq!(failure.text(Style::PLAIN), expected);
        assert_eq!(failure.exit_code(), 3);
    }

    #[test]
    fn says_a_cause_once() {
        let outer = Layer("cannot open: `a`: not there", Some(Box::new(Layer("not there", None))));
        let failure = Failure::bad_use("no").because(&outer);
        assert_eq!(failure.text(Style::PLAIN), "error: no\n  caused by: cannot open: `a`: not there\n");
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn a_closed_pipe_is_quiet() {
        let failure = Failure::stdout(&std::io::ErrorKind::BrokenPipe.into());
        assert_eq!(failure.exit_code(), 0);
        let failure = Failure::stdout(&std::io::ErrorKind::StorageFull.into());
        assert_eq!(failure.exit_code(), 3);
    }
}
