//! What stands in an address: an API key in its path, words in its query.

use crate::http::problem::Problem;
use hyper::Uri;

const LONGEST_KEY: usize = 512;

/// The API key at the end of a path.
pub(super) fn api_key(text: &str) -> Result<String, Problem> {
    let key =
        decode(text).ok_or_else(|| Problem::bad("the API key in the path is not percent-encoded UTF-8"))?;
    if key.is_empty() || key.len() > LONGEST_KEY || key.chars().any(char::is_control) {
        let detail = format!("an API key has 1 to {LONGEST_KEY} bytes and no control characters");
        return Err(Problem::bad(detail).at("api_key"));
    }
    Ok(key)
}

/// The words of a query, in the order of `names`. Any other is an error.
pub(super) fn words<const N: usize>(uri: &Uri, names: [&str; N]) -> Result<[Option<String>; N], Problem> {
    let (words, others) = words_and_attributes(uri, names)?;
    match others.first() {
        None => Ok(words),
        Some((name, _)) => Err(unknown(&format!("attr.{name}"), &names)),
    }
}

/// What a request says: names and values.
type Attributes = Vec<(String, String)>;

/// The same, beside any `attr.NAME=VALUE` of the query.
pub(super) fn words_and_attributes<const N: usize>(
    uri: &Uri,
    names: [&str; N],
) -> Result<([Option<String>; N], Attributes), Problem> {
    let mut words = [const { None }; N];
    let mut attributes = Attributes::new();
    for pair in uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decode(&value.replace('+', " "));
        let value = value.ok_or_else(|| Problem::bad("it is not percent-encoded UTF-8").at(name))?;
        if let Some(place) = names.iter().position(|known| *known == name) {
            words[place] = Some(value).filter(|value| !value.is_empty());
            continue;
        }
        let attribute = name.strip_prefix("attr.").and_then(decode).filter(|name| !name.is_empty());
        attributes.push((attribute.ok_or_else(|| unknown(name, &names))?, value));
        if attributes.len() > MOST_ATTRIBUTES {
            return Err(Problem::bad(format!("there are at most {MOST_ATTRIBUTES} attributes")));
        }
    }
    Ok((words, attributes))
}

/// The most attributes that a query may have.
const MOST_ATTRIBUTES: usize = 32;

fn unknown(name: &str, names: &[&str]) -> Problem {
    let shown: String = name.chars().take(50).collect();
    let known = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    Problem::bad(format!("there is no `{shown}` here; there is {known}"))
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::{api_key, words};

    #[test]
    fn keys_are_read_as_they_were_written() {
        assert_eq!(api_key("abc%2F1%20%C3%A9").ok().as_deref(), Some("abc/1 é"));
        for wrong in ["", "%", "%2", "%zz", "%+1", "%ff", "a%00b", &"x".repeat(513)] {
            assert!(api_key(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_known_words_are_read() {
        let uri = "/q?tier=a%20b&cursor=".parse().expect("an address");
        let read = words(&uri, ["cursor", "tier"]).ok();
        assert_eq!(read, Some([None, Some("a b".to_owned())]));
        assert!(words(&"/q?teir=a".parse().expect("an address"), ["cursor", "tier"]).is_err());
    }
}
