//! RESP encoder. Rejected: standard formatting for numbers, because they are most of what is sent and it would cost
//! more than the decision.

/// The RESP version of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

/// Appends the digits of a number.
#[inline]
pub(super) fn digits(out: &mut Vec<u8>, number: i64) {
    // Fast path: nearly all numbers have one or two digits.
    if let Ok(small) = u8::try_from(number)
        && small < 100
    {
        if small >= 10 {
            out.push(b'0' + small / 10);
        }
        out.push(b'0' + small % 10);
        return;
    }
    many_digits(out, number);
}

fn many_digits(out: &mut Vec<u8>, number: i64) {
    let mut text = [0_u8; 20];
    let (mut at, mut left) = (text.len(), number.unsigned_abs());
    loop {
        at -= 1;
        text[at] = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            break;
        }
    }
    if number < 0 {
        at -= 1;
        text[at] = b'-';
    }
    out.extend_from_slice(&text[at..]);
}

fn line(out: &mut Vec<u8>, mark: u8, number: i64) {
    out.push(mark);
    digits(out, number);
    out.extend_from_slice(b"\r\n");
}

#[inline]
pub(super) fn integer(out: &mut Vec<u8>, number: i64) {
    line(out, b':', number);
}

/// Appends the head of an array; its elements follow.
pub(super) fn array(out: &mut Vec<u8>, length: usize) {
    line(out, b'*', as_i64(length as u64));
}

/// Appends the head of a map, which is an array of keys and values in RESP2.
pub(super) fn map(out: &mut Vec<u8>, protocol: Protocol, pairs: usize) {
    match protocol {
        Protocol::Resp2 => array(out, 2 * pairs),
        Protocol::Resp3 => line(out, b'%', as_i64(pairs as u64)),
    }
}

pub(super) fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    line(out, b'$', as_i64(bytes.len() as u64));
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

pub(super) fn null(out: &mut Vec<u8>, protocol: Protocol) {
    out.extend_from_slice(match protocol {
        Protocol::Resp2 => b"$-1\r\n".as_slice(),
        Protocol::Resp3 => b"_\r\n",
    });
}

pub(super) fn simple(out: &mut Vec<u8>, text: &str) {
    out.push(b'+');
    out.extend_from_slice(text.as_bytes());
    out.extend_from_slice(b"\r\n");
}

pub(super) fn ok(out: &mut Vec<u8>) {
    out.extend_from_slice(b"+OK\r\n");
}

/// Appends an error: a code in upper case, then a message. The message may quote the client's input, so line breaks and
/// other control characters become spaces.
pub(super) fn error(out: &mut Vec<u8>, code: &str, text: &str) {
    out.push(b'-');
    out.extend_from_slice(code.as_bytes());
    out.push(b' ');
    out.extend(text.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }));
    out.extend_from_slice(b"\r\n");
}

/// Converts a count to a protocol integer.
#[inline]
pub(super) fn as_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Returns a duration in seconds, rounded up from whole milliseconds; a fraction of a millisecond is dropped, as in
/// redis-cell.
#[inline]
pub(super) fn seconds(span: tollgate_core::TimeDelta) -> i64 {
    as_i64((span.as_micros() / 1_000).div_ceil(1_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tollgate_core::TimeDelta;

    proptest! {
        #[test]
        fn digits_are_those_of_the_standard_library(number: i64, small in -200_i64..200) {
            for number in [number, small, i64::MIN, i64::MAX] {
                let mut out = Vec::new();
                digits(&mut out, number);
                prop_assert_eq!(out, number.to_string().into_bytes());
            }
        }
    }

    #[test]
    fn an_error_is_one_line_whatever_it_quotes() {
        let mut out = Vec::new();
        error(&mut out, "ERR", "unknown command 'a\r\n+OK\r\n'");
        assert_eq!(out, b"-ERR unknown command 'a  +OK  '\r\n");
    }

    #[test]
    fn seconds_round_up_from_a_millisecond_on() {
        let cases = [(0, 0), (999, 0), (1_000, 1), (2_000_000, 2), (2_000_999, 2), (2_001_000, 3)];
        for (micros, whole) in cases {
            assert_eq!(seconds(TimeDelta::from_micros(micros)), whole, "{micros}");
        }
    }
}
