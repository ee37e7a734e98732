//! Log messages on standard error, as text or JSON, with a minimum level that each module can override and an operator
//! can change while the server runs. A separate thread writes them: if standard error is not read, messages are dropped
//! and counted, and no decision waits.

use crate::cli::output::{self, BAD, paint};
use crate::cli::{LogFormat, ServeFlags};
use anyhow::Context;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tollgate_admin::{LogLevels, LogSettings};
use tollgate_observe::{Output, Sink, escape};
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

/// Active log levels, and the handle to change them.
pub(crate) struct LogControl {
    handle: reload::Handle<Targets, Registry>,
    settings: Mutex<LogSettings>,
    format: LogFormat,
}

/// Queue of log messages, set at the start; one per process, because there is one standard error.
static MESSAGES: OnceLock<Sink> = OnceLock::new();
/// Maximum time that shutdown waits for the last messages to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Writer that queues each message.
struct Message(LogFormat);

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        if let Some(messages) = MESSAGES.get() {
            let text = String::from_utf8_lossy(text);
            // Values that callers chose are among it. The subscriber escapes the beginning of a sequence in a value, so
            // the colors that stay are its own.
            let text = match self.0 {
                LogFormat::Text => escape::lines(&text),
                LogFormat::Json => escape::json(&text),
            };
            messages.write(text.into_owned(), 1);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Guard that flushes the log when the process ends by a panic.
pub(crate) struct FlushOnPanic;

impl Drop for FlushOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            flush(None);
        }
    }
}

/// Returns the number of dropped messages.
pub(crate) fn dropped_messages() -> u64 {
    MESSAGES.get().map_or(0, |messages| messages.counts().1)
}

/// Writes the queued messages, then `why` the process ends, unless it was stopped regularly.
pub(crate) fn flush(why: Option<&anyhow::Error>) {
    let why = why.map(|error| {
        let name =
            if output::stderr_has_color() { paint(BAD.bold(), "tollgate:") } else { "tollgate:".to_owned() };
        format!("{name} {}\n", escape::lines(&format!("{error:#}")))
    });
    match (MESSAGES.get(), why) {
        (Some(messages), why) => {
            if let Some(why) = why {
                messages.write(why, 1);
            }
            messages.flush(FLUSH_TIMEOUT);
        }
        (None, Some(why)) => eprint!("{why}"),
        (None, None) => {}
    }
}

/// Panic hook: writes the same text as the default hook, but never blocks, because the panic may be on a request
/// thread.
fn panicked(info: &std::panic::PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let trace = Backtrace::capture();
    let trace =
        if trace.status() == BacktraceStatus::Captured { format!("{trace}\n") } else { String::new() };
    let text = format!("thread '{}' {info}\n{trace}", thread.name().unwrap_or("<unnamed>"));
    let _ = Message(LogFormat::Text).write_all(text.as_bytes());
}

/// Starts writing log messages in the level and format of `flags`.
///
/// # Errors
/// Returns an error if the writer thread cannot be started.
pub(crate) fn start(flags: &ServeFlags) -> anyhow::Result<Arc<LogControl>> {
    let _ = MESSAGES.set(Sink::open("messages", Output::Stderr).context("the standard error")?);
    std::panic::set_hook(Box::new(panicked));
    let (filter, handle) = reload::Layer::new(targets(&flags.log.0));
    let format = flags.log_format;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || Message(format))
        .with_ansi(output::stderr_has_color());
    match flags.log_format {
        LogFormat::Text => {
            tracing_subscriber::registry().with(lines.with_filter(filter)).init();
        }
        LogFormat::Json => {
            let lines = lines.json().with_current_span(false).with_span_list(false);
            tracing_subscriber::registry().with(lines.with_filter(filter)).init();
        }
    }
    let settings = Mutex::new(flags.log.0.clone());
    Ok(Arc::new(LogControl { handle, settings, format: flags.log_format }))
}

/// Use of standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stdout {
    /// Text for people, such as the start banner.
    People,
    /// JSON lines only.
    Data,
}

