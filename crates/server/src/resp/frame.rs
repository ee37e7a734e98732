//! RESP command parser without copies: `*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\n` is a command of two words.
//!
//! An incomplete command is parsed again from its start when more bytes arrive: a command is small (`MAX_COMMAND`), so
//! that costs less than a state machine, and the result cannot depend on how the bytes are split. An excessive length
//! is rejected as soon as it is parsed, before waiting or allocating for it.

use smallvec::SmallVec;

/// Maximum number of words of a command: `TG.CHECK`, a domain, 64 attributes, a cost, and some more.
pub(super) const MAX_WORDS: usize = 256;
/// Maximum length of a word in bytes. Longer than a value may be: a check with such a value must not fail
/// ([`tollgate_http::value`]).
pub(super) const MAX_WORD: usize = 32 * 1024;
/// Maximum size of a command in bytes.
pub(super) const MAX_COMMAND: usize = 64 * 1024;
/// Maximum number of digits of a length, including leading zeros.
const MAX_DIGITS: usize = 20;

/// The words of one command.
pub(super) type Words<'a> = SmallVec<[&'a [u8]; 8]>;

/// A protocol error: input that cannot become a command, whatever follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It does not start with an array.
    Inline,
    /// A length is not a number.
    NoNumber,
    TooManyWords,
    /// An array element is not a bulk string.
    NoString,
    /// The length of a word is negative.
    NoWord,
    WordTooLong,
    TooLarge,
    /// A word is longer or shorter than its length.
    WrongLength,
}

impl Fault {
    /// Returns the error message for the client.
    pub(super) fn message(self) -> String {
        match self {
            Self::Inline => {
                "inline commands are not supported; send arrays of strings, as every Redis client does".into()
            }
            Self::NoNumber => "a length must be a whole number followed by \\r\\n".into(),
            Self::TooManyWords => format!("invalid multibulk length: at most {MAX_WORDS} words per command"),
            Self::NoString => "expected '$': a command is an array of strings".into(),
            Self::NoWord => "invalid bulk length: it is negative".into(),
            Self::WordTooLong => format!("invalid bulk length: at most {MAX_WORD} bytes per word"),
            Self::TooLarge => format!("command too large: at most {MAX_COMMAND} bytes per command"),
            Self::WrongLength => "a word does not match its length".into(),
        }
    }
}

/// Parses the command at the start of `buffer` into `words`. Returns its size in bytes, or `None` if it is incomplete.
/// A command without words (`*0`) is valid and is skipped, as in Redis.
#[inline]
pub(super) fn parse<'a>(buffer: &'a [u8], words: &mut Words<'a>) -> Result<Option<usize>, Fault> {
    words.clear();
    let Some(first) = buffer.first() else { return Ok(None) };
    if *first != b'*' {
        return Err(Fault::Inline);
    }
    let Some((count, mut at)) = number(buffer, 1)? else { return Ok(None) };
    if count > MAX_WORDS as i64 {
        return Err(Fault::TooManyWords);
    }
    for _ in 0..count {
        match buffer.get(at) {
            Some(b'$') => {}
            Some(_) => return Err(Fault::NoString),
            None => return Ok(None),
        }
        let Some((length, from)) = number(buffer, at + 1)? else { return Ok(None) };
        let length = match usize::try_from(length) {
            Err(_) => return Err(Fault::NoWord),
            Ok(length) if length > MAX_WORD => return Err(Fault::WordTooLong),
            Ok(length) => length,
        };
        let end = from + length;
        if end + 2 > MAX_COMMAND {
            return Err(Fault::TooLarge);
        }
        match buffer.get(end..end + 2) {
            Some(b"\r\n") => {}
            Some(_) => return Err(Fault::WrongLength),
            None => {
                let wrong = buffer.get(end).is_some_and(|byte| *byte != b'\r');
                return if wrong { Err(Fault::WrongLength) } else { Ok(None) };
            }
        }
        words.push(&buffer[from..end]);
        at = end + 2;
    }
    Ok(Some(at))
}

/// Parses the number on the line at `at`. Returns it with the position of the next line.
#[inline(always)]
fn number(buffer: &[u8], at: usize) -> Result<Option<(i64, usize)>, Fault> {
    // Fast path: nearly all lengths have one digit.
    if let Some([digit @ b'0'..=b'9', b'\r', b'\n']) = buffer.get(at..at + 3) {
        return Ok(Some((i64::from(digit - b'0'), at + 3)));
    }
    longer_number(buffer, at)
}

fn longer_number(buffer: &[u8], start: usize) -> Result<Option<(i64, usize)>, Fault> {
    let mut at = start;
    let negative = buffer.get(at) == Some(&b'-');
    at += usize::from(negative);
    let (digits_at, mut value) = (at, 0_i64);
    loop {
        match buffer.get(at) {
            None => return Ok(None),
            Some(digit @ b'0'..=b'9') if at - digits_at < MAX_DIGITS => {
                value = value.saturating_mul(10).saturating_add(i64::from(digit - b'0'));
                at += 1;
            }
            Some(b'\r') if at > digits_at => break,
            Some(_) => return Err(Fault::NoNumber),
        }
    }
    match buffer.get(at + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some((if negative { -value } else { value }, at + 2))),
        Some(_) => Err(Fault::NoNumber),
    }
}

/// Parses a word as an integer.
#[inline]
pub(super) fn integer(word: &[u8]) -> Option<i64> {
    let (negative, digits) = match word {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    let mut value = 0_u64;
    for digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        // Nineteen digits are below 10^19, which fits a `u64`.
        value = value * 10 + u64::from(digit - b'0');
    }
    if negative { 0_i64.checked_sub_unsigned(value) } else { i64::try_from(value).ok() }
}

#[cfg(test)]
#[path = "frame/tests.rs"]
mod tests;
