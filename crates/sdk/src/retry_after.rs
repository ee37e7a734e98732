//! Parses `Retry-After` and `RateLimit` (with no unit left) into a pause. Invalid values are ignored.

use http::header::{HeaderMap, RETRY_AFTER};
use http::{Response, StatusCode};
use std::time::{Duration, SystemTime};

/// Returns the pause that a response requests, if any.
pub(crate) fn pause<B>(response: &Response<B>, now: SystemTime) -> Option<Duration> {
    let is_denied =
        matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let after = if is_denied { retry_after(response.headers(), now) } else { None };
    after.max(exhausted(response.headers()))
}

/// Parses `Retry-After`, in seconds or as a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that overflows is still a long time.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    Some(httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default())
}

/// Returns the longest `t` of the limits with `r=0`.
fn exhausted(headers: &HeaderMap) -> Option<Duration> {
    let lines = headers.get_all("ratelimit").iter().filter_map(|line| line.to_str().ok());
    let limits = lines.flat_map(|line| split(line, ','));
    let waits = limits.filter_map(|limit| {
        let (mut left, mut wait) = (None, None);
        for parameter in split(limit, ';').skip(1) {
            let (name, value) = parameter.split_once('=')?;
            match name.trim() {
                "r" => left = value.trim().parse::<u64>().ok(),
                "t" => wait = value.trim().parse::<u64>().ok(),
                _ => {}
            }
        }
        wait.filter(|_| left == Some(0)).map(Duration::from_secs)
    });
    waits.max()
}

/// Splits `line` at the separators outside of quotes, because quoted names may contain separators.
fn split(line: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    line.split(move |char: char| {
        match char {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => return !quoted && char == separator,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::pause;
    use http::Response;
    use std::time::{Duration, SystemTime};

    /// A pause that is too long is an outage; one that is too short overloads the host.
    #[test]
    fn responses_are_parsed_into_pauses() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        for (status, headers, seconds) in [
            (429, vec![("retry-after", "12")], Some(12)),
            (503, vec![("retry-after", " 3 ")], Some(3)),
            (429, vec![("retry-after", "Sun, 06 Nov 1994 08:49:47 GMT")], Some(10)),
            (429, vec![("retry-after", "Sun, 06 Nov 1994 08:49:00 GMT")], Some(0)),
            (429, vec![("retry-after", "99999999999999999999999")], Some(u64::MAX)),
            (200, vec![("retry-after", "12")], None),
            (429, vec![("retry-after", "-1")], None),
            (429, vec![("retry-after", "soon")], None),
            (429, vec![("retry-after", "")], None),
            (429, vec![], None),
            (200, vec![("ratelimit", r#""a";r=0;t=7"#)], Some(7)),
            (200, vec![("ratelimit", r#""a";r=1;t=7"#)], None),
            (200, vec![("ratelimit", r#""a,;r=0;t=9";r=3;t=7, "b;\"x";t=5;r=0"#)], Some(5)),
            (200, vec![("ratelimit", r#""a";r=0;t=7"#), ("ratelimit", r#""b";r=0;t=9"#)], Some(9)),
            (429, vec![("retry-after", "3"), ("ratelimit", r#""a";r=0;t=7"#)], Some(7)),
            (200, vec![("ratelimit", "r=0")], None),
            (200, vec![("ratelimit", "a;r=0;t=-1")], None),
            (200, vec![("ratelimit", "\"open;r=0;t=7")], None),
        ] {
            let mut response = Response::builder().status(status);
            for (name, value) in &headers {
                response = response.header(*name, *value);
            }
            let response = response.body(()).expect("a response");
            assert_eq!(pause(&response, now), seconds.map(Duration::from_secs), "{status} {headers:?}");
        }
    }
}