impl LogControl {
    /// Prints the start banner. Errors are ignored: the server runs with a closed output as well.
    pub(crate) fn print_banner(&self, stdout: Stdout, lines: &[String]) {
        let text = lines.join("\n");
        match (stdout, self.format) {
            (Stdout::People, _) => {
                let _ = writeln!(std::io::stdout().lock(), "{text}");
            }
            (Stdout::Data, LogFormat::Text) => {
                let _ = Message(LogFormat::Text).write_all(format!("{text}\n").as_bytes());
            }
            // Programs read both outputs, so the banner is a JSON log message.
            (Stdout::Data, LogFormat::Json) => tracing::info!("{text}"),
        }
    }
}

impl LogLevels for LogControl {
    fn now(&self) -> LogSettings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, wanted: LogSettings) -> Result<(), (String, String)> {
        check(&wanted)?;
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        self.handle
            .reload(targets(&wanted))
            .map_err(|error| ("level".to_owned(), format!("the log cannot be changed: {error}")))?;
        *settings = wanted;
        Ok(())
    }
}

/// Maximum number of modules with their own level.
const MAX_TARGETS: usize = 64;

/// Validates log settings. The error is the field and what is wrong with it.
fn check(wanted: &LogSettings) -> Result<(), (String, String)> {
    level(&wanted.level).map_err(|error| ("level".to_owned(), error))?;
    if wanted.modules.len() > MAX_TARGETS {
        return Err((
            "modules".to_owned(),
            format!("at most {MAX_TARGETS} modules have levels of their own"),
        ));
    }
    for (module, text) in &wanted.modules {
        let place = format!("modules.{module}");
        let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
        if module.is_empty() || !module.chars().all(name) {
            return Err((place, "a module is written as tollgate_store or tollgate_store::redis".to_owned()));
        }
        level(text).map_err(|error| (place, error))?;
    }
    Ok(())
}

fn level(text: &str) -> Result<LevelFilter, String> {
    if text == "off" {
        return Ok(LevelFilter::OFF);
    }
    let known = text.parse::<Level>().ok().filter(|_| text.chars().all(char::is_alphabetic));
    known.map(LevelFilter::from_level).ok_or_else(|| {
        let shown: String = text.chars().take(50).collect();
        format!("`{shown}` is not a level; write error, warn, info, debug, trace or off")
    })
}

fn targets(settings: &LogSettings) -> Targets {
    let of = |text: &str| level(text).unwrap_or(LevelFilter::INFO);
    let modules = settings.modules.iter().map(|(module, text)| (module.clone(), of(text)));
    Targets::new().with_default(of(&settings.level)).with_targets(modules)
}

/// Value of `--log`: `info`, or `info,tollgate_store=debug`.
#[derive(Clone, Debug)]
pub(crate) struct LogFlag(LogSettings);

impl std::str::FromStr for LogFlag {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut settings = LogSettings { level: "info".to_owned(), modules: BTreeMap::new() };
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.split_once('=') {
                None => word.to_ascii_lowercase().clone_into(&mut settings.level),
                Some((module, level)) => {
                    settings.modules.insert(module.trim().to_owned(), level.trim().to_ascii_lowercase());
                }
            }
        }
        check(&settings).map_err(|(_, error)| format!("{error}; or info,tollgate_store=debug"))?;
        Ok(Self(settings))
    }
}

#[cfg(test)]
mod tests {
    use super::LogFlag;

    #[test]
    fn levels_are_read_as_people_write_them() {
        let LogFlag(read) = "WARN, tollgate_store::redis=debug".parse().expect("levels");
        assert_eq!(read.level, "warn");
        assert_eq!(read.modules.get("tollgate_store::redis").map(String::as_str), Some("debug"));
        for wrong in ["loud", "info,=debug", "info,tollgate_store=", "info,a b=debug", "5"] {
            assert!(wrong.parse::<LogFlag>().is_err(), "{wrong}");
        }
    }
}
