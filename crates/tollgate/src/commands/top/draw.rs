//! Screen layout of `tollgate top`.

use super::{TopState, numbers, plain, shown};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table, Wrap};
use serde_json::Value;

const ALLOW: Color = Color::Green;
const DENY: Color = Color::Red;

pub(super) fn draw(frame: &mut Frame<'_>, seen: &TopState) {
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
    curve(frame, left, "allowed per second", &numbers(&seen.stats["series"]["allow"]), ALLOW);
    curve(frame, right, "denied per second", &numbers(&seen.stats["series"]["deny"]), DENY);
    let [left, right] = Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(rules);
    by_rule(frame, left, seen);
    store(frame, right, seen);
    let thirds = [Constraint::Fill(1), Constraint::Fill(1), Constraint::Fill(1)];
    let [rate, denials, near] = Layout::horizontal(thirds).areas(keys);
    list(
        frame,
        rate,
        "top callers",
        &seen.top["by_rate"],
        &[("key_masked", ""), ("rate", "/s"), ("share", "%")],
    );
    list(
        frame,
        denials,
        "top denied callers",
        &seen.top["by_denials"],
        &[("key_masked", ""), ("denied", ""), ("rule", "")],
    );
    let near_limit = [("key_masked", ""), ("utilisation", "%"), ("tier_above", "")];
    list(frame, near, "near a limit (tier above)", &seen.top["near_limit"], &near_limit);
    let foot_line = match &seen.failure {
        Some(error) => Line::from(format!(" {error}")).fg(DENY),
        None => Line::from(" q quits; `tollgate why ID` explains a decision; the dashboard is at /").dim(),
    };
    frame.render_widget(foot_line, foot);
}

fn heading(seen: &TopState) -> Vec<Line<'static>> {
    let (name, about) = seen.node();
    let [allowed, denied, rest] = seen.rates();
    let first = Line::from(vec![Span::from(format!(" {name} ")).bold(), Span::from(about)]);
    let second = Line::from(vec![
        Span::styled(format!(" {allowed}"), Style::new().fg(ALLOW)),
        Span::styled(format!("  {denied}"), Style::new().fg(DENY)),
        Span::from(format!("  {rest}")),
    ]);
    vec![first, second, Line::default()]
}

fn curve(frame: &mut Frame<'_>, area: Rect, title: &str, all: &[u64], colour: Color) {
    let width = usize::from(area.width.saturating_sub(2));
    let shown = &all[all.len().saturating_sub(width)..];
    let most = shown.iter().max().copied().unwrap_or(0);
    let block = Block::bordered().title(format!(" {title}, max {most} "));
    frame.render_widget(Sparkline::default().data(shown).style(Style::new().fg(colour)).block(block), area);
}

fn by_rule(frame: &mut Frame<'_>, area: Rect, seen: &TopState) {
    let mut rules = seen.rules();
    let count = |rule: &Value, name: &str| rule[name].as_u64().unwrap_or(0);
    rules.sort_by_key(|rule| std::cmp::Reverse((count(rule, "deny"), count(rule, "allow"))));
    let rows: Vec<Vec<String>> = rules
        .iter()
        .map(|rule| {
            let counts = ["allow", "deny", "shadow_deny"].map(|name| count(rule, name).to_string());
            std::iter::once(plain(&rule["rule"])).chain(counts).collect()
        })
        .collect();
    let titles = ["rule", "allowed", "denied", "shadow"].map(str::to_owned).to_vec();
    let widths = widths(area, rows.iter().chain([&titles]));
    let rows =
        rows.into_iter().zip(&rules).map(|(row, rule)| {
            Row::new(row.into_iter().take(widths.len()).collect::<Vec<_>>())
                .style(if count(rule, "deny") > 0 { Style::new().fg(DENY) } else { Style::new() })
        });
    let table = Table::new(rows.collect::<Vec<_>>(), widths.clone())
        .header(Row::new(titles).bold())
        .block(Block::bordered().title(" rules since startup "));
    frame.render_widget(table, area);
}

/// Returns column widths: each as wide as its widest cell, and the rest for the first, which is a name. If space is
/// short, the last columns are omitted before the name is shortened.
fn widths<'r>(area: Rect, rows: impl Iterator<Item = &'r Vec<String>>) -> Vec<Constraint> {
    /// Number of characters that usually distinguish two names.
    const NAME: usize = 12;
    let mut most: Vec<usize> = Vec::new();
    for row in rows {
        most.resize(most.len().max(row.len()), 0);
        row.iter().zip(&mut most).for_each(|(cell, most)| *most = cell.chars().count().max(*most));
    }
    let Some((name, others)) = most.split_first() else { return Vec::new() };
    // Width without the border.
    let mut rest = usize::from(area.width).saturating_sub(2).saturating_sub(NAME.min(*name));
    let mut widths = vec![Constraint::Fill(1)];
    for other in others {
        // One more for the space between columns.
        let Some(left) = rest.checked_sub(other + 1) else { break };
        rest = left;
        widths.push(Constraint::Length(u16::try_from(*other).unwrap_or(u16::MAX)));
    }
    widths
}

/// Draws the state of the store, and below it the hot keys if keys are leased.
fn store(frame: &mut Frame<'_>, area: Rect, seen: &TopState) {
    if seen.stats["node"]["leases"].is_null() {
        health(frame, area, seen);
        return;
    }
    let [above, below] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    health(frame, above, seen);
    let title = seen.top["hot_from_per_second"].as_u64().map(|from| format!("hot keys, from {from}/s"));
    let title = title.unwrap_or_else(|| "leased keys".to_owned());
    list(frame, below, &title, &seen.hot().into(), &[("key", ""), ("per_second", "/s"), ("state", "")]);
}

