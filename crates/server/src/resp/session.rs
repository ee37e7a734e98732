//! Session state of a connection, and the commands about it: `HELLO`, `AUTH`, `CLIENT`, `PING` and others.

use super::encode::{self, Protocol};
use super::{CommandError, RespConfig, commands, frame};
use subtle::ConstantTimeEq;

/// Number of wrong passwords after which a connection is closed.
const MAX_AUTH_FAILURES: u8 = 10;
/// Maximum length of a client name in bytes.
const MAX_NAME: usize = 256;

/// The state of one connection that its commands change.
pub(super) struct Session {
    pub(super) protocol: Protocol,
    pub(super) is_authenticated: bool,
    /// Number of decisions since they were last recorded.
    pub(super) decided: u64,
    wrong_passwords: u8,
    id: u64,
    name: Box<[u8]>,
}

/// What happens to the connection after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextState {
    KeepOpen,
    Close,
}

impl Session {
    pub(super) fn new(id: u64, config: &RespConfig) -> Self {
        Self {
            protocol: Protocol::Resp2,
            is_authenticated: config.password.is_none(),
            decided: 0,
            wrong_passwords: 0,
            id,
            name: Box::default(),
        }
    }

    /// Runs a command that uses no counters.
    pub(super) fn run(&mut self, config: &RespConfig, words: &[&[u8]], out: &mut Vec<u8>) -> NextState {
        let name = words.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
        let result = match name.as_slice() {
            b"QUIT" => {
                encode::ok(out);
                return NextState::Close;
            }
            b"AUTH" => self.auth(config, &words[1..], out),
            b"HELLO" => self.hello(config, &words[1..], out),
            b"RESET" => {
                *self = Self { decided: self.decided, ..Self::new(self.id, config) };
                encode::simple(out, "RESET");
                Ok(())
            }
            _ if !self.is_authenticated => Err(CommandError::with_code("NOAUTH", "Authentication required.")),
            b"PING" => ping(&words[1..], out),
            b"ECHO" => echo(&words[1..], out),
            b"SELECT" => select(&words[1..], out),
            b"CLIENT" => self.client(&words[1..], out),
            b"COMMAND" => commands::reply(words, self.protocol, out),
            b"INFO" => {
                info(out);
                Ok(())
            }
            _ => Err(unknown(words)),
        };
        if let Err(error) = result {
            error.write(out);
        }
        if self.wrong_passwords >= MAX_AUTH_FAILURES { NextState::Close } else { NextState::KeepOpen }
    }

    fn auth(&mut self, config: &RespConfig, words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
        match *words {
            [password] => self.authenticate(config, b"default", password)?,
            [user, password] => self.authenticate(config, user, password)?,
            _ => return Err(CommandError::wrong_number("auth")),
        }
        encode::ok(out);
        Ok(())
    }

    fn authenticate(
        &mut self,
        config: &RespConfig,
        user: &[u8],
        password: &[u8],
    ) -> Result<(), CommandError> {
        let Some(expected) = &config.password else {
            return Err(CommandError::new(
                "AUTH called without any password configured for the default user; omit AUTH or configure a password",
            ));
        };
        // The user name is not secret, so it is not compared in constant time.
        if user == b"default" && bool::from(expected.as_bytes().ct_eq(password)) {
            self.is_authenticated = true;
            self.wrong_passwords = 0;
            return Ok(());
        }
        self.wrong_passwords += 1;
        Err(CommandError::with_code("WRONGPASS", "invalid username-password pair or user is disabled."))
    }

    /// Runs `HELLO [version [AUTH user password] [SETNAME name]]`. All options take effect, or none.
    fn hello(&mut self, config: &RespConfig, words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
        let mut protocol = self.protocol;
        let (mut login, mut name) = (None, None);
        if let [version, options @ ..] = words {
            protocol = match frame::integer(version) {
                Some(2) => Protocol::Resp2,
                Some(3) => Protocol::Resp3,
                Some(_) => return Err(CommandError::with_code("NOPROTO", "unsupported protocol version")),
                None => return Err(CommandError::new("Protocol version is not an integer or out of range")),
            };
            let mut rest = options;
            loop {
                match *rest {
                    [] => break,
                    [word, user, password, ref more @ ..] if word.eq_ignore_ascii_case(b"AUTH") => {
                        (login, rest) = (Some((user, password)), more);
                    }
                    [word, wanted, ref more @ ..] if word.eq_ignore_ascii_case(b"SETNAME") => {
                        (name, rest) = (Some(checked_name(wanted)?), more);
                    }
                    _ => return Err(CommandError::new("Syntax error in HELLO option")),
                }
            }
        }
        if let Some((user, password)) = login {
            self.authenticate(config, user, password)?;
        }
        if !self.is_authenticated {
            let message = "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used";
            return Err(CommandError::with_code("NOAUTH", message));
        }
        self.protocol = protocol;
        if let Some(name) = name {
            self.name = name.into();
        }
        self.write_hello(out);
        Ok(())
    }

