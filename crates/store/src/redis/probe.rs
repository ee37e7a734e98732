//! Startup probe of the configured servers: whether each can be reached, and if not, at which step it fails.
//!
//! A node starts without Redis, because its rules say what happens then; but a wrong address or password should be seen
//! when the server starts, not with the first denied request. The probe uses connections of its own and never the
//! breaker's: it must not count as traffic.

use super::config::{Kind, RedisConfig};
use super::shard::open;
use std::time::Duration;

/// Timeout of probing one server.
const TIMEOUT: Duration = Duration::from_secs(2);

impl RedisConfig {
    /// Returns the address of the store without credentials.
    ///
    /// ```
    /// use tollgate_store::RedisConfig;
    /// let config = RedisConfig::parse("rediss+sentinel://u:secret@a,b:7000/primary/3")?;
    /// assert_eq!(config.address_for_display(), "rediss+sentinel://a:26379,b:7000/primary");
    /// # Ok::<(), tollgate_store::RedisConfigError>(())
    /// ```
    #[must_use]
    pub fn address_for_display(&self) -> String {
        let tls = if self.uses_tls() { "s" } else { "" };
        let (kind, path) = match self.kind {
            Kind::Single => ("", String::new()),
            Kind::Sentinel => ("+sentinel", format!("/{}", self.primary)),
            Kind::Cluster => ("+cluster", String::new()),
        };
        let hosts: Vec<String> = self.hosts.iter().map(|(host, port)| shown(host, *port)).collect();
        format!("redis{tls}{kind}://{}{path}", hosts.join(","))
    }

    /// Connects to each configured server. Returns the addresses of those that fail, with the reason.
    pub async fn probe(&self) -> Vec<(String, String)> {
        let mut failed = Vec::new();
        for (host, port) in &self.hosts {
            if let Err(reason) = self.probe_one(host, *port).await {
                failed.push((shown(host, *port), reason));
            }
        }
        failed
    }

    async fn probe_one(&self, host: &str, port: u16) -> Result<(), String> {
        let ping = async {
            let info = match self.kind {
                Kind::Sentinel => self.sentinel_info(host, port)?,
                Kind::Single | Kind::Cluster => self.connection_info(host, port)?,
            };
            let mut connection = open(info).await?;
            redis::cmd("PING").query_async::<()>(&mut connection).await
        };
        match tokio::time::timeout(TIMEOUT, ping).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(reason(&error)),
            Err(_) => {
                Err(format!("no response within {} s; check the address and firewalls", TIMEOUT.as_secs()))
            }
        }
    }
}

fn shown(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns why a connection failed and what to check.
fn reason(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let is_denied = matches!(error.code(), Some("WRONGPASS" | "NOAUTH" | "NOPERM"));
    let advice = if error.kind() == redis::ErrorKind::AuthenticationFailed || is_denied {
        "authentication failed; check the password (--store-password-file, TOLLGATE_STORE_PASSWORD)"
    } else if error.is_connection_refusal() {
        "connection refused; is Redis running there?"
    } else if text.contains("lookup") || text.contains("resolve") {
        "the host name cannot be resolved; check it"
    } else if text.contains("ertificate") || text.contains("InvalidContentType") || text.contains("tls") {
        "TLS failed; use rediss:// only for a server with TLS and a trusted certificate"
    } else {
        return text;
    };
    advice.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn reason_of(address: &str) -> String {
        let failed = RedisConfig::parse(address).expect("an address").probe().await;
        failed.into_iter().map(|(_, reason)| reason).collect()
    }

    /// An operator must know whether the address, the name or the transport is wrong.
    #[tokio::test]
    async fn the_failing_step_is_named() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
        let refused = reason_of(&format!("redis://:geheim@{free}")).await;
        assert!(refused.starts_with("connection refused") && !refused.contains("geheim"), "{refused}");
        let unknown = reason_of("redis://no-such-host.invalid").await;
        assert!(unknown.contains("cannot be resolved"), "{unknown}");
    }

    /// A server without TLS, and one that wants a password.
    #[tokio::test]
    async fn transport_and_password_are_told_apart() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut buffer = [0; 1024];
                    while client.read(&mut buffer).await.is_ok_and(|read| read > 0) {
                        // One reply per command of the handshake.
                        let reply = "-WRONGPASS invalid username-password pair\r\n".repeat(2);
                        if client.write_all(reply.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        let denied = reason_of(&format!("redis://:wrong@{address}")).await;
        assert!(denied.starts_with("authentication failed"), "{denied}");
        let plain = reason_of(&format!("rediss://{address}")).await;
        assert!(plain.starts_with("TLS failed"), "{plain}");
    }
}