/// Draws breakers, leases and permits in flight.
fn health(frame: &mut Frame<'_>, area: Rect, seen: &TopState) {
    let node = &seen.stats["node"];
    let mut lines = Vec::new();
    for line in seen.cells() {
        let is_bad = line.contains("regional only") || line.ends_with("silent");
        lines.push(if is_bad { Line::from(line).fg(DENY) } else { Line::from(line) });
    }
    for [shard, state] in seen.breakers() {
        let colour = if state == "closed" { ALLOW } else { DENY };
        lines.push(Line::from(vec![
            Span::from(format!("{shard} ")),
            Span::styled(state, Style::new().fg(colour)),
        ]));
    }
    if let Some(leases) = node["leases"].as_object() {
        let all = leases.iter().map(|(name, value)| format!("{name} {}", plain(value)));
        lines.push(Line::from(all.collect::<Vec<_>>().join("  ")));
    }
    for held in node["concurrency"].as_array().into_iter().flatten() {
        lines.push(Line::from(format!("{} {} in flight", plain(&held["rule"]), plain(&held["in_flight"]))));
    }
    if lines.is_empty() {
        lines.push(Line::from("in-memory store: no circuit breakers").dim());
    }
    let lines = Paragraph::new(lines).wrap(Wrap { trim: true });
    frame.render_widget(lines.block(Block::bordered().title(" store ")), area);
}

/// Draws a list of callers; `fields` are the names of the values and their units.
fn list(frame: &mut Frame<'_>, area: Rect, title: &str, all: &Value, fields: &[(&str, &str)]) {
    let cells = |one: &Value| fields.iter().map(|(name, unit)| shown(&one[*name], unit)).collect();
    let rows: Vec<Vec<String>> = all.as_array().into_iter().flatten().map(cells).collect();
    let widths = widths(area, rows.iter());
    // The table would add columns for surplus cells.
    let rows = rows.into_iter().map(|row| Row::new(row.into_iter().take(widths.len()).collect::<Vec<_>>()));
    let table = Table::new(rows.collect::<Vec<_>>(), widths.clone());
    frame.render_widget(table.block(Block::bordered().title(format!(" {title} "))), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    fn screen(seen: &TopState, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen in memory");
        terminal.draw(|frame| draw(frame, seen)).expect("drawn");
        let buffer = terminal.backend().buffer().clone();
        let lines = buffer.content().chunks(usize::from(width));
        lines.map(|line| line.iter().map(ratatui::buffer::Cell::symbol).collect::<String>() + "\n").collect()
    }

    #[test]
    fn the_screen_shows_the_state() {
        let stats = json!({
            "series": {"allow": [1, 2, 900], "deny": [0, 0, 37], "p99_us": [10.0, 11.0, 42.0]},
            "rules": [{"rule": "quiet", "allow": 9, "deny": 0}, {"rule": "login", "allow": 5, "deny": 321}],
            "node": {"name": "n1", "version": "0.1.0", "store": "redis", "rules_revision": "abc123",
                     "breakers": [{"shard": "10.0.0.1:6379", "state": "open"}],
                     "leases": {"keys": 7, "hot": 2, "available": 1234, "local": 900_100, "central": 812, "refused": 3, "failed": 5}},
        });
        let top = json!({"by_rate": [{"key_masked": "ab\u{1b}c…", "rate": 12.25, "share": 0.5}],
                         "near_limit": [{"key_masked": "zz…", "utilisation": 0.93, "tier_above": "pro"}],
                         "hot": [{"counter": "d/api_key", "values": ["sk_liv…12345678"], "per_second": 4321, "state": "promoted", "available": 9},
                                 {"counter": "d/all", "values": [], "per_second": 2000, "state": "leased", "available": 9}],
                         "hot_from_per_second": 1000});
        let seen = TopState { stats, top, failure: None };
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
            "available 1234",
            "failed 5",
            "hot keys, from 1000/s",
            "sk_liv…12345678",
            "4321/s",
            "promoted",
            "d/all",
        ] {
            assert!(text.contains(word), "{word} is missing\n{text}");
        }
        let (login, quiet) = (text.find("login").expect("a rule"), text.find("quiet").expect("a rule"));
        assert!(login < quiet, "what denies comes first\n{text}");
    }

    #[test]
    fn an_unavailable_server_is_reported() {
        let seen = TopState { stats: json!({}), top: json!({}), failure: Some("cannot connect".to_owned()) };
        assert!(screen(&seen, 60, 24).contains("cannot connect"));
        // A screen too small for any content must not panic.
        screen(&seen, 5, 3);
    }

    /// Names of callers stay readable on a small screen.
    #[test]
    fn names_have_room_on_a_small_screen() {
        let caller = "sk_liv…12345678";
        let top = json!({
            "by_rate": [{"key_masked": caller, "rate": 43_210.2, "share": 0.5}],
            "by_denials": [{"key_masked": caller, "denied": 21_000, "rule": "a rule with a long name"}],
            "near_limit": [{"key_masked": caller, "utilisation": 0.93, "tier_above": "pro"}],
        });
        let stats = json!({"rules": [{"rule": "per key and endpoint", "allow": 9, "deny": 1}]});
        let text = screen(&TopState { stats, top, failure: None }, 80, 24);
        assert_eq!(text.matches("sk_liv…12345").count(), 3, "{text}");
        for word in ["43210/s", "50%", "21000", "93%", "pro", "per key and endpoint"] {
            assert!(text.contains(word), "{word} is missing\n{text}");
        }
    }
}
