//! Standard output of the commands: color on a terminal (unless `NO_COLOR` is set), and a quiet exit when the reader of
//! a pipe has closed it (`| head`).
//!
//! A closed output is an error of its own kind. Rejected: a quiet exit on any `BrokenPipe`, because a server that
//! closes its connection during an import causes the same error.

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use std::fmt;
use std::io::{Error, ErrorKind, IsTerminal, Result, StdoutLock, Write};
use tollgate_observe::escape;

/// Style of table titles.
pub(crate) const TITLE: Style = Style::new().bold();
/// Style of good states.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// Style of warnings.
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();
/// Style of failures.
pub(crate) const BAD: Style = AnsiColor::Red.on_default();

/// Error: the reader of standard output has closed it.
#[derive(Debug)]
struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Returns whether a command failed because the reader of its output has closed it.
pub(crate) fn is_closed_output(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<Error>());
    causes.any(|cause| cause.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<OutputClosed>))
}

/// Ignores that the reader has closed the output, for a command whose exit code is a verdict: `validate | head` fails
/// if the rules are invalid, however little of the report was read.
pub(crate) fn ignore_closed(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    printed.or_else(|error| if is_closed_output(&error) { Ok(()) } else { Err(error) })
}

/// Standard output, which its reader may close.
pub(crate) struct Output<W>(W);

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.0.write(bytes).map_err(closed)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush().map_err(closed)
    }
}

fn closed(error: Error) -> Error {
    if error.kind() == ErrorKind::BrokenPipe {
        Error::new(ErrorKind::BrokenPipe, OutputClosed)
    } else {
        error
    }
}

/// Returns standard output for bytes that must arrive unchanged.
pub(crate) fn raw() -> Output<StdoutLock<'static>> {
    Output(std::io::stdout().lock())
}

/// Output for people: whatever a terminal would obey is escaped, except line breaks and colors.
pub(crate) struct Escaped<W>(W);

impl<W: Write> Write for Escaped<W> {
    /// Each write is complete text: nothing but `write!` writes here.
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.0.write_all(escape::lines(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}

/// Returns standard output for people: styles are stripped unless it is a terminal.
pub(crate) fn styled() -> Output<Escaped<AutoStream<StdoutLock<'static>>>> {
    Output(Escaped(AutoStream::auto(std::io::stdout().lock())))
}

/// Returns whether messages on standard error may have color.
pub(crate) fn stderr_has_color() -> bool {
    AutoStream::choice(&std::io::stderr()) != anstream::ColorChoice::Never
}

/// Returns whether standard output is a terminal.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Returns `text` in a style.
pub(crate) fn paint(style: Style, text: impl fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Returns diagnostics with their severities in color.
pub(crate) fn paint_diagnostics(text: &str) -> String {
    let line = |line: &str| {
        for (word, style) in [("error", BAD), ("warning", WARNING), ("note", GOOD)] {
            if let Some(rest) = line.strip_prefix(word).filter(|rest| rest.starts_with([':', '['])) {
                return format!("{}{rest}", paint(style.bold(), word));
            }
        }
        line.to_owned()
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn only_the_standard_output_ends_a_command_quietly() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> Result<usize> {
                Err(ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> Result<()> {
                Ok(())
            }
        }
        let output = Output(Gone).write_all(b"x").context("while listing").expect_err("closed");
        assert!(is_closed_output(&output), "{output:#}");
        let socket = Gone.write_all(b"x").context("while importing").expect_err("closed");
        assert!(!is_closed_output(&socket), "{socket:#}");
        assert!(ignore_closed(Err(output)).is_ok() && ignore_closed(Err(socket)).is_err());
    }

    #[test]
    fn severities_are_painted_at_the_start_of_a_line() {
        let painted = paint_diagnostics("error: an error\n  --> errors.yaml:1:2\nerrors");
        let plain = anstream::adapter::strip_str(&painted).to_string();
        assert_eq!(plain, "error: an error\n  --> errors.yaml:1:2\nerrors");
        assert_eq!(painted.matches('\u{1b}').count(), 3, "{painted:?}");
    }
}
