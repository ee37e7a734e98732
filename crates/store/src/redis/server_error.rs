//! Server errors: why a Redis server refuses to work, named by the code that Redis uses, with what to do about it.
//!
//! A refusal is an answer, but not of a server that can be used: a replica, a full or loading server, a user without
//! rights. Redis names each by a code at the beginning of its message; where a script was refused, some versions put
//! their own words before it.

use redis::{ErrorKind, RedisError};
use std::fmt;

/// Codes that metrics and logs distinguish, with what to do.
const CODES: [(&str, &str); 14] = [
    (
        "READONLY",
        "this server is a replica; point {address} at the primary, or let Sentinel or Cluster name it",
    ),
    ("OOM", "its memory is full; raise its maxmemory or let it evict keys"),
    ("NOPERM", "its user lacks rights; docs/deployment/redis.md lists those it needs"),
    ("MISCONF", "it cannot save to its disk and accepts no writes; free the disk, or see its log"),
    ("MASTERDOWN", "this replica has lost its primary; see the primary and the replication"),
    ("CLUSTERDOWN", "the cluster does not serve all slots; see CLUSTER INFO"),
    ("LOADING", "it is loading its data; it recovers by itself"),
    ("NOAUTH", "it requires a password; set {password}"),
    ("WRONGPASS", "it refuses the user or password; {correction}"),
    ("NOREPLICAS", "too few replicas follow it, by its min-replicas-to-write; see the replication"),
    ("BUSY", "another client's script occupies it; see SCRIPT KILL"),
    ("TRYAGAIN", "slots are being moved; it recovers by itself"),
    ("MAXCLIENTS", "it has too many connections; raise its maxclients"),
    (OTHER, "see the server's message"),
];
const OTHER: &str = "other";

/// What the settings are called that messages advise to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingNames {
    /// The address of the server.
    pub address: &'static str,
    /// The password.
    pub password: &'static str,
    /// What to do about a wrong password.
    pub correction: &'static str,
    /// The password of the sentinels.
    pub sentinel_password: &'static str,
    /// What to do about a wrong password of the sentinels.
    pub sentinel_correction: &'static str,
    /// The longest time that a check waits.
    pub deadline: &'static str,
}

impl Default for SettingNames {
    fn default() -> Self {
        Self {
            address: "--store",
            password: "--store-password-file or TOLLGATE_STORE_PASSWORD",
            correction: "update the file of --store-password-file, which is read again",
            sentinel_password: "none at the sentinels, for which there is no setting here",
            sentinel_correction: "let the sentinels require none, for there is no setting of theirs here",
            deadline: "--store-deadline-ms",
        }
    }
}

impl SettingNames {
    /// Returns the names of the settings for connections to sentinels.
    pub(super) const fn of_sentinels(self) -> Self {
        Self { password: self.sentinel_password, correction: self.sentinel_correction, ..self }
    }
}

/// Refusals that Redis writes without their code.
const WORDS: [(&str, &str); 3] = [
    ("ACL failure in script", "NOPERM"),
    ("user executing the script can't", "NOPERM"),
    ("max number of clients", "MAXCLIENTS"),
];

/// Codes that may be gone within the deadline of a check.
const TRANSIENT: [&str; 6] = ["LOADING", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MASTERDOWN", "BUSY"];

/// A refusal of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerError {
    kind: usize,
    text: String,
}

impl ServerError {
    /// Number of codes that are distinguished.
    pub(super) const KINDS: usize = CODES.len();

    /// Creates the error that a reply with this code and these details means.
    pub(super) fn new(code: &str, details: &str) -> Self {
        let words = || details.split([' ', ':', '-']);
        let known = |name: &str| CODES.iter().position(|(code, _)| *code == name);
        let phrase = WORDS.iter().find(|(words, _)| details.contains(words));
        let kind = known(code)
            .or_else(|| phrase.and_then(|(_, code)| known(code)))
            .or_else(|| words().find_map(known));
        Self { kind: kind.unwrap_or(CODES.len() - 1), text: format!("{code} {details}").trim().to_owned() }
    }

