//! Escaping of text from untrusted clients, before it reaches a terminal.
//!
//! A terminal obeys some characters: controls move the cursor, change the title or hide what was written, directional
//! marks reorder a line, and invisible characters make two names look alike. All of them are written as escapes
//! instead, in one place: [`text`] for a value in a line, [`lines`] for output that consists of lines with our own colors,
//! [`json`] for JSON, which stays the same JSON. Rejected: removing them, because then an odd name looks like another
//! one; and escaping all of Unicode, because names are written in many languages.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns whether a terminal would obey or hide a character instead of showing it.
#[must_use]
pub const fn is_unsafe(c: char) -> bool {
    matches!(c,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}'
        | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// Escapes a value that stands within a line, such as `\u{1b}`. Line breaks are escaped as well.
///
/// ```
/// use tollgate_observe::escape;
/// assert_eq!(escape::text("a\u{1b}[2J\u{202e}b\n"), r"a\u{1b}[2J\u{202e}b\n");
/// ```
#[must_use]
pub fn text(text: &str) -> Cow<'_, str> {
    escape(text, |_, _| 0, rust_escape)
}

/// Escapes lines of output. Line breaks, tabs and colors (`ESC [ … m`) stay: they are ours, if every value in the lines
/// was escaped by [`text`] before.
#[must_use]
pub fn lines(text: &str) -> Cow<'_, str> {
    let stays = |c: char, rest: &str| match c {
        '\n' | '\t' => c.len_utf8(),
        '\u{1b}' => color_length(rest),
        _ => 0,
    };
    escape(text, stays, rust_escape)
}

/// Escapes JSON text, as `\u001b`: inside strings it means the same, and outside of them there are only line breaks and
/// spaces, which stay.
#[must_use]
pub fn json(text: &str) -> Cow<'_, str> {
    let stays = |c: char, _: &str| if matches!(c, '\n' | '\r' | '\t') { c.len_utf8() } else { 0 };
    escape(text, stays, |c, out| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    })
}

fn rust_escape(c: char, out: &mut String) {
    match c {
        '\n' | '\r' | '\t' => out.extend(c.escape_default()),
        _ => out.extend(c.escape_unicode()),
    }
}

/// Returns the length of a color sequence at the beginning of `text`, or 0.
fn color_length(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\u{1b}[") else { return 0 };
    let end = parameters.find(|c: char| !(c.is_ascii_digit() || c == ';')).unwrap_or(parameters.len());
    if end <= 32 && parameters[end..].starts_with('m') { end + 3 } else { 0 }
}

/// Escapes unsafe characters. `stays` returns the length of what may stay at an unsafe character.
fn escape(
    text: &str,
    stays: impl Fn(char, &str) -> usize,
    write: impl Fn(char, &mut String),
) -> Cow<'_, str> {
    // Most text is plain ASCII.
    let first = text.bytes().position(|byte| !(b' '..0x7f).contains(&byte));
    let Some(first) = first else { return Cow::Borrowed(text) };
    let mut out = String::new();
    let (mut copied, mut at) = (0, first);
    while let Some(c) = text[at..].chars().next() {
        let kept = if is_unsafe(c) { stays(c, &text[at..]) } else { c.len_utf8() };
        if kept == 0 {
            out.push_str(&text[copied..at]);
            write(c, &mut out);
            at += c.len_utf8();
            copied = at;
        }
        at += kept;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Text with many characters that a terminal would obey.
    fn hostile() -> impl Strategy<Value = String> {
        let odd = prop::sample::select(vec![
            '\u{1b}',
            '\u{9b}',
            '\u{7f}',
            '\r',
            '\n',
            '\u{8}',
            '\u{202e}',
            '\u{2066}',
            '\u{200f}',
            '\u{61c}',
            '\u{200b}',
            '\u{2028}',
            '\u{feff}',
            '\u{e0041}',
            '[',
            'm',
            '3',
            '"',
            '\\',
            'é',
            '漢',
        ]);
        prop::collection::vec(prop_oneof![odd, any::<char>()], 0..40)
            .prop_map(|all| all.into_iter().collect())
    }

    fn unescape(text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if let Some(code) = rest.strip_prefix("\\u{").and_then(|rest| rest.split_once('}')) {
                out.extend(char::from_u32(u32::from_str_radix(code.0, 16).expect("digits")));
                rest = code.1;
            } else {
                out.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
        out
    }

    proptest! {
        #[test]
        fn nothing_unsafe_is_left_and_nothing_is_lost(value in hostile()) {
            let shown = text(&value);
            prop_assert!(!shown.chars().any(is_unsafe), "{:?}", shown);
            if !value.contains(['\\', '\n', '\r', '\t']) {
                prop_assert_eq!(unescape(&shown), value);
            }
        }

        #[test]
        fn only_breaks_and_colors_stay_in_lines(value in hostile()) {
            let mut rest: &str = &lines(&value);
            while let Some(at) = rest.find(is_unsafe) {
                let own = &rest[at..];
                let length = if own.starts_with(['\n', '\t']) { 1 } else { color_length(own) };
                prop_assert!(length > 0, "{:?}", own);
                rest = &own[length..];
            }
        }

        #[test]
        fn json_stays_the_same_json(value in hostile(), name in hostile()) {
            let sent = serde_json::json!({name: [value]});
            for written in [sent.to_string(), format!("{sent:#}\n")] {
                let shown = json(&written);
                prop_assert!(!shown.chars().any(|c| is_unsafe(c) && c != '\n'), "{:?}", shown);
                prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).expect("JSON"), sent.clone());
            }
        }
    }

    #[test]
    fn a_color_is_a_complete_sequence() {
        assert_eq!(lines("\u{1b}[1;31mred\u{1b}[0m"), "\u{1b}[1;31mred\u{1b}[0m");
        for cut in ["\u{1b}[", "\u{1b}[31", "\u{1b}[31A", "\u{1b}]0;title\u{7}", "\u{1b}c"] {
            assert!(lines(cut).starts_with(r"\u{1b}"), "{cut:?}");
        }
    }
}
