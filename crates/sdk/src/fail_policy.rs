//! What the clients of a server share: the fail policy, and what is wrong with their settings.

use std::path::PathBuf;

/// What happens to requests while the server is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailPolicy {
    /// They are allowed.
    #[default]
    Open,
    /// They are rejected with 503.
    Closed,
}

/// Invalid settings of a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// An invalid address.
    #[error(
        "invalid server address `{0}`; write one such as http://127.0.0.1:8081 or https://tollgate.internal:8443"
    )]
    Address(String),
    /// Trusted authorities that cannot be loaded.
    #[error("{}: {wrong}", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        wrong: String,
    },
    /// A token that no header field can contain.
    #[error("the token has characters that no token has")]
    Token,
    /// TLS cannot be configured.
    #[error("cannot configure TLS: {0}")]
    Tls(String),
}
