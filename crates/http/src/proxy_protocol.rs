//! PROXY protocol parser, versions 1 (a text line) and 2 (binary) as HAProxy defines them. A TCP load balancer sends
//! the client's address in the first bytes of a connection.
//!
//! The parser does no I/O: bytes in, an address out. A listener reads until [`read`] returns a result, and uses the
//! result only if it trusts the peer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum length of a version 1 line including its CR LF, in bytes.
const MAX_LINE: usize = 107;
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Maximum length of a version 2 body (addresses and extensions), in bytes; real extensions are far smaller.
const MAX_BLOCK: usize = 4096;

/// Number of bytes after which [`read`] always returns a result.
pub const MAX_HEADER: usize = 16 + MAX_BLOCK;

/// A parsed PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyHeader {
    /// Source and destination of the client's connection; `None` for the proxy's own connections and for address
    /// families other than IPv4 and IPv6.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
    /// Length of the header in bytes; the client's data follows.
    pub length: usize,
}

/// The reason that bytes are not a PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The first bytes match neither version.
    #[error("the connection does not start with a PROXY header")]
    NotProxied,
    /// A line that is too long, or not of the form `PROXY TCP4 source destination port port`.
    #[error("malformed PROXY line")]
    BadLine,
    /// A binary header of another version, command or length.
    #[error("malformed binary PROXY header")]
    BadBlock,
}

/// Parses a header from the first bytes of a connection. Returns `Ok(None)` if more bytes are needed.
///
/// ```
/// use tollgate_http::proxy_protocol::read;
/// let bytes = b"PROXY TCP4 198.51.100.7 192.0.2.1 56324 443\r\nGET / HTTP/1.1\r\n";
/// let header = read(bytes)?.expect("a complete line");
/// assert_eq!(header.addresses.unwrap().0.to_string(), "198.51.100.7:56324");
/// assert!(bytes[header.length..].starts_with(b"GET / "));
/// assert_eq!(read(b"PROXY TC")?, None);
/// # Ok::<(), tollgate_http::proxy_protocol::ProxyError>(())
/// ```
pub fn read(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyError> {
    let begins = |with: &[u8]| {
        let length = with.len().min(bytes.len());
        bytes[..length] == with[..length]
    };
    if begins(SIGNATURE) {
        return block(bytes);
    }
    if begins(b"PROXY ") {
        return line(bytes);
    }
    Err(ProxyError::NotProxied)
}

fn line(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyError> {
    let window = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(end) = window.windows(2).position(|pair| pair == b"\r\n") else {
        return if bytes.len() >= MAX_LINE { Err(ProxyError::BadLine) } else { Ok(None) };
    };
    let text = std::str::from_utf8(&bytes[..end]).map_err(|_| ProxyError::BadLine)?;
    let length = end + 2;
    let mut words = text.split(' ').skip(1);
    let family = words.next().ok_or(ProxyError::BadLine)?;
    if family == "UNKNOWN" {
        return Ok(Some(ProxyHeader { addresses: None, length }));
    }
    let all: Option<[&str; 4]> = words.collect::<Vec<_>>().try_into().ok();
    let [source, destination, from, to] = all.ok_or(ProxyError::BadLine)?;
    let ends = end_of(family, source, from).zip(end_of(family, destination, to));
    Ok(Some(ProxyHeader { addresses: Some(ends.ok_or(ProxyError::BadLine)?), length }))
}

fn end_of(family: &str, address: &str, port: &str) -> Option<SocketAddr> {
    let address: IpAddr = match family {
        "TCP4" => address.parse::<Ipv4Addr>().ok()?.into(),
        "TCP6" => address.parse::<Ipv6Addr>().ok()?.into(),
        _ => return None,
    };
    // Parsers disagree on whether `+5` and `005` are numbers.
    let plain = port == "0" || (!port.starts_with('0') && port.bytes().all(|byte| byte.is_ascii_digit()));
    let port = port.parse().ok().filter(|_| plain)?;
    Some(SocketAddr::new(address.to_canonical(), port))
}

fn block(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyError> {
    let Some(head) = bytes.get(12..16) else { return Ok(None) };
    let size = usize::from(u16::from_be_bytes([head[2], head[3]]));
    let length = 16 + size;
    if head[0] >> 4 != 2 || size > MAX_BLOCK {
        return Err(ProxyError::BadBlock);
    }
    let command = head[0] & 0x0F;
    if command > 1 {
        return Err(ProxyError::BadBlock);
    }
    let Some(body) = bytes.get(16..length) else { return Ok(None) };
    let ends = match (command, head[1] >> 4) {
        // The proxy's own connection, such as a health check.
        (0, _) => None,
        (_, 1) => Some(addresses::<4>(body)?),
        (_, 2) => Some(addresses::<16>(body)?),
        (_, 0 | 3) => None,
        _ => return Err(ProxyError::BadBlock),
    };
    Ok(Some(ProxyHeader { addresses: ends, length }))
}

/// Parses two addresses of `N` bytes, then two ports.
fn addresses<const N: usize>(body: &[u8]) -> Result<(SocketAddr, SocketAddr), ProxyError>
where
    IpAddr: From<[u8; N]>,
{
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; N] = body.get(at..at + N)?.try_into().ok()?;
        Some(IpAddr::from(bytes).to_canonical())
    };
    let port =
        |at: usize| -> Option<u16> { Some(u16::from_be_bytes(body.get(at..at + 2)?.try_into().ok()?)) };
    let both = (address(0), address(N), port(2 * N), port(2 * N + 2));
    match both {
        (Some(source), Some(destination), Some(from), Some(to)) => {
            Ok((SocketAddr::new(source, from), SocketAddr::new(destination, to)))
        }
        _ => Err(ProxyError::BadBlock),
    }
}
