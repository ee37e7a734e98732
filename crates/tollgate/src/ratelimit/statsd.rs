//! The statsd sink: counters as differences and gauges as they are, at every interval and once more at the end. Over TCP, as
//! envoyproxy/ratelimit sends them, or to DogStatsD in datagrams.

use super::Service;
use super::metrics::Sample;
use super::service::{Statsd, StatsdProtocol};
use crate::server::status::ServerStatus;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};

/// Longest time to connect or to send.
const TIMEOUT: Duration = Duration::from_secs(2);
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// Largest datagram: what an Ethernet frame carries, as DogStatsD's own clients have it.
const DATAGRAM: usize = 1_432;

/// Where the tags of a line are.
#[derive(Default)]
struct Tags {
    after_name: String,
    after_value: String,
}

/// Sends until `drain` resolves.
pub(crate) async fn run(
    target: Statsd,
    service: Arc<Service>,
    status: Arc<ServerStatus>,
    drain: impl Future<Output = ()> + Send,
) {
    let mut sender = Sender { target, sent: HashMap::new(), timed: (0, 0), stream: None, has_failed: false };
    let mut drain = std::pin::pin!(drain);
    loop {
        let ended = tokio::select! {
            () = &mut drain => true,
            () = tokio::time::sleep(sender.target.interval.max(MIN_INTERVAL)) => false,
        };
        let tags = match sender.target.protocol {
            StatsdProtocol::Statsd => Tags { after_name: service.metrics.tag_suffix(), ..Tags::default() },
            StatsdProtocol::DogStatsd => Tags { after_value: service.metrics.dog_tags(), ..Tags::default() },
        };
        let mut lines = sender.lines(&service.metrics.samples(&status), &tags);
        lines += &sender.call_time(service.metrics.call_times(), &tags);
        sender.send(&lines).await;
        if ended {
            return;
        }
    }
}

struct Sender {
    target: Statsd,
    /// What has been sent of each counter.
    sent: HashMap<String, u64>,
    /// Number of calls whose time has been sent, and that time in microseconds.
    timed: (u64, u64),
    stream: Option<TcpStream>,
    has_failed: bool,
}

impl Sender {
    fn lines(&mut self, samples: &[Sample], tags: &Tags) -> String {
        let Tags { after_name, after_value } = tags;
        let mut lines = String::new();
        // Without the counters of rules that are gone.
        let sent = std::mem::take(&mut self.sent);
        for Sample { name, value, is_gauge } in samples {
            if *is_gauge {
                let _ = writeln!(lines, "{name}{after_name}:{value}|g{after_value}");
                continue;
            }
            // Less than before is the counter of a rule that has come anew.
            let before = sent.get(name).copied().filter(|before| before <= value).unwrap_or_default();
            self.sent.insert(name.clone(), *value);
            if *value > before {
                let _ = writeln!(lines, "{name}{after_name}:{}|c{after_value}", value - before);
            }
        }
        lines
    }

    /// Returns the mean time of the calls since the last one, weighted by their number through the sample rate.
    fn call_time(&mut self, (calls, micros): (u64, u64), tags: &Tags) -> String {
        let before = std::mem::replace(&mut self.timed, (calls, micros));
        let (calls, micros) = (calls.saturating_sub(before.0), micros.saturating_sub(before.1));
        if calls == 0 {
            return String::new();
        }
        let (mean, rate) = (micros as f64 / calls as f64 / 1_000.0, 1.0 / calls as f64);
        let Tags { after_name, after_value } = tags;
        format!(
            "ratelimit_server.ShouldRateLimit.response_time{after_name}:{mean:.3}|ms|@{rate:.6}{after_value}\n"
        )
    }

    /// Sends lines; what cannot be sent is lost, as with any statsd. Says so once until it works again.
    async fn send(&mut self, lines: &str) {
        let sent = tokio::time::timeout(TIMEOUT, self.try_send(lines)).await;
        let sent = sent.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        match sent {
            Ok(()) => self.has_failed = false,
            Err(error) => {
                self.stream = None;
                if !std::mem::replace(&mut self.has_failed, true) {
                    let Statsd { host, port, .. } = &self.target;
                    tracing::warn!(%error, "cannot send stats to statsd at {host}:{port}; set USE_STATSD=false if there is none");
                }
            }
        }
    }

    async fn try_send(&mut self, lines: &str) -> std::io::Result<()> {
        if self.target.protocol == StatsdProtocol::DogStatsd {
            return self.send_datagrams(lines).await;
        }
        let stream = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert(TcpStream::connect((self.target.host.as_str(), self.target.port)).await?),
        };
        stream.write_all(lines.as_bytes()).await
    }

    async fn send_datagrams(&self, lines: &str) -> std::io::Result<()> {
        let mut last = Err(std::io::ErrorKind::NotFound.into());
        for address in tokio::net::lookup_host((self.target.host.as_str(), self.target.port)).await? {
            let any: std::net::IpAddr = match address {
                std::net::SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                std::net::SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0)).await?;
            last = socket.connect(address).await;
            if last.is_ok() {
                for datagram in datagrams(lines) {
                    socket.send(datagram.as_bytes()).await?;
                }
                break;
            }
        }
        last
    }
}

/// Cuts lines into datagrams, each of whole lines.
fn datagrams(mut lines: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let mut end = 0;
        for line in lines.split_inclusive('\n') {
            if end > 0 && end + line.len() > DATAGRAM {
                break;
            }
            end += line.len();
        }
        let (datagram, rest) = lines.split_at(end);
        lines = rest;
        (end > 0).then_some(datagram)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_sent_as_differences() {
        let protocol = StatsdProtocol::Statsd;
        let target = Statsd { protocol, host: String::new(), port: 0, interval: Duration::ZERO };
        let none = &Tags::default();
        let test = &Tags { after_name: ".__env=test".to_owned(), after_value: "|#env:test".to_owned() };
        let mut sender =
            Sender { target, sent: HashMap::new(), timed: (0, 0), stream: None, has_failed: false };
        let sample = |value, is_gauge| [Sample { name: "a.b".to_owned(), value, is_gauge }];
        assert_eq!(sender.lines(&sample(3, false), test), "a.b.__env=test:3|c|#env:test\n");
        assert_eq!(sender.lines(&sample(3, false), none), "");
        assert_eq!(sender.lines(&sample(5, false), none), "a.b:2|c\n");
        assert_eq!(sender.lines(&sample(2, false), none), "a.b:2|c\n", "it began anew");
        assert_eq!(sender.lines(&sample(5, true), none), "a.b:5|g\n");
        let time = "ratelimit_server.ShouldRateLimit.response_time:1.500|ms|@0.500000\n";
        assert_eq!(sender.call_time((2, 3_000), none), time);
        assert_eq!(sender.call_time((2, 3_000), none), "");
    }

    /// A line that is cut counts something else.
    #[test]
    fn datagrams_have_whole_lines_and_a_bound() {
        let lines: String = (0..200).map(|n| format!("ratelimit.service.rate_limit.{n}:1|c\n")).collect();
        let all: Vec<&str> = datagrams(&lines).collect();
        assert_eq!(all.concat(), lines);
        assert!(all.len() > 1 && all.iter().all(|one| one.len() <= DATAGRAM && one.ends_with('\n')));
        assert_eq!(datagrams("").count(), 0);
    }
}
