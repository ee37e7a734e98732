//! The host that a client's request goes to, whose limits it shares with the others.

use http::Request;

/// Returns the host and port of a request, without user name and password.
pub(crate) fn host_of<B>(request: &Request<B>) -> String {
    let named = request.uri().authority().map(http::uri::Authority::as_str);
    let header = || request.headers().get(http::header::HOST)?.to_str().ok();
    let whole = named.or_else(header).unwrap_or("");
    whole.rsplit_once('@').map_or(whole, |(_, host)| host).to_ascii_lowercase()
}
