//! `TG.CHECK domain key value [key value ...] [COST n] [WITHREASON]`: checks a request described by attributes against the
//! rules. `TG.PEEK` does the same without charging.
//!
//! The reason is a name more in the map of RESP3. In RESP2 replies are lists, which programs take apart by their length, so it
//! is only there if the command asks for it.

use super::encode::{self, Protocol};
use super::{CommandError, frame};
use smallvec::SmallVec;
use std::borrow::Cow;
use tollgate_core::Cost;
use tollgate_engine::{Check, Decision};
use tollgate_http::value;

/// Maximum number of attributes, as in the other protocols.
const MAX_ATTRIBUTES: usize = 64;

/// What the list of a RESP2 reply ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastField {
    DecisionId,
    Reason,
}

/// A parsed check.
#[derive(Debug)]
pub(super) struct CheckCommand<'a> {
    domain: &'a str,
    attributes: SmallVec<[(Cow<'a, str>, Cow<'a, str>); 8]>,
    cost: Cost,
    pub(super) last_field: LastField,
}

impl<'a> CheckCommand<'a> {
    /// Parses a check; `None` if it is another command.
    pub(super) fn parse(words: &[&'a [u8]]) -> Option<Result<Self, CommandError>> {
        let name = words.first()?;
        if name.eq_ignore_ascii_case(b"TG.CHECK") {
            return Some(Self::read(&words[1..], "tg.check").and_then(|(command, cost)| {
                Ok(Self { cost: cost.map_or(Ok(Cost::ONE), read_cost)?, ..command })
            }));
        }
        name.eq_ignore_ascii_case(b"TG.PEEK").then(|| {
            let (command, cost) = Self::read(&words[1..], "tg.peek")?;
            match cost {
                Some(_) => Err(CommandError::new("TG.PEEK charges nothing and takes no COST")),
                None => Ok(command),
            }
        })
    }

    fn read(words: &[&'a [u8]], command: &str) -> Result<(Self, Option<&'a [u8]>), CommandError> {
        // An even number of words follows a domain, so this is no attribute.
        let (words, last_field) = match words {
            [words @ .., last] if words.len() % 2 == 1 && last.eq_ignore_ascii_case(b"WITHREASON") => {
                (words, LastField::Reason)
            }
            _ => (words, LastField::DecisionId),
        };
        let (domain, mut rest) = match words {
            [domain, rest @ ..] if rest.len() >= 2 && rest.len() % 2 == 0 => (domain, rest),
            _ => return Err(CommandError::wrong_number(command)),
        };
        let mut cost = None;
        if let [pairs @ .., word, units] = rest
            && !pairs.is_empty()
            && word.eq_ignore_ascii_case(b"COST")
        {
            (rest, cost) = (pairs, Some(*units));
        }
        if rest.len() > 2 * MAX_ATTRIBUTES {
            return Err(CommandError::new(format!("at most {MAX_ATTRIBUTES} attributes")));
        }
        let Ok(domain) = std::str::from_utf8(domain) else {
            return Err(CommandError::new("the domain is not UTF-8"));
        };
        if domain.is_empty() {
            return Err(CommandError::new("the domain is empty; write the domain of a rule file"));
        }
        let mut attributes: SmallVec<[(Cow<'_, str>, Cow<'_, str>); 8]> = SmallVec::new();
        for pair in rest.chunks_exact(2) {
            let (key, value) = (value::from_bytes(pair[0]), value::from_bytes(pair[1]));
            if attributes.iter().any(|(known, _)| *known == key) {
                return Err(CommandError::new(format!("duplicate attribute '{key}'; send it once")));
            }
            attributes.push((key, value));
        }
        Ok((Self { domain, attributes, cost: Cost::PEEK, last_field }, cost))
    }

    /// Returns the attributes, from which the check borrows.
    pub(super) fn attributes(&self) -> SmallVec<[(&str, &str); 8]> {
        self.attributes.iter().map(|(key, value)| (&**key, &**value)).collect()
    }

    pub(super) fn check<'c>(&'c self, attributes: &'c [(&'c str, &'c str)]) -> Check<'c> {
        Check::attributes(self.domain, attributes).with_cost(self.cost).with_protocol("resp")
    }
}

fn read_cost(word: &[u8]) -> Result<Cost, CommandError> {
    match frame::integer(word).map(u64::try_from) {
        Some(Ok(units)) => Ok(Cost::new(units)),
        _ => Err(CommandError::new("COST must be a whole number, 0 or more")),
    }
}

/// The reply to a check: the five numbers of `CL.THROTTLE` for the limit nearest exhaustion, then the other facts that
/// clients act on.
struct CheckReply<'a> {
    limited: bool,
    limit: i64,
    remaining: i64,
    retry_after: i64,
    reset_after: i64,
    rule: Option<&'a str>,
    delay_ms: i64,
    origin: &'static str,
}

impl<'a> CheckReply<'a> {
    fn from_decision(decision: &'a Decision) -> Self {
        let mut reply = Self {
            limited: !decision.is_allowed(),
            limit: -1,
            remaining: -1,
            retry_after: decision.retry_after().map_or(-1, encode::seconds),
            reset_after: 0,
            rule: decision.denied_by_name(),
            delay_ms: encode::as_i64(decision.delay().ceil_millis()),
            origin: decision.origin.name(),
        };
        if let Some(status) = decision.denying_limit().or_else(|| decision.tightest(0)) {
            reply.rule = reply.rule.or_else(|| Some(decision.limit_name(status)));
            reply.remaining = encode::as_i64(status.outcome.remaining);
            reply.reset_after = encode::seconds(status.outcome.reset_after);
            if let Some(facts) = decision.limit(status) {
                reply.limit = encode::as_i64(facts.limit.capacity());
            }
        }
        reply
    }
}

pub(super) fn reply(out: &mut Vec<u8>, protocol: Protocol, decision: &Decision, last_field: LastField) {
    let reply = CheckReply::from_decision(decision);
    let numbers = [
        ("limited", i64::from(reply.limited)),
        ("limit", reply.limit),
        ("remaining", reply.remaining),
        ("retry_after", reply.retry_after),
        ("reset_after", reply.reset_after),
    ];
    let name = |out: &mut Vec<u8>, name: &str| {
        if protocol == Protocol::Resp3 {
            encode::bulk(out, name.as_bytes());
        }
    };
    let has_reason = protocol == Protocol::Resp3 || last_field == LastField::Reason;
    match protocol {
        Protocol::Resp2 => encode::array(out, 9 + usize::from(has_reason)),
        Protocol::Resp3 => encode::map(out, protocol, 10),
    }
    for (key, number) in numbers {
        name(out, key);
        encode::integer(out, number);
    }
    name(out, "rule");
    match reply.rule {
        Some(rule) => encode::bulk(out, rule.as_bytes()),
        None => encode::null(out, protocol),
    }
    name(out, "delay_ms");
    encode::integer(out, reply.delay_ms);
    name(out, "origin");
    encode::bulk(out, reply.origin.as_bytes());
    // Only for denials: allowed requests are rarely looked up, and formatting the ID costs as much as the rest.
    name(out, "decision_id");
    if reply.limited {
        encode::bulk(out, decision.id().to_string().as_bytes());
    } else {
        encode::null(out, protocol);
    }
    if has_reason {
        name(out, "reason");
        match &decision.reason {
            Some(reason) => encode::bulk(out, reason.as_bytes()),
            None => encode::null(out, protocol),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(Vec<String>, Cost), String> {
        let words: Vec<&[u8]> = text.split(' ').map(str::as_bytes).collect();
        let command = CheckCommand::parse(&words).expect("a command").map_err(|error| error.message)?;
        Ok((command.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect(), command.cost))
    }

    #[test]
    fn long_and_unreadable_values_are_replaced_and_not_rejected() {
        let long = vec![b'x'; 9_000];
        let words: [&[u8]; 6] = [b"TG.CHECK", b"d", b"a", &long, b"b", b"caf\xe9"];
        let command = CheckCommand::parse(&words).expect("a check").expect("valid");
        let attributes = command.attributes();
        assert!(attributes[0].1.len() <= value::MAX_VALUE && attributes[0].1.contains("sha256:"));
        assert!(attributes[1].1.starts_with("caf…sha256:"), "{}", attributes[1].1);
    }

    #[test]
    fn attributes_and_cost_are_parsed() {
        let list = |pairs: &[&str]| pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>();
        assert_eq!(read("TG.CHECK d k v"), Ok((list(&["k=v"]), Cost::ONE)));
        assert_eq!(read("tg.check d k v cost 5"), Ok((list(&["k=v"]), Cost::new(5))));
        assert_eq!(read("TG.PEEK d k v"), Ok((list(&["k=v"]), Cost::PEEK)));
        // Alone or not at the end, `cost` is an ordinary attribute.
        assert_eq!(read("TG.CHECK d cost 5"), Ok((list(&["cost=5"]), Cost::ONE)));
        let both = list(&["cost=5", "k=v"]);
        assert_eq!(read("TG.CHECK d cost 5 k v"), Ok((both, Cost::ONE)));
        assert_eq!(read("TG.CHECK d k v withreason"), Ok((list(&["k=v"]), Cost::ONE)));
        assert_eq!(read("TG.CHECK d k v COST 5 WITHREASON"), Ok((list(&["k=v"]), Cost::new(5))));
        assert_eq!(read("TG.PEEK d k v WITHREASON"), Ok((list(&["k=v"]), Cost::PEEK)));
        // A pair of that name is an ordinary attribute, too.
        assert_eq!(read("TG.CHECK d k v WITHREASON x"), Ok((list(&["k=v", "WITHREASON=x"]), Cost::ONE)));
        assert_eq!(
            read("TG.CHECK d WITHREASON WITHREASON"),
            Ok((list(&["WITHREASON=WITHREASON"]), Cost::ONE))
        );
    }

    #[test]
    fn invalid_checks_are_rejected() {
        let many: String = (0..65).map(|n| format!(" k{n} v")).collect();
        for (wrong, message) in [
            ("TG.CHECK", "wrong number"),
            ("TG.CHECK d", "wrong number"),
            ("TG.CHECK d k", "wrong number"),
            ("TG.CHECK d k v w", "wrong number"),
            ("TG.CHECK d WITHREASON", "wrong number"),
            ("TG.CHECK d k v WITHREASON COST 5", "wrong number"),
            ("TG.CHECK  k v", "domain"),
            ("TG.CHECK d k v k w", "duplicate attribute 'k'"),
            ("TG.CHECK d k v COST -1", "COST"),
            ("TG.CHECK d k v COST x", "COST"),
            ("TG.PEEK d k v COST 1", "no COST"),
            (&format!("TG.CHECK d{many}"), "at most 64"),
        ] {
            let error = read(wrong).expect_err(wrong);
            assert!(error.contains(message), "{wrong}: {error}");
        }
        let words: [&[u8]; 4] = [b"TG.CHECK", b"\xff", b"k", b"v"];
        assert!(
            CheckCommand::parse(&words).expect("a command").expect_err("no text").message.contains("UTF-8")
        );
    }
}