    /// Returns the refusal in an error of the client; `None` if the server has not answered.
    pub(super) fn from_client(error: &RedisError) -> Option<Self> {
        if let Some(code) = error.code() {
            return Some(Self::new(code, error.detail().unwrap_or_default()));
        }
        // The client replaces the server's answer to the password by its own words.
        let is_auth = error.kind() == ErrorKind::AuthenticationFailed;
        is_auth.then(|| Self::new("WRONGPASS", error.detail().unwrap_or("the password was refused")))
    }

    /// Returns the name in metrics.
    pub(super) fn code(&self) -> &'static str {
        CODES[self.kind].0
    }

    /// Returns the index of the code among the names of all.
    pub(super) const fn kind(&self) -> usize {
        self.kind
    }

    /// Returns the names of all codes, in the order of their indexes.
    pub(super) fn codes() -> impl Iterator<Item = &'static str> {
        CODES.iter().map(|(code, _)| *code)
    }

    /// Returns what to do about it.
    pub(super) fn advice(&self, names: &SettingNames) -> String {
        let SettingNames { address, password, correction, .. } = names;
        let advice = CODES[self.kind].1;
        advice
            .replace("{address}", address)
            .replace("{password}", password)
            .replace("{correction}", correction)
    }

    /// Returns whether it may be gone in a moment.
    pub(super) fn is_transient(&self) -> bool {
        TRANSIENT.contains(&self.code())
    }

    /// Returns whether it is about who connects.
    pub(super) fn is_auth(&self) -> bool {
        matches!(self.code(), "NOAUTH" | "WRONGPASS")
    }

    /// Returns whether the code is one of them.
    pub(super) fn is_known(&self) -> bool {
        self.code() != OTHER
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if self.is_known() && !self.text.contains(self.code()) {
            write!(f, " ({})", self.code())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Advice that names a setting which the program lacks cannot be followed.
    #[test]
    fn advice_names_the_settings_of_the_program() {
        let names = SettingNames {
            address: "REDIS_URL",
            password: "REDIS_AUTH",
            correction: "correct REDIS_AUTH",
            sentinel_password: "REDIS_SENTINEL_AUTH",
            sentinel_correction: "correct REDIS_SENTINEL_AUTH",
            deadline: "TOLLGATE_STORE_DEADLINE_MS",
        };
        for (code, named) in
            [("READONLY", "REDIS_URL"), ("NOAUTH", "REDIS_AUTH"), ("WRONGPASS", "REDIS_AUTH")]
        {
            let error = ServerError::new(code, "");
            let advice = error.advice(&names);
            assert!(advice.contains(named) && !advice.contains("--") && !advice.contains('{'), "{advice}");
            assert!(error.advice(&SettingNames::default()).contains("--store"));
        }
        for code in ["NOAUTH", "WRONGPASS"] {
            let error = ServerError::new(code, "");
            assert!(error.advice(&names.of_sentinels()).contains("REDIS_SENTINEL_AUTH"));
            let advice = error.advice(&SettingNames::default().of_sentinels());
            assert!(advice.contains("sentinels") && !advice.contains("--"), "{advice}");
        }
    }

    /// An operator who reads `other`, or takes a refusal for a damaged key, looks in the wrong place.
    #[test]
    fn codes_are_found_as_redis_6_and_7_write_them() {
        for (code, details, expected) in [
            ("OOM", "command not allowed when used memory > 'maxmemory'.", "OOM"),
            ("ERR", "Error running script (call to f_1): @user_script:3: -OOM command not allowed", "OOM"),
            (
                "READONLY",
                "You can't write against a read only replica. script: 1, on @user_script:3.",
                "READONLY",
            ),
            ("ERR", "ACL failure in script: User gate has no permissions to run the 'set' command", "NOPERM"),
            ("ERR", "The user executing the script can't run this command or subcommand script: 1", "NOPERM"),
            ("NOPERM", "User gate has no permissions to run the 'evalsha' command", "NOPERM"),
            ("MISCONF", "Redis is configured to save RDB snapshots", "MISCONF"),
            ("ERR", "max number of clients reached", "MAXCLIENTS"),
            ("ERR", "something else", "other"),
        ] {
            let error = ServerError::new(code, details);
            assert_eq!(error.code(), expected, "{code} {details}");
            assert!(error.to_string().contains(if expected == "other" { "something" } else { expected }));
        }
    }
}
