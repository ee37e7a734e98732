//! `tollgate top`: what goes on, live in a terminal: rates, denials, the callers who ask most, hot keys, breakers.
//!
//! Asks a running server once a second, as the dashboard does. Where the output is no terminal, or for programs, it tells
//! once and ends.

use crate::cli::print;
use crate::client::{self, AdminFlags, Client};
use clap::Args;
use hyper::Method;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table, Wrap};
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct TopFlags {
    #[command(flatten)]
    admin: AdminFlags,
}

/// How often the server is asked, in tenths of a second.
const EVERY: u32 = 10;
/// Seconds that the curves show.
const SHOWN: usize = 240;

pub(crate) fn run(flags: &TopFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    let once = json || !std::io::stdout().is_terminal();
    client::run(&flags.admin, async move |client| {
        let first = look(&client).await?;
        if json {
            print(&json!({"stats": first.stats, "top": first.top}))?;
        } else if once {
            tell(&first)?;
        } else {
            let mut terminal = ratatui::try_init()?;
            let shown = show(&client, &mut terminal, first).await;
            ratatui::restore();
            shown?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// What the server has told, and why it has told nothing newer.
struct Seen {
    stats: Value,
    top: Value,
    trouble: Option<String>,
}

async fn look(client: &Client) -> anyhow::Result<Seen> {
    let stats = client.ask(Method::GET, &format!("/admin/v1/stats?seconds={SHOWN}"), None).await?;
    let top = client.ask(Method::GET, "/admin/v1/top", None).await?;
    Ok(Seen { stats, top, trouble: None })
}

/// Draws until somebody has seen enough.
async fn show(
    client: &Client,
    terminal: &mut ratatui::DefaultTerminal,
    mut seen: Seen,
) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| draw(frame, &seen))?;
        for _ in 0..EVERY {
            if event::poll(Duration::from_millis(100))? && ends(&event::read()?) {
                return Ok(());
            }
        }
        match look(client).await {
            Ok(newer) => seen = newer,
            // What was seen stays on the screen: a server that restarts is worth watching.
            Err(error) => seen.trouble = Some(format!("{error:#}")),
        }
    }
}

fn ends(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

const ALLOW: Color = Color::Green;
const DENY: Color = Color::Red;

fn draw(frame: &mut Frame<'_>, seen: &Seen) {
    let [head, curves, rules, keys, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(6),
        Constraint::Min(6),
        Constraint::Min(6),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(heading(seen)), head);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(curves);
    curve(frame, left, "allowed a second", &numbers(&seen.stats["series"]["allow"]), ALLOW);
    curve(frame, right, "denied a second", &numbers(&seen.stats["series"]["deny"]), DENY);
    let [left, right] = Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(rules);
    by_rule(frame, left, seen);
    store(frame, right, seen);
    let thirds = [Constraint::Fill(1), Constraint::Fill(1), Constraint::Fill(1)];
    let [rate, denials, near] = Layout::horizontal(thirds).areas(keys);
    list(
        frame,
        rate,
        "ask most",
        &seen.top["by_rate"],
        &[("key_masked", ""), ("rate", "/s"), ("share", "%")],
    );
    list(
        frame,
        denials,
        "denied most",
        &seen.top["by_denials"],
        &[("key_masked", ""), ("denied", ""), ("rule", "")],
    );
    let near_limit = [("key_masked", ""), ("utilisation", "%"), ("tier_above", "")];
    list(frame, near, "near a limit (tier above)", &seen.top["near_limit"], &near_limit);
    let foot_line = match &seen.trouble {
        Some(trouble) => Line::from(format!(" {trouble}")).fg(DENY),
        None => Line::from(" q ends; `tollgate why ID` tells of one decision; the dashboard is at /").dim(),
    };
    frame.render_widget(foot_line, foot);
}

fn heading(seen: &Seen) -> Vec<Line<'static>> {
    let node = &seen.stats["node"];
    let text = |name: &str| node[name].as_str().unwrap_or("-").to_owned();
    let series = &seen.stats["series"];
    let last = |name: &str| numbers(&series[name]).last().copied().unwrap_or(0);
    let micros = |name: &str| series[name].as_array().and_then(|all| all.last()).and_then(Value::as_f64);
    let latency = |name: &str| micros(name).map_or("-".to_owned(), |us| format!("{us:.0} µs"));
    let first = Line::from(vec![
        Span::from(format!(" {} ", text("name"))).bold(),
        Span::from(format!(
            "tollgate {}  store {}  rules {}",
            text("version"),
            text("store"),
            text("rules_revision")
        )),
    ]);
    let second = Line::from(vec![
        Span::styled(format!(" {}/s allowed", last("allow")), Style::new().fg(ALLOW)),
        Span::styled(format!("  {}/s denied", last("deny")), Style::new().fg(DENY)),
        Span::from(format!(
            "  {}/s shadow  {}/s fail open   p50 {}  p99 {}  p999 {}",
            last("shadow_deny"),
            last("fail_open"),
            latency("p50_us"),
            latency("p99_us"),
            latency("p999_us")
        )),
    ]);
    vec![first, second, Line::default()]
}

fn curve(frame: &mut Frame<'_>, area: Rect, title: &str, all: &[u64], colour: Color) {
    let width = usize::from(area.width.saturating_sub(2));
    let shown = &all[all.len().saturating_sub(width)..];
    let most = shown.iter().max().copied().unwrap_or(0);
    let block = Block::bordered().title(format!(" {title}, most {most} "));
    frame.render_widget(Sparkline::default().data(shown).style(Style::new().fg(colour)).block(block), area);
}

fn by_rule(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let mut rules: Vec<&Value> = seen.stats["rules"].as_array().into_iter().flatten().collect();
    let count = |rule: &Value, name: &str| rule[name].as_u64().unwrap_or(0);
    rules.sort_by_key(|rule| std::cmp::Reverse((count(rule, "deny"), count(rule, "allow"))));
    let rows = rules.iter().map(|rule| {
        let name = plain(&rule["rule"]);
        let denied = count(rule, "deny");
        let style = if denied > 0 { Style::new().fg(DENY) } else { Style::new() };
        Row::new([
            name,
            count(rule, "allow").to_string(),
            denied.to_string(),
            count(rule, "shadow_deny").to_string(),
        ])
        .style(style)
    });
    let widths =
        [Constraint::Fill(1), Constraint::Length(12), Constraint::Length(12), Constraint::Length(10)];
    let table = Table::new(rows, widths)
        .header(Row::new(["rule", "allowed", "denied", "shadow"]).bold())
        .block(Block::bordered().title(" rules, since the start "));
    frame.render_widget(table, area);
}

/// What stands behind the decisions; below it the keys that are hot, where keys are leased.
fn store(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    if seen.stats["node"]["leases"].is_null() {
        health(frame, area, seen);
        return;
    }
    let [above, below] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    health(frame, above, seen);
    let hot: Vec<Value> = seen.top["hot"].as_array().into_iter().flatten().map(hot_key).collect();
    let title = seen.top["hot_from_per_second"].as_u64().map(|from| format!("hot keys, from {from}/s"));
    let title = title.unwrap_or_else(|| "leased keys".to_owned());
    list(frame, below, &title, &hot.into(), &[("key", ""), ("per_second", "/s"), ("state", "")]);
}

/// A hot key as one line has it.
fn hot_key(key: &Value) -> Value {
    let values: Vec<String> = key["values"].as_array().into_iter().flatten().map(plain).collect();
    let name = if values.is_empty() { plain(&key["counter"]) } else { values.join(" ") };
    json!({"key": name, "per_second": key["per_second"], "state": key["state"]})
}

/// Breakers, leases, and what is under way.
fn health(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let node = &seen.stats["node"];
    let mut lines = Vec::new();
    for breaker in node["breakers"].as_array().into_iter().flatten() {
        let state = plain(&breaker["state"]);
        let colour = if state == "closed" { ALLOW } else { DENY };
        lines.push(Line::from(vec![
            Span::from(format!("{} ", plain(&breaker["shard"]))),
            Span::styled(state, Style::new().fg(colour)),
        ]));
    }
    if let Some(leases) = node["leases"].as_object() {
        let all = leases.iter().map(|(name, value)| format!("{name} {}", plain(value)));
        lines.push(Line::from(all.collect::<Vec<_>>().join("  ")));
    }
    for held in node["concurrency"].as_array().into_iter().flatten() {
        lines.push(Line::from(format!("{} {} under way", plain(&held["rule"]), plain(&held["in_flight"]))));
    }
    if lines.is_empty() {
        lines.push(Line::from("counters are in memory: nothing to break").dim());
    }
    let lines = Paragraph::new(lines).wrap(Wrap { trim: true });
    frame.render_widget(lines.block(Block::bordered().title(" store ")), area);
}

/// A list of callers, by its fields: the name, and the unit it is shown in.
fn list(frame: &mut Frame<'_>, area: Rect, title: &str, all: &Value, fields: &[(&str, &str)]) {
    let rows =
        all.as_array().into_iter().flatten().map(|one| {
            Row::new(fields.iter().map(|(name, unit)| shown(&one[*name], unit)).collect::<Vec<_>>())
        });
    let rest = fields.len().saturating_sub(1);
    let widths =
        std::iter::once(Constraint::Fill(1)).chain(std::iter::repeat_n(Constraint::Length(10), rest));
    frame.render_widget(Table::new(rows, widths).block(Block::bordered().title(format!(" {title} "))), area);
}

fn shown(value: &Value, unit: &str) -> String {
    match (value.as_f64(), unit) {
        (Some(part), "%") => format!("{:.0}%", part * 100.0),
        (Some(number), "/s") => format!("{number:.1}/s"),
        _ => plain(value),
    }
}

/// A value as text that cannot move the cursor.
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

/// The same for those who have no terminal.
fn tell(seen: &Seen) -> anyhow::Result<()> {
    let count = |rule: &Value, name: &str| rule[name].as_u64().unwrap_or(0).to_string();
    let rules = seen.stats["rules"].as_array().into_iter().flatten();
    let rows: Vec<[String; 4]> = rules
        .map(|rule| {
            [plain(&rule["rule"]), count(rule, "allow"), count(rule, "deny"), count(rule, "shadow_deny")]
        })
        .collect();
    client::table(["RULE", "ALLOWED", "DENIED", "SHADOW"], &rows)?;
    let callers = seen.top["by_rate"].as_array().into_iter().flatten();
    let rows: Vec<[String; 3]> = callers
        .map(|one| [plain(&one["key_masked"]), shown(&one["rate"], "/s"), shown(&one["share"], "%")])
        .collect();
    client::table(["CALLER", "RATE", "SHARE"], &rows)?;
    let hot: Vec<Value> = seen.top["hot"].as_array().into_iter().flatten().map(hot_key).collect();
    if hot.is_empty() {
        return Ok(());
    }
    let rows: Vec<[String; 3]> = hot
        .iter()
        .map(|one| [plain(&one["key"]), shown(&one["per_second"], "/s"), plain(&one["state"])])
        .collect();
    client::table(["HOT KEY", "RATE", "STATE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::{Seen, draw};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    fn screen(seen: &Seen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen in memory");
        terminal.draw(|frame| draw(frame, seen)).expect("drawn");
        let buffer = terminal.backend().buffer().clone();
        let lines = buffer.content().chunks(usize::from(width));
        lines.map(|line| line.iter().map(ratatui::buffer::Cell::symbol).collect::<String>() + "\n").collect()
    }

    #[test]
    fn what_goes_on_is_on_the_screen() {
        let stats = json!({
            "series": {"allow": [1, 2, 900], "deny": [0, 0, 37], "p99_us": [10.0, 11.0, 42.0]},
            "rules": [{"rule": "quiet", "allow": 9, "deny": 0}, {"rule": "login", "allow": 5, "deny": 321}],
            "node": {"name": "n1", "version": "0.1.0", "store": "redis", "rules_revision": "abc123",
                     "breakers": [{"shard": "10.0.0.1:6379", "state": "open"}],
                     "leases": {"keys": 7, "hot": 2, "in_hand": 1234, "local": 900_100, "central": 812, "refused": 3, "failed": 5}},
        });
        let top = json!({"by_rate": [{"key_masked": "ab\u{1b}c…", "rate": 12.25, "share": 0.5}],
                         "near_limit": [{"key_masked": "zz…", "utilisation": 0.93, "tier_above": "pro"}],
                         "hot": [{"counter": "d/api_key", "values": ["sk_liv…12345678"], "per_second": 4321, "state": "promoted", "in_hand": 9},
                                 {"counter": "d/all", "values": [], "per_second": 2000, "state": "leased", "in_hand": 9}],
                         "hot_from_per_second": 1000});
        let seen = Seen { stats, top, trouble: None };
        let text = screen(&seen, 120, 30);
        for word in [
            "n1",
            "900/s allowed",
            "37/s denied",
            "p99 42 µs",
            "login",
            "321",
            "10.0.0.1:6379 open",
            "ab c…",
            "12.2",
            "50%",
            "93%",
            "pro",
            "in_hand 1234",
            "failed 5",
            "hot keys, from 1000/s",
            "sk_liv…12345678",
            "4321.0/s",
            "promoted",
            "d/all",
        ] {
            assert!(text.contains(word), "{word} is missing\n{text}");
        }
        let (login, quiet) = (text.find("login").expect("a rule"), text.find("quiet").expect("a rule"));
        assert!(login < quiet, "what denies comes first\n{text}");
    }

    #[test]
    fn a_server_that_went_away_is_told() {
        let seen = Seen { stats: json!({}), top: json!({}), trouble: Some("nobody answers".to_owned()) };
        assert!(screen(&seen, 60, 24).contains("nobody answers"));
        // Too small for anything, but no reason to fall over.
        screen(&seen, 5, 3);
    }
}
