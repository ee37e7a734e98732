//! PROXY protocol: every prefix of a header needs more bytes, nothing else is accepted as a header, and no input
//! panics.

use proptest::prelude::*;
use std::net::SocketAddr;
use tollgate_http::proxy_protocol::{MAX_HEADER, ProxyError, read};

fn binary(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"\r\n\r\n\0\r\nQUIT\n".to_vec();
    bytes.extend([0x20 | command, family << 4 | 1]);
    bytes.extend(u16::try_from(body.len()).expect("short").to_be_bytes());
    bytes.extend(body);
    bytes
}

fn addresses(source: SocketAddr, destination: SocketAddr) -> (u8, Vec<u8>) {
    let mut body = Vec::new();
    let family = match (source, destination) {
        (SocketAddr::V4(one), SocketAddr::V4(other)) => {
            body.extend([one.ip().octets(), other.ip().octets()].concat());
            1
        }
        (SocketAddr::V6(one), SocketAddr::V6(other)) => {
            body.extend([one.ip().octets(), other.ip().octets()].concat());
            2
        }
        _ => unreachable!("both of one family"),
    };
    body.extend([source.port().to_be_bytes(), destination.port().to_be_bytes()].concat());
    (family, body)
}

fn pair() -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
    let v4 = || any::<([u8; 4], u16)>().prop_map(SocketAddr::from);
    // IPv4-mapped addresses become IPv4 addresses, which is tested elsewhere.
    let v6 = || {
        any::<([u8; 15], u16)>().prop_map(|(rest, port)| {
            let mut octets = [0x20; 16];
            octets[1..].copy_from_slice(&rest);
            SocketAddr::from((octets, port))
        })
    };
    prop_oneof![(v4(), v4()), (v6(), v6())]
}

proptest! {
    /// A wrong address would charge another caller's limit; a header that the network splits must not count as
    /// malformed.
    #[test]
    fn both_versions_contain_both_addresses_and_every_prefix_needs_more((source, destination) in pair(), extra in proptest::collection::vec(any::<u8>(), 0..64)) {
        let name = if source.is_ipv4() { "TCP4" } else { "TCP6" };
        let line = format!("PROXY {name} {} {} {} {}\r\n", source.ip(), destination.ip(), source.port(), destination.port());
        let (family, mut body) = addresses(source, destination);
        body.extend(&extra);
        for header in [line.into_bytes(), binary(1, family, &body)] {
            let whole: Vec<u8> = header.iter().copied().chain(*b"GET / HTTP/1.1\r\n").collect();
            let found = read(&whole).expect("a header").expect("all of it");
            prop_assert_eq!(found.length, header.len());
            prop_assert_eq!(found.addresses, Some((source, destination)));
            for cut in 0..header.len() {
                prop_assert_eq!(read(&whole[..cut]), Ok(None), "{} of {}", cut, header.len());
            }
        }
    }

    /// For any input the result is a header, an error or a request for more bytes, the last never at `MAX_HEADER`
    /// bytes.
    #[test]
    fn no_input_panics_or_needs_more_bytes_forever(start in proptest::sample::select(vec!["", "PROXY ", "PROXY TCP4 ", "\r\n\r\n\0\r\nQUIT\n"]), mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut all = start.as_bytes().to_vec();
        all.append(&mut bytes);
        let _ = read(&all);
        all.resize(MAX_HEADER, b'x');
        prop_assert_ne!(read(&all), Ok(None));
    }
}

/// Headers without addresses: health checks of the load balancer, and unsupported address families.
#[test]
fn a_header_may_have_no_addresses() {
    for (bytes, length) in [
        (b"PROXY UNKNOWN\r\n".to_vec(), 15),
        (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\nGET".to_vec(), 35),
        (binary(0, 0, b""), 16),
        (binary(0, 1, b"junk"), 20),
        (binary(1, 0, b""), 16),
        (binary(1, 3, &[0; 216]), 232),
    ] {
        let found = read(&bytes).expect("a header").expect("all of it");
        assert_eq!((found.addresses, found.length), (None, length), "{bytes:?}");
    }
    let mapped = b"PROXY TCP6 ::ffff:192.0.2.7 ::1 5 6\r\n";
    let source = read(mapped).expect("a header").expect("all of it").addresses.expect("addresses").0;
    assert_eq!(source.to_string(), "192.0.2.7:5", "an IPv4-mapped address is an IPv4 client");
}

/// A partly valid header must be rejected: guessing the address could limit the wrong caller.
#[test]
fn invalid_headers_are_rejected() {
    let long = format!("PROXY TCP4 {}", "1".repeat(200));
    for text in [
        "PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 1 2 3\r\n",
        "PROXY TCP4 1.2.3 5.6.7.8 1 2\r\n",
        "PROXY TCP4 ::1 ::2 1 2\r\n",
        "PROXY TCP6 1.2.3.4 5.6.7.8 1 2\r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 65536 2\r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 -1 2\r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 +1 2\r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n",
        "PROXY TCP4  1.2.3.4 5.6.7.8 1 2\r\n",
        "PROXY UDP4 1.2.3.4 5.6.7.8 1 2\r\n",
        "PROXY \r\n",
        "PROXY TCP4 1.2.3.4 5.6.7.8 1 \0\r\n",
        long.as_str(),
    ] {
        assert_eq!(read(text.as_bytes()), Err(ProxyError::BadLine), "{text}");
    }
    assert_eq!(read(b"PROXY TCP4 1.2.3.4 \xff 1 2\r\n"), Err(ProxyError::BadLine));
    for bytes in
        [&b"GET / HTTP/1.1\r\n"[..], b"proxy TCP4", b"\r\n\r\n\0\r\nQUIZ", b"\x16\x03\x01", b"PRI * HTTP/2.0"]
    {
        assert_eq!(read(bytes), Err(ProxyError::NotProxied), "{bytes:?}");
    }
    let mut version = binary(1, 1, &[0; 12]);
    version[12] = 0x11;
    let mut huge = binary(1, 1, &[0; 12]);
    huge[14..16].copy_from_slice(&[0xff, 0xff]);
    for bytes in [
        version,
        huge,
        binary(2, 1, &[0; 12]),
        binary(1, 1, &[0; 11]),
        binary(1, 2, &[0; 35]),
        binary(1, 4, b""),
    ] {
        assert_eq!(read(&bytes), Err(ProxyError::BadBlock), "{bytes:?}");
    }
}
