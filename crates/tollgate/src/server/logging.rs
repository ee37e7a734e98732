//! Messages to the standard error: as text for people or JSON for machines, from a level on, which each module may have its
//! own of, and which an operator may change while the server runs. They are written by a thread of their own: where nobody
//! reads them, messages are lost and counted, and nobody who decides waits.

use crate::cli::output::{self, BAD, paint};
use crate::cli::{LogFormat, ServeFlags};
use anyhow::Context;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tollgate_admin::{LogLevels, LogSettings};
use tollgate_observe::{Output, Sink};
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

/// The levels that act, and the way to change them.
pub(crate) struct LogControl {
    handle: reload::Handle<Targets, Registry>,
    settings: Mutex<LogSettings>,
    format: LogFormat,
}

/// Where messages go, once there are any: one for the process, as its standard error is.
static MESSAGES: OnceLock<Sink> = OnceLock::new();
/// How long the end waits for the last messages to be read.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// One message on its way.
struct Message;

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        if let Some(messages) = MESSAGES.get() {
            messages.write(String::from_utf8_lossy(text).into_owned(), 1);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Lets out what was said when the process ends by a panic.
pub(crate) struct FlushOnPanic;

impl Drop for FlushOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            flush(None);
        }
    }
}

/// Messages that were lost.
pub(crate) fn dropped_messages() -> u64 {
    MESSAGES.get().map_or(0, |messages| messages.counts().1)
}

/// Writes what still waits, and why the process ends, if it is not because somebody told it to.
pub(crate) fn flush(why: Option<&anyhow::Error>) {
    let why = why.map(|error| {
        let name =
            if output::stderr_has_color() { paint(BAD.bold(), "tollgate:") } else { "tollgate:".to_owned() };
        format!("{name} {error:#}\n")
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

/// What is told of a panic, as it is told by default, but without waiting for a reader: it may be on a thread that decides.
fn panicked(info: &std::panic::PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let trace = Backtrace::capture();
    let trace =
        if trace.status() == BacktraceStatus::Captured { format!("{trace}\n") } else { String::new() };
    let told = format!("thread '{}' {info}\n{trace}", thread.name().unwrap_or("<unnamed>"));
    let _ = Message.write_all(told.as_bytes());
}

/// Begins to write messages, as the flags say.
///
/// # Errors
/// If there can be no thread for them.
pub(crate) fn start(flags: &ServeFlags) -> anyhow::Result<Arc<LogControl>> {
    let _ = MESSAGES.set(Sink::open("messages", Output::Stderr).context("the standard error")?);
    std::panic::set_hook(Box::new(panicked));
    let (filter, handle) = reload::Layer::new(targets(&flags.log.0));
    let lines =
        tracing_subscriber::fmt::layer().with_writer(|| Message).with_ansi(output::stderr_has_color());
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

/// What the standard output is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stdout {
    /// People who start the server.
    People,
    /// Lines of JSON, and nothing else.
    Data,
}

impl LogControl {
    /// Tells whoever starts the server what there is. A closed output is no reason not to serve.
    pub(crate) fn print_banner(&self, stdout: Stdout, lines: &[String]) {
        let text = lines.join("\n");
        match (stdout, self.format) {
            (Stdout::People, _) => {
                let _ = writeln!(std::io::stdout().lock(), "{text}");
            }
            (Stdout::Data, LogFormat::Text) => {
                let _ = Message.write_all(format!("{text}\n").as_bytes());
            }
            // There are machines at both.
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

/// The most modules with a level of their own.
const MAX_TARGETS: usize = 64;

/// What is wrong, and where.
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
        format!("`{shown}` is no level; write error, warn, info, debug, trace or off")
    })
}

fn targets(settings: &LogSettings) -> Targets {
    let of = |text: &str| level(text).unwrap_or(LevelFilter::INFO);
    let modules = settings.modules.iter().map(|(module, text)| (module.clone(), of(text)));
    Targets::new().with_default(of(&settings.level)).with_targets(modules)
}

/// What `--log` says: `info`, or `info,tollgate_store=debug`.
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
