//! Properties of the decoders that hold for every input of an untrusted client. The fuzz targets and a test call these
//! functions, which panic if a property is violated.

use crate::{http, resp, rls};
use prost::Message;
use rls::proto::envoy::service::ratelimit::v3::RateLimitRequest;

/// Asserts that RESP commands are read in one way, however their bytes are split, and that a command that is written
/// from its words is read as the same words.
///
/// # Panics
/// If a property is violated.
pub fn resp_commands(bytes: &[u8]) {
    resp::properties(bytes);
}

/// Asserts that each JSON body that is accepted stays within the limits, and has the same meaning however it is spaced.
///
/// # Panics
/// If a property is violated.
pub fn json_bodies(bytes: &[u8]) {
    http::properties(bytes);
}

/// Asserts that a message that is decoded is the same after it is encoded, and that what is accepted of it stays within
/// the limits.
///
/// # Panics
/// If a property is violated.
pub fn rls_request(bytes: &[u8]) {
    let Ok(request) = RateLimitRequest::decode(bytes) else { return };
    let encoded = request.encode_to_vec();
    // A negative number in five bytes becomes one in ten.
    assert!(encoded.len() <= 2 * bytes.len(), "decoding adds nothing");
    assert_eq!(RateLimitRequest::decode(&encoded[..]).as_ref(), Ok(&request));
    rls::properties(&request);
}

#[cfg(test)]
mod tests {
    /// The properties hold for the inputs that fuzzing starts from, so that a target is not useless from the start.
    #[test]
    fn the_seeds_of_the_fuzz_targets_have_the_properties() {
        type Target = (&'static str, fn(&[u8]));
        let targets: [Target; 3] = [
            ("resp_commands", super::resp_commands),
            ("json_bodies", super::json_bodies),
            ("rls_request", super::rls_request),
        ];
        for (name, property) in targets {
            tollgate_testing::fuzz_seeds::each(name, property);
        }
    }
}
