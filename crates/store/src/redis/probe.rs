//! Probes: whether a server can be used, and if not, at which step it fails.
//!
//! A server that answers may still refuse to work: a replica, a full one, one whose user lacks rights. So a probe charges
//! a counter of its own by the script that decides most checks, which needs the same rights and writes as they do. `PING`
//! or `DEL` were rejected: they succeed on a full server, and the breaker would open and close in turn.
//!
//! A node starts without Redis, because its rules say what happens then; but a wrong address or password should be seen
//! when the server starts, not with the first denied request. The startup probe uses connections of its own and never
//! the breaker's: it must not count as traffic.

use super::bucket_args::BucketArgs;
use super::config::{Kind, RedisConfig};
use super::key_encoding::{self, Hashing};
use super::script::Scripts;
use super::server_error::{ServerError, SettingNames};
use super::shard::{connect_to, open, primary};
use redis::aio::MultiplexedConnection;
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

    /// Returns whether the store can be used: with Sentinel the primary answers, otherwise any of the servers. A cluster
    /// is found by any of them.
    pub async fn answers(&self) -> bool {
        if self.kind == Kind::Sentinel {
            let ask = async {
                let (host, port) = primary(self).await?;
                self.charge_one(&host, port).await
            };
            return matches!(tokio::time::timeout(TIMEOUT, ask).await, Ok(Ok(())));
        }
        for (host, port) in &self.hosts {
            if self.probe_one(host, *port).await.is_ok() {
                return true;
            }
        }
        false
    }

    async fn charge_one(&self, host: &str, port: u16) -> redis::RedisResult<()> {
        let mut connection = connect_to(self, host, port).await?;
        charge_probe(&mut connection, &Scripts::new(), &self.hashing, None).await
    }

    async fn probe_one(&self, host: &str, port: u16) -> Result<(), String> {
        let ping = async {
            if self.kind == Kind::Sentinel {
                let mut connection = open(self.sentinel_info(host, port)?).await?;
                return redis::cmd("PING").query_async::<()>(&mut connection).await;
            }
            self.charge_one(host, port).await
        };
        match tokio::time::timeout(TIMEOUT, ping).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if self.kind == Kind::Sentinel => Err(reason(&error, &self.names.of_sentinels())),
            Ok(Err(error)) => Err(reason(&error, &self.names)),
            Err(_) => {
                Err(format!("no response within {} s; check the address and firewalls", TIMEOUT.as_secs()))
            }
        }
    }
}

/// Charges a counter of this probe as a check does; in a cluster, one in this slot.
pub(super) async fn charge_probe(
    connection: &mut MultiplexedConnection,
    scripts: &Scripts,
    hashing: &Hashing,
    slot: Option<u16>,
) -> redis::RedisResult<()> {
    let key = probe_key(hashing, slot);
    let ask = BucketArgs::probe();
    let script = &scripts.buckets;
    for (word, text) in [("EVALSHA", script.sha.as_str()), ("EVAL", script.text)] {
        let mut call = redis::cmd(word);
        call.arg(text).arg(1).arg(&key).arg(&ask);
        match call.query_async::<redis::Value>(connection).await {
            Err(error) if word == "EVALSHA" && error.code() == Some("NOSCRIPT") => {}
            // Another server of the cluster has this key's slot.
            Err(error) if matches!(error.code(), Some("MOVED" | "ASK" | "TRYAGAIN")) => return Ok(()),
            other => return other.map(|_| ()),
        }
    }
    Ok(())
}

/// Returns a key that is no counter's: in values `%` is escaped.
fn probe_key(hashing: &Hashing, slot: Option<u16>) -> String {
    let start = hashing.start();
    let found = slot.and_then(|slot| {
        let mut keys = (0_u32..1 << 20).map(|number| format!("{start}%{number}}}"));
        keys.find(|key| key_encoding::slot(key) == slot)
    });
    found.unwrap_or_else(|| format!("{start}%probe}}"))
}

fn shown(host: &str, port: u16) -> String {
    if host.starts_with('/') {
        return host.to_owned();
    }
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns why a connection failed and what to check.
fn reason(error: &redis::RedisError, names: &SettingNames) -> String {
    let text = error.to_string();
    if let Some(refusal) = ServerError::from_client(error) {
        let cause = if refusal.is_auth() { "authentication failed: " } else { "" };
        return format!("{cause}{refusal}; {}", refusal.advice(names));
    }
    let advice = if error.is_connection_refusal() {
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
        let free = tollgate_testing::ports::free_address();
        let refused = reason_of(&format!("redis://:geheim@{free}")).await;
        assert!(refused.starts_with("connection refused") && !refused.contains("geheim"), "{refused}");
        let unknown = reason_of("redis://no-such-host.invalid").await;
        assert!(unknown.contains("cannot be resolved"), "{unknown}");
    }

    /// A cluster with one server down works; sentinels without a primary do not.
    #[tokio::test]
    async fn a_store_answers_if_it_can_be_used() {
        let free = tollgate_testing::ports::free_address();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let up = listener.local_addr().expect("bound");
        tokio::spawn(server(listener, "+OK\r\n"));
        let answers = |address: String| async move {
            RedisConfig::parse(&address).expect("an address").answers().await
        };
        assert!(answers(format!("redis+cluster://{free},{up}")).await);
        assert!(!answers(format!("redis+cluster://{free}")).await);
        assert!(!answers(format!("redis+sentinel://{up}/main")).await, "a sentinel alone");
    }

    /// Answers each command of a client with the same reply.
    async fn server(listener: tokio::net::TcpListener, reply: &'static str) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = client.read(&mut buffer).await {
                    let commands = buffer[..read].iter().filter(|byte| **byte == b'*').count();
                    if client.write_all(reply.repeat(commands).as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    }

    /// In a cluster a probe must charge in a slot of the server that it asks.
    #[test]
    fn a_probe_has_a_key_in_every_slot() {
        for slot in [0, 1, 8_191, 16_383] {
            assert_eq!(key_encoding::slot(&probe_key(&Hashing::default(), Some(slot))), slot);
        }
    }

    /// A server without TLS, and one that wants a password.
    #[tokio::test]
    async fn transport_and_password_errors_are_distinguished() {
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
