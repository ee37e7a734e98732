//! Subscription: one discovery stream as a state machine without I/O. A response goes in, an offer comes out; the offer
//! is accepted or refused, and the request that says so comes out.
//!
//! A new stream starts without a version and without a nonce. Management servers count versions from 1 at each start, and
//! a server that is asked for what it believes the client already has sends nothing: naming the version of an earlier
//! stream would keep its limits for as long as the new server's version is the same.

use super::proto::envoy::config::core::v3::Node;
use super::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use super::proto::google::rpc::Status;
use super::proto::ratelimit::config::ratelimit::v3::RateLimitConfig;
use prost::Message as _;

/// Type of the resources.
pub(super) const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";
/// Maximum length of the reason in a refusal, in bytes.
const MAX_REASON: usize = 4 << 10;

/// State of one stream.
#[derive(Debug)]
pub(super) struct Subscription {
    node: Node,
    /// Version of the last response of this stream that was accepted; empty before the first.
    accepted: String,
}

/// A response that must be accepted or refused.
#[derive(Debug, PartialEq)]
pub(super) struct Offer {
    pub(super) version: String,
    nonce: String,
    /// The resources, or why they cannot be read.
    pub(super) resources: Result<Vec<RateLimitConfig>, String>,
}

impl Subscription {
    pub(super) const fn new(node: Node) -> Self {
        Self { node, accepted: String::new() }
    }

    /// Returns the first request of a stream.
    pub(super) fn open(&self) -> DiscoveryRequest {
        DiscoveryRequest {
            node: Some(self.node.clone()),
            type_url: TYPE_URL.to_owned(),
            ..DiscoveryRequest::default()
        }
    }

    /// Reads a response. Returns `None` for resources of a type that was not asked for.
    pub(super) fn receive(&self, response: DiscoveryResponse) -> Option<Offer> {
        if response.type_url != TYPE_URL {
            return None;
        }
        let mut resources = Ok(Vec::with_capacity(response.resources.len()));
        for (number, any) in (1..).zip(&response.resources) {
            let decoded = match any.type_url == TYPE_URL {
                true => RateLimitConfig::decode(&*any.value).map_err(|error| error.to_string()),
                false => Err(format!("its type is `{}`", any.type_url)),
            };
            match (&mut resources, decoded) {
                (Ok(all), Ok(resource)) => all.push(resource),
                (_, Err(error)) => {
                    resources = Err(format!("resource {number} cannot be read: {error}"));
                    break;
                }
                (Err(_), Ok(_)) => {}
            }
        }
        Some(Offer { version: response.version_info, nonce: response.nonce, resources })
    }

    /// Accepts an offer. Returns the acknowledgment.
    pub(super) fn accept(&mut self, offer: Offer) -> DiscoveryRequest {
        self.accepted = offer.version;
        DiscoveryRequest { version_info: self.accepted.clone(), response_nonce: offer.nonce, ..self.open() }
    }

    /// Refuses an offer. Returns the refusal, which names the version that stays in effect.
    pub(super) fn refuse(&self, offer: Offer, reason: &str) -> DiscoveryRequest {
        let end = reason.floor_char_boundary(MAX_REASON);
        DiscoveryRequest {
            version_info: self.accepted.clone(),
            response_nonce: offer.nonce,
            error_detail: Some(Status { code: 0, message: reason[..end].to_owned() }),
            ..self.open()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost_types::Any;

    fn subscription() -> Subscription {
        Subscription::new(Node { id: "n".to_owned(), metadata: None })
    }

    fn response(version: &str, domains: &[&str]) -> DiscoveryResponse {
        let resource = |domain: &&str| {
            let config = RateLimitConfig { domain: (*domain).to_owned(), ..RateLimitConfig::default() };
            Any { type_url: TYPE_URL.to_owned(), value: config.encode_to_vec() }
        };
        DiscoveryResponse {
            version_info: version.to_owned(),
            resources: domains.iter().map(resource).collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: format!("n{version}"),
        }
    }

    /// What management servers compare byte for byte.
    #[test]
    fn requests_are_those_of_the_original_on_the_wire() {
        let mut stream = subscription();
        let head = [b"\x12\x03\x0a\x01n\x22\x41" as &[u8], TYPE_URL.as_bytes()].concat();
        assert_eq!(stream.open().encode_to_vec(), head);
        let mut answer = response("1", &[]);
        answer.nonce = "1".to_owned();
        let offer = stream.receive(answer).expect("an offer");
        let ack = [b"\x0a\x011", &head[..], b"\x2a\x011"].concat();
        assert_eq!(stream.accept(offer).encode_to_vec(), ack);
        let offer = stream.receive(response("2", &["d"])).expect("an offer");
        let nack = [b"\x0a\x011", &head[..], b"\x2a\x02n2", b"\x32\x05\x12\x03why"].concat();
        assert_eq!(stream.refuse(offer, "why").encode_to_vec(), nack);
    }

    #[test]
    fn an_empty_list_is_an_offer() {
        let offer = subscription().receive(response("7", &[])).expect("an offer");
        assert_eq!((offer.version.as_str(), offer.resources), ("7", Ok(Vec::new())));
    }

    /// Otherwise a restarted server that reaches an old number would never send its rules.
    #[test]
    fn a_refusal_names_no_version_of_an_earlier_stream() {
        let mut first = subscription();
        let offer = first.receive(response("3", &["d"])).expect("an offer");
        first.accept(offer);
        let second = subscription();
        assert_eq!((second.open().version_info, second.open().response_nonce), Default::default());
        let offer = second.receive(response("1", &["d"])).expect("an offer");
        let refusal = second.refuse(offer, "bad");
        assert_eq!((refusal.version_info.as_str(), refusal.response_nonce.as_str()), ("", "n1"));
    }

    #[test]
    fn one_unreadable_resource_refuses_all() {
        let mut broken = response("2", &["a", "b"]);
        broken.resources[1].value = vec![0xff];
        let offer = subscription().receive(broken).expect("an offer");
        let reason = offer.resources.expect_err("unreadable");
        assert!(reason.starts_with("resource 2 cannot be read: "), "{reason}");
        let mut other = response("2", &["a"]);
        other.resources[0].type_url = "type.googleapis.com/x".to_owned();
        let reason = subscription().receive(other).and_then(|offer| offer.resources.err());
        assert_eq!(reason.as_deref(), Some("resource 1 cannot be read: its type is `type.googleapis.com/x`"));
    }

    #[test]
    fn other_types_are_not_answered() {
        let other = DiscoveryResponse { type_url: "other".to_owned(), ..response("1", &[]) };
        assert_eq!(subscription().receive(other), None);
    }

    #[test]
    fn a_reason_has_a_bound() {
        let stream = subscription();
        let offer = stream.receive(response("1", &[])).expect("an offer");
        let sent = stream.refuse(offer, &"é".repeat(MAX_REASON)).error_detail.expect("a reason");
        assert_eq!(sent.message.len(), MAX_REASON);
    }
}
