//! Dates of HTTP (RFC 9110, 5.6.7), in their three forms and no others: clients in every language must agree on them.

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const LONG_DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const DAY_MS: i64 = 86_400_000;

/// Parses a date into milliseconds since 1970. `now_ms` decides the century of a year with two digits.
pub(super) fn parse(text: &str, now_ms: u64) -> Option<i64> {
    if let Some((day, rest)) = text.split_once(", ") {
        let rest = rest.strip_suffix(" GMT")?;
        return if DAYS.contains(&day) {
            let [day, month, year, time] = fields(rest, ' ')?;
            date(number(year, 4)?, month, number(day, 2)?, time)
        } else if LONG_DAYS.contains(&day) {
            let (date_text, time) = rest.split_once(' ')?;
            let [day, month, year] = fields(date_text, '-')?;
            let mut year = 2000 + number(year, 2)?;
            if year > year_of(now_ms) + 50 {
                year -= 100;
            }
            date(year, month, number(day, 2)?, time)
        } else {
            None
        };
    }
    // `Sun Nov  6 08:49:37 1994`: a day of one digit has a space before it.
    let (day, rest) = text.split_once(' ')?;
    let (month, rest) = rest.split_once(' ')?;
    let (number_text, rest) = rest.split_at_checked(2)?;
    let [time, year] = fields(rest.strip_prefix(' ')?, ' ')?;
    let number_text = number_text.strip_prefix(' ').unwrap_or(number_text);
    let date_day = number(number_text, number_text.len())?;
    DAYS.contains(&day).then(|| date(number(year, 4)?, month, date_day, time))?
}

/// Splits into exactly `N` parts.
fn fields<const N: usize>(text: &str, separator: char) -> Option<[&str; N]> {
    let mut parts = text.split(separator);
    let mut all = [""; N];
    for part in &mut all {
        *part = parts.next()?;
    }
    parts.next().is_none().then_some(all)
}

/// A number of exactly `digits` digits.
fn number(text: &str, digits: usize) -> Option<i64> {
    let is_number =
        text.len() == digits && !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

fn date(year: i64, month: &str, day: i64, time: &str) -> Option<i64> {
    let month = MONTHS.iter().position(|name| *name == month)?;
    let [hour, minute, second] = fields(time, ':')?;
    let (hour, minute, second) = (number(hour, 2)?, number(minute, 2)?, number(second, 2)?);
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        1 => 28 + i64::from(is_leap),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    };
    if !(1..=days).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let month = i64::try_from(month).ok()? + 1;
    Some(days_since_1970(year, month, day) * DAY_MS + ((hour * 60 + minute) * 60 + second) * 1_000)
}

/// Counts days from 1970-01-01, in years that start in March, so that a leap day is the last of its year.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

fn year_of(now_ms: u64) -> i64 {
    let days = i64::try_from(now_ms).unwrap_or(i64::MAX) / DAY_MS;
    // A year too early or right: 1 January of the next one tells.
    let year = 1970 + days / 366;
    (year..).find(|year| days_since_1970(year + 1, 1, 1) > days).unwrap_or(year)
}
