//! The head of a request that a program has received. The server identifies the caller by it, with the settings of the
//! gateway (`clients/conformance/README.md`, section Request heads).

use http::request::Parts;
use serde::Serialize;
use std::net::IpAddr;

/// The head of a received request.
///
/// ```
/// use tollgate_sdk::RequestHead;
/// let (parts, ()) = http::Request::get("/orders?page=2").header("x-api-key", "abc").body(()).unwrap().into_parts();
/// let head = RequestHead::new("192.0.2.7".parse().unwrap(), &parts);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestHead {
    method: String,
    target: String,
    peer: String,
    headers: Vec<(String, String)>,
}

impl RequestHead {
    /// Reads the head of a request from the address that connected. The query is left out: it identifies nobody, and may
    /// contain secrets.
    #[must_use]
    pub fn new(peer: IpAddr, request: &Parts) -> Self {
        let mut headers: Vec<(String, String)> = Vec::with_capacity(request.headers.len() + 1);
        // HTTP/2 sends the host as a part of the target.
        if let Some(authority) = request.uri.authority()
            && !request.headers.contains_key(http::header::HOST)
        {
            headers.push(("host".to_owned(), authority.as_str().to_owned()));
        }
        let fields = request.headers.iter();
        headers.extend(fields.map(|(name, value)| (name.as_str().to_owned(), latin1(value.as_bytes()))));
        Self::from_bytes(request.method.as_str(), request.uri.path().as_bytes(), peer, headers)
    }

    fn from_bytes(method: &str, target: &[u8], peer: IpAddr, headers: Vec<(String, String)>) -> Self {
        let peer = peer.to_canonical().to_string();
        Self { method: method.to_owned(), target: latin1(target), peer, headers }
    }
}

/// Returns text of which each character stands for one byte.
fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::Subject;
    use crate::conformance_cases::load_cases;
    use crate::http_remote::body::CheckBody;
    use serde_json::{Value, json};

    /// Returns the bytes that the characters of a case stand for.
    fn bytes(text: &str) -> Vec<u8> {
        text.chars().map(|char| u8::try_from(u32::from(char)).expect("a byte")).collect()
    }

    #[test]
    fn heads_are_sent_as_by_the_other_clients() {
        let data = load_cases("heads");
        for case in data["bodies"].as_array().filter(|all| !all.is_empty()).expect("cases") {
            let (head, text) = (&case["head"], |value: &Value| value.as_str().expect("text").to_owned());
            let fields = head["headers"].as_array().expect("fields").iter();
            let fields = fields.map(|field| (text(&field[0]), latin1(&bytes(&text(&field[1])))));
            let sent = RequestHead::from_bytes(
                &text(&head["method"]),
                &bytes(&text(&head["target"])),
                text(&head["peer"]).parse().expect("an address"),
                fields.collect(),
            );
            let attributes = case["attributes"].as_object().into_iter().flatten();
            let attributes: Vec<(String, String)> =
                attributes.map(|(key, value)| (key.clone(), text(value))).collect();
            let subject = Subject::head(&sent, attributes);
            let body =
                CheckBody { cost: case["cost"].as_u64().unwrap_or(1), ..CheckBody::new("shop", &subject) };
            let body: Value = serde_json::from_slice(&body.encode()).expect("JSON");
            assert_eq!(body, case["expect"], "{}", case["name"]);
        }
    }

    #[test]
    fn a_received_request_keeps_its_fields_and_loses_its_query() {
        let request = http::Request::post("http://shop.example/orders?token=secret")
            .header("X-Api-Key", "a")
            .header("accept", "*/*")
            .header("x-api-key", http::HeaderValue::from_bytes(b"caf\xc3\xa9").expect("a value"));
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let head = RequestHead::new("::ffff:192.0.2.7".parse().expect("an address"), &parts);
        let expected = json!({
            "method": "POST", "target": "/orders", "peer": "192.0.2.7",
            "headers": [["host", "shop.example"], ["x-api-key", "a"], ["x-api-key", "caf\u{c3}\u{a9}"], ["accept", "*/*"]],
        });
        assert_eq!(json!(head), expected);
    }
}
