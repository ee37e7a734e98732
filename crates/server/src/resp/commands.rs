//! The list of commands, as `COMMAND` tells it: `redis-cli` completes names by it, and clients ask it on connecting.

use super::encode::{self, Protocol};
use super::{CommandError, frame::MAX_WORDS};

/// A command: its name, how many words it has (at least, if negative), what it does.
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
    command("auth", -2, "connection", "Gives the password."),
    command(
        "cl.throttle",
        -5,
        "rate limit",
        "key max_burst count period [quantity]: charges a limit given here.",
    ),
    command("client", -2, "connection", "SETINFO, SETNAME, GETNAME, ID."),
    command("command", -1, "server", "Tells what commands there are: COUNT, DOCS, INFO, LIST."),
    command("echo", 2, "connection", "Sends its argument back."),
    command("hello", -1, "connection", "Chooses RESP 2 or 3."),
    command("info", -1, "server", "Says what is running."),
    command("ping", -1, "connection", "Answers PONG."),
    command("quit", -1, "connection", "Closes the connection."),
    command("select", 2, "connection", "There is one database, 0."),
    command("tg.check", -4, "rate limit", "domain key value [key value ...] [COST n]: decides by the rules."),
    command("tg.peek", -4, "rate limit", "domain key value [key value ...]: the same, charging nothing."),
];

const _: () = assert!(ALL.len() < MAX_WORDS);

/// `COMMAND` and what may follow it.
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
            let told =
                ALL.iter().filter(|command| named.is_empty() || named.iter().any(|name| command.is(name)));
            encode::map(out, protocol, told.clone().count());
            told.for_each(|command| command.docs(protocol, out));
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

    /// Name, arity, flags; where its keys are: the first and last word that is one, and the step between them; and four
    /// lists that Redis 7 adds.
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