    fn write_hello(&self, out: &mut Vec<u8>) {
        let version = match self.protocol {
            Protocol::Resp2 => 2,
            Protocol::Resp3 => 3,
        };
        encode::map(out, self.protocol, 7);
        let text = |out: &mut Vec<u8>, key: &str, value: &str| {
            encode::bulk(out, key.as_bytes());
            encode::bulk(out, value.as_bytes());
        };
        text(out, "server", "tollgate");
        text(out, "version", env!("CARGO_PKG_VERSION"));
        encode::bulk(out, b"proto");
        encode::integer(out, version);
        encode::bulk(out, b"id");
        encode::integer(out, encode::as_i64(self.id));
        text(out, "mode", "standalone");
        text(out, "role", "master");
        encode::bulk(out, b"modules");
        encode::array(out, 0);
    }

    fn client(&mut self, words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
        let Some(sub) = words.first() else { return Err(CommandError::wrong_number("client")) };
        match (sub.to_ascii_uppercase().as_slice(), &words[1..]) {
            (b"SETNAME", [name]) => {
                self.name = checked_name(name)?.into();
                encode::ok(out);
            }
            (b"GETNAME", []) if self.name.is_empty() => encode::null(out, self.protocol),
            (b"GETNAME", []) => encode::bulk(out, &self.name),
            (b"ID", []) => encode::integer(out, encode::as_i64(self.id)),
            // The name of the client library, and hints that have no meaning here: accepted and ignored.
            (b"SETINFO", [_, _]) | (b"NO-EVICT" | b"NO-TOUCH", [_]) => encode::ok(out),
            _ => return Err(CommandError::new("CLIENT takes SETINFO, SETNAME, GETNAME or ID")),
        }
        Ok(())
    }
}

fn checked_name(name: &[u8]) -> Result<&[u8], CommandError> {
    if name.len() > MAX_NAME || !name.iter().all(u8::is_ascii_graphic) {
        let message = format!(
            "Client names cannot contain spaces, newlines or special characters, and have at most {MAX_NAME} bytes"
        );
        return Err(CommandError::new(message));
    }
    Ok(name)
}

fn ping(words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
    match words {
        [] => encode::simple(out, "PONG"),
        [text] => encode::bulk(out, text),
        _ => return Err(CommandError::wrong_number("ping")),
    }
    Ok(())
}

fn echo(words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
    let [text] = words else { return Err(CommandError::wrong_number("echo")) };
    encode::bulk(out, text);
    Ok(())
}

fn select(words: &[&[u8]], out: &mut Vec<u8>) -> Result<(), CommandError> {
    let [number] = words else { return Err(CommandError::wrong_number("select")) };
    match frame::integer(number) {
        Some(0) => encode::ok(out),
        Some(_) => return Err(CommandError::new("DB index is out of range; only 0 exists")),
        None => return Err(CommandError::new("value is not an integer or out of range")),
    }
    Ok(())
}

fn info(out: &mut Vec<u8>) {
    let text = format!(
        "# Server\r\nserver_name:tollgate\r\ntollgate_version:{}\r\nredis_mode:standalone\r\n",
        env!("CARGO_PKG_VERSION")
    );
    encode::bulk(out, text.as_bytes());
}

fn unknown(words: &[&[u8]]) -> CommandError {
    let name = words.first().copied().unwrap_or_default();
    let name = String::from_utf8_lossy(&name[..name.len().min(64)]);
    CommandError::new(format!(
        "unknown command '{name}'; this is a rate limiter, use CL.THROTTLE, TG.CHECK or TG.PEEK"
    ))
}
