//! The `Date` field of Tollgate's own responses, formatted once per second and thread.

use bytes::BufMut;
use http::HeaderValue;
use std::cell::RefCell;
use tollgate_core::Timestamp;

const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Returns the HTTP date of `now`.
#[must_use]
pub fn now(now: Timestamp) -> HeaderValue {
    with(now, Clone::clone)
}

/// Appends the HTTP date of `now` to `out`.
pub fn write(now: Timestamp, out: &mut impl BufMut) {
    with(now, |value| out.put_slice(value.as_bytes()));
}

fn with<T>(now: Timestamp, read: impl FnOnce(&HeaderValue) -> T) -> T {
    thread_local! {
        static LAST: RefCell<(u64, HeaderValue)> = const { RefCell::new((u64::MAX, HeaderValue::from_static(""))) };
    }
    LAST.with_borrow_mut(|(second, value)| {
        if *second != now.as_secs() {
            *second = now.as_secs();
            *value = HeaderValue::from_str(&text(*second)).unwrap_or_else(|_| HeaderValue::from_static(""));
        }
        read(value)
    })
}

/// Formats a date. Days are counted from 1 March, so that a leap day is the last day of its year.
fn text(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12;
    let year = year + era * 400 + u64::from(month < 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    let (weekday, month) = (DAYS[(days % 7) as usize], MONTHS[month as usize]);
    format!("{weekday}, {of_month:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    #[test]
    fn dates_are_those_of_the_calendar() {
        let known = [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (1_709_251_199, "Thu, 29 Feb 2024 23:59:59 GMT"),
            (1_735_689_599, "Tue, 31 Dec 2024 23:59:59 GMT"),
        ];
        for (seconds, text) in known {
            assert_eq!(super::text(seconds), text);
        }
    }
}
