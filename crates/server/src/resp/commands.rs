//! The command table for `COMMAND`, which `redis-cli` uses for completion and clients query when they connect.

use super::encode::{self, Protocol};
use super::{CommandError, frame::MAX_WORDS};

/// A command. `arity` is the number of words including the name, or the negated minimum.
struct Command {
    name: &'static str,
    arity: i64,
    group: &'static str,
    summary: &'static str,
}

const fn command(name: &'static str, arity: i64, group: &'static str, summary: &'static str) -> Command {
    Command { name, arity, group, summary }
}

const ALL: [Command; 12] = [
    command("auth", -2, "connection", "Authenticates the connection."),
    command(
        "cl.throttle",
        -5,
        "rate limit",
        "key max_burst count period [quantity]: charges an inline limit.",
    ),
    command("client", -2, "connection", "SETINFO, SETNAME, GETNAME, ID."),
    command("command", -1, "server", "Describes the commands: COUNT, DOCS, INFO, LIST."),
    command("echo", 2, "connection", "Returns its argument."),
    command("hello", -1, "connection", "Switches to RESP 2 or 3."),
    command("info", -1, "server", "Returns the server's name and version."),
    command("ping", -1, "connection", "Returns PONG."),
    command("quit", -1, "connection", "Closes the connection."),
    command("select", 2, "connection", "Selects the database; only 0 exists."),
    command(
        "tg.check",
        -4,
        "rate limit",
        "domain key value [key value ...] [COST n] [WITHREASON]: checks the rules.",
    ),
    command(
        "tg.peek",
        -4,
        "rate limit",
        "domain key value [key value ...] [WITHREASON]: checks without charging.",
    ),
];

const _: () = assert!(ALL.len() < MAX_WORDS);

/// Replies to `COMMAND` and its subcommands.
pub(super) fn reply(words: &[&[u8]], protocol: Protocol, out: &mut Vec<u8>) -> Result<(), CommandError> {
    let Some(sub) = words.get(1) else {
        encode::array(out, ALL.len());
        ALL.iter().for_each(|command| command.info(out));
        return Ok(());
    };
    let named = &words[2..];
    match sub.to_ascii_uppercase().as_slice() {
        b"COUNT" if named.is_empty() => encode::integer(out, encode::as_i64(ALL.len() as u64)),
        b"LIST" if named.is_empty() => {
            encode::array(out, ALL.len());
            ALL.iter().for_each(|command| encode::bulk(out, command.name.as_bytes()));
        }
        b"INFO" => {
            let all = if named.is_empty() { ALL.len() } else { named.len() };
            encode::array(out, all);
            if named.is_empty() {
                ALL.iter().for_each(|command| command.info(out));
            }
            for name in named {
                match Command::find(name) {
                    Some(command) => command.info(out),
                    None => encode::null(out, protocol),
                }
            }
        }
        b"DOCS" => {
            let selected =
                ALL.iter().filter(|command| named.is_empty() || named.iter().any(|name| command.is(name)));
            encode::map(out, protocol, selected.clone().count());
            selected.for_each(|command| command.docs(protocol, out));
        }
        _ => return Err(CommandError::new("COMMAND takes COUNT, DOCS, INFO, LIST or nothing")),
    }
    Ok(())
}

impl Command {
    fn is(&self, name: &[u8]) -> bool {
        self.name.as_bytes().eq_ignore_ascii_case(name)
    }

    fn find(name: &[u8]) -> Option<&'static Self> {
        ALL.iter().find(|command| command.is(name))
    }

    /// Writes name, arity, flags, the key positions (first, last, step), and four lists that Redis 7 adds.
    fn info(&self, out: &mut Vec<u8>) {
        encode::array(out, 10);
        encode::bulk(out, self.name.as_bytes());
        encode::integer(out, self.arity);
        encode::array(out, 1);
        encode::simple(out, "fast");
        let key = i64::from(self.name == "cl.throttle");
        for _ in 0..3 {
            encode::integer(out, key);
        }
        for _ in 0..4 {
            encode::array(out, 0);
        }
    }

    fn docs(&self, protocol: Protocol, out: &mut Vec<u8>) {
        encode::bulk(out, self.name.as_bytes());
        encode::map(out, protocol, 3);
        for (key, value) in [("summary", self.summary), ("since", "0.1.0"), ("group", self.group)] {
            encode::bulk(out, key.as_bytes());
            encode::bulk(out, value.as_bytes());
        }
    }
}
