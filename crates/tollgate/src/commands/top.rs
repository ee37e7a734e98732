//! `tollgate top`: live rates, denials, top callers, hot keys and breakers in a terminal.
//!
//! Polls a running server once a second, as the dashboard does. Without a terminal, or with --json, it prints one
//! sample and exits (`text`); `draw` is the screen.

mod draw;
mod text;

use crate::admin_client::{self, AdminFlags, Client};
use crate::cli::print;
use clap::Args;
use futures_util::future::select_all;
use hyper::Method;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tollgate_core::{Clock, SystemClock};

#[derive(Debug, Args)]
pub(crate) struct TopFlags {
    #[command(flatten)]
    admin: AdminFlags,
}

/// Interval between two requests to the server, and between two frames.
const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one poll.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Length of the charts, in seconds.
const HISTORY_SECONDS: usize = 240;

pub(crate) fn run(flags: &TopFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    let once = json || !std::io::stdout().is_terminal();
    admin_client::run(&flags.admin, async move |client| {
        let first = fetch(&client).await?;
        if json {
            print(&json!({"stats": first.stats, "top": first.top}))?;
        } else if once {
            text::print(&first)?;
        } else {
            // Installed before the terminal is changed, so that from then on every exit restores it.
            let stops = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
            let stops = stops.into_iter().map(signal).collect::<Result<Vec<_>, _>>()?;
            let mut terminal = ratatui::try_init()?;
            let shown = show(&client, &mut terminal, stops, first).await;
            ratatui::restore();
            shown?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Latest state of the server, and why there is none newer.
struct TopState {
    stats: Value,
    top: Value,
    failure: Option<String>,
}

async fn fetch(client: &Client) -> anyhow::Result<TopState> {
    let stats =
        client.request(Method::GET, &format!("/admin/v1/stats?seconds={HISTORY_SECONDS}"), None).await?;
    let top = client.request(Method::GET, "/admin/v1/top", None).await?;
    Ok(TopState { stats, top, failure: None })
}

/// Draws until a key or a signal ends it. The caller restores the terminal.
async fn show(
    client: &Client,
    terminal: &mut ratatui::DefaultTerminal,
    mut stops: Vec<Signal>,
    mut seen: TopState,
) -> anyhow::Result<()> {
    let clock = SystemClock::new();
    let mut events = events();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let next = || async {
        tokio::time::sleep(INTERVAL).await;
        tokio::time::timeout(TIMEOUT, fetch(client)).await
    };
    let mut looking = Box::pin(next());
    let (mut answered, mut is_late) = (clock.now(), false);
    loop {
        if is_late {
            seen.failure =
                Some(format!("no response for {} s", clock.now().since(answered).as_micros() / 1_000_000));
        }
        terminal.draw(|frame| draw::draw(frame, &seen))?;
        tokio::select! {
            biased;
            _ = select_all(stops.iter_mut().map(|stop| Box::pin(stop.recv()))) => return Ok(()),
            event = events.recv() => match event {
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(event)) if !ends(&event) => {}
                _ => return Ok(()),
            },
            newer = &mut looking => {
                is_late = newer.is_err();
                match newer {
                    Ok(Ok(newer)) => {
                        seen = newer;
                        answered = clock.now();
                    }
                    // The last state stays on the screen, so that a server can be watched across a restart.
                    Ok(Err(error)) => seen.failure = Some(format!("{error:#}")),
                    Err(_) => {}
                }
                looking.set(next());
            }
            _ = ticks.tick() => {}
        }
    }
}

/// Reads key events on a separate thread, so that neither keys nor responses wait for the other.
fn events() -> mpsc::Receiver<std::io::Result<Event>> {
    let (sender, events) = mpsc::channel(16);
    std::thread::spawn(move || while sender.blocking_send(event::read()).is_ok() {});
    events
}

fn ends(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

impl TopState {
    /// Returns the name of the node, and a line with its version, store and rules.
    fn node(&self) -> (String, String) {
        let text = |name: &str| plain(&self.stats["node"][name]);
        let (version, store, rules) = (text("version"), text("store"), text("rules_revision"));
        (text("name"), format!("tollgate {version}  store {store}  rules {rules}"))
    }

    /// Returns the rates of allowed and denied requests in the last second, and a line with other rates and latencies.
    fn rates(&self) -> [String; 3] {
        let series = &self.stats["series"];
        let last = |name: &str| numbers(&series[name]).last().copied().unwrap_or(0);
        let micros = |name: &str| series[name].as_array().and_then(|all| all.last()).and_then(Value::as_f64);
        let latency = |name: &str| micros(name).map_or("-".to_owned(), |us| format!("{us:.0} µs"));
        let rest = format!(
            "{}/s shadow  {}/s fail open   p50 {}  p99 {}  p999 {}",
            last("shadow_deny"),
            last("fail_open"),
            latency("p50_us"),
            latency("p99_us"),
            latency("p999_us")
        );
        [format!("{}/s allowed", last("allow")), format!("{}/s denied", last("deny")), rest]
    }

    /// Returns a line for this cell and for each other, if there are any.
    fn cells(&self) -> Vec<String> {
        let cells = &self.stats["node"]["cells"];
        if cells.is_null() {
            return Vec::new();
        }
        let share = cells["share"].as_f64().unwrap_or(1.0) * 100.0;
        let state = match (cells["displaced"] == true, cells["regional_only"] == true) {
            (true, _) => "another process has its name; denies what cells share".to_owned(),
            (false, true) => format!("regional only, {share:.0}% of shared limits"),
            (false, false) => "shared limits whole".to_owned(),
        };
        let own = format!("cell {}: {state}", plain(&cells["cell"]));
        let peer = |peer: &Value| {
            let state = match peer["silent"] == true {
                true => "silent".to_owned(),
                false => format!("lag {} ms", plain(&peer["lag_ms"])),
            };
            format!("{} {}  {state}", plain(&peer["region"]), plain(&peer["address"]))
        };
        std::iter::once(own).chain(cells["peers"].as_array().into_iter().flatten().map(peer)).collect()
    }

    /// Returns the shards and the states of their breakers.
    fn breakers(&self) -> Vec<[String; 2]> {
        let all = self.stats["node"]["breakers"].as_array().into_iter().flatten();
        all.map(|breaker| [plain(&breaker["shard"]), plain(&breaker["state"])]).collect()
    }

    /// Returns the rules with their counts. What counts for no rule is left out while there is nothing.
    fn rules(&self) -> Vec<&Value> {
        let all = self.stats["rules"].as_array().into_iter().flatten();
        let is_empty = |rule: &Value| {
            ["allow", "deny", "shadow_deny"].iter().all(|name| rule[*name].as_u64().unwrap_or(0) == 0)
        };
        all.filter(|rule| !(rule["rule"] == "other" && rule["domain"] == "other" && is_empty(rule))).collect()
    }

    /// Returns the hot keys.
    fn hot(&self) -> Vec<Value> {
        self.top["hot"].as_array().into_iter().flatten().map(hot_key).collect()
    }
}

/// Returns a hot key as a row.
fn hot_key(key: &Value) -> Value {
    let values: Vec<String> = key["values"].as_array().into_iter().flatten().map(plain).collect();
    let name = if values.is_empty() { plain(&key["counter"]) } else { values.join(" ") };
    json!({"key": name, "per_second": key["per_second"], "state": key["state"]})
}

fn shown(value: &Value, unit: &str) -> String {
    match (value.as_f64(), unit) {
        (Some(part), "%") => format!("{:.0}%", part * 100.0),
        // Tenths are shown below 100 only.
        (Some(number), "/s") if number >= 100.0 => format!("{number:.0}/s"),
        (Some(number), "/s") => format!("{number:.1}/s"),
        _ => plain(value),
    }
}

/// Returns a value as text without control characters, which could move the cursor.
fn plain(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn numbers(all: &Value) -> Vec<u64> {
    let number = |one: &Value| one.as_u64().or_else(|| one.as_f64().map(|one| one as u64)).unwrap_or(0);
    all.as_array().into_iter().flatten().map(number).collect()
}
