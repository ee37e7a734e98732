//! What a client could fill memory with, stall or confuse.

use super::*;
use crate::h2::head::EXAMINED;

/// Responses that wait for a window are forgotten with their streams, also when the server resets these.
#[test]
fn streams_that_the_server_resets_wait_for_no_window() {
    let mut peer = peer();
    peer.feed(&settings(&[(4, 0)])).expect("valid");
    peer.connection.send_waiting(usize::MAX);
    for stream in (1..40_000).step_by(2) {
        peer.feed(&headers(stream, frame::END_STREAM, &[])).expect("valid");
        peer.connection.respond(stream, b"\x88", |body| body.put_slice(b"body"), b"\x89");
        // PRIORITY of four bytes: a mistake.
        peer.feed(&client_frame(frame::PRIORITY, 0, stream, &[0; 4])).expect("valid");
        peer.connection.send_waiting(usize::MAX);
        peer.sent();
    }
    assert_eq!(peer.connection.open(), 0);
    assert!(peer.connection.waiting() < 5_000, "{}", peer.connection.waiting());
}

/// The window that padding takes comes back although the server does not read it, or a body of little else would stall.
#[test]
fn padding_gives_its_window_back() {
    let mut peer = peer();
    peer.feed(&headers(1, 0, &[])).expect("valid");
    let padded = client_frame(frame::DATA, frame::PADDED, 1, &[&[254][..], &[0; 255]].concat());
    for _ in 0..400 {
        peer.feed(&padded).expect("valid");
    }
    assert_eq!(peer.resets(), []);
}

/// nghttp2 and QUICHE end a connection whose first field is not preceded by the size of the table, if they allow less than the
/// default; proxies with such a setting would let every request pass.
#[test]
fn a_client_that_allows_a_smaller_table_is_told_once_that_there_is_none() {
    let mut peer = peer();
    peer.feed(&settings(&[(1, 4_095)])).expect("valid");
    for stream in [1, 3, 5] {
        peer.feed(&headers(stream, frame::END_STREAM, &[])).expect("valid");
        peer.feed(&settings(&[(1, 0)])).expect("valid");
    }
    peer.sent();
    for stream in [1, 3, 5] {
        peer.connection.send_only_head(stream, b"\x88");
    }
    let blocks: Vec<_> = peer.sent().into_iter().map(|sent| sent.payload).collect();
    assert_eq!(blocks, [&b"\x20\x88"[..], b"\x88", b"\x88"]);
}

#[test]
fn the_last_stream_of_a_shutdown_stays_the_last() {
    let mut peer = peer();
    peer.feed(&headers(1, frame::END_STREAM, &[])).expect("valid");
    peer.connection.begin_shutdown();
    peer.connection.finish_shutdown();
    peer.feed(&headers(9, frame::END_STREAM, &[])).expect("valid");
    peer.feed(&window_update(0, 0)).expect_err("a violation");
    let last = peer.sent().pop().expect("a frame");
    assert_eq!((last.kind, &last.payload[..4]), (frame::GOAWAY, &[0, 0, 0, 1][..]));
}

/// A stream that breaks two rules at a time comes back once, or its call would go on without a client.
#[test]
fn the_data_of_a_stream_comes_back_whatever_else_is_wrong() {
    let mut peer = peer();
    let on_itself = |flags| {
        let payload = [&[0, 0, 0, 1, 0][..], &block(&[])].concat();
        client_frame(frame::HEADERS, flags | frame::END_HEADERS | frame::HAS_PRIORITY, 1, &payload)
    };
    assert_eq!(peer.feed(&on_itself(0)).expect("valid"), [Seen::Reset(1)]);
    let mut peer = self::peer();
    peer.feed(&headers(1, 0, &[])).expect("valid");
    // No trailers, and dependent on itself.
    assert_eq!(peer.feed(&on_itself(0)).expect("valid"), [Seen::Reset(1)]);
    assert_eq!(peer.connection.open(), 0);
}

/// Memory that is freed between requests is no part of the connection's state.
#[test]
fn requests_are_read_after_memory_is_freed() {
    let mut peer = peer();
    // The first adds its path to the table, the second refers to it there.
    let block = [&b"\x83\x86\x44\x02/x"[..], b"\x83\x86\xbe"];
    for (stream, block) in [1, 3].into_iter().zip(block) {
        let flags = frame::END_HEADERS | frame::END_STREAM;
        let seen = peer.feed(&client_frame(frame::HEADERS, flags, stream, block)).expect("valid");
        assert_eq!(seen, [Seen::Request(stream, "/x".to_owned(), true)]);
        peer.connection.send_only_head(stream, b"\x88");
        peer.connection.shrink();
    }
}

/// A reference of two bytes can be to a name of thousands: an examination of each would cost a core for a megabit a second.
#[test]
fn a_long_name_is_examined_once_and_not_referred_to_for_ever() {
    let mut peer = peer();
    let request = |stream, more: &[u8]| {
        let block = [&b"\x83\x86\x84"[..], more].concat();
        client_frame(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, stream, &block)
    };
    // 3,900 bytes: 127 and 3,773.
    let name = [&b"\x40\x7f\xbd\x1d"[..], &[b'x'; 3_900], b"\0"].concat();
    EXAMINED.set(0);
    assert_eq!(peer.feed(&request(1, &name)).expect("valid").len(), 1);
    // Without being indexed, and with: these take the place of the one that they refer to.
    for (stream, reference) in (3..200).step_by(4).zip([&b"\x0f\x2f\0"[..], b"\x7e\0"].iter().cycle()) {
        assert_eq!(peer.feed(&request(stream, reference)).expect("valid").len(), 1);
        assert_eq!(peer.feed(&request(stream + 2, &reference.repeat(20))), Ok(Vec::new()), "too large: 431");
        assert_eq!(peer.resets(), []);
    }
    assert!((3_900..8_000).contains(&EXAMINED.get()), "{} bytes", EXAMINED.get());
    assert_eq!(peer.violation(&request(201, &b"\x7e\0".repeat(80))), Reason::EnhanceYourCalm as u32);
}

/// A client that gives no window and goes on asking must not fill the memory; and when it reads, all that waits is sent, in parts.
#[test]
fn what_waits_for_a_window_is_bounded() {
    const BODY: usize = 100_000;
    let mut peer = peer();
    peer.feed(&settings(&[(4, 0)])).expect("valid");
    let streams: Vec<_> = (1..2_000).step_by(2).collect();
    let respond = |peer: &mut Peer, stream| {
        peer.connection.respond(stream, b"\x88", |body| body.put_bytes(7, BODY), b"\x89");
    };
    // These are open before there is too much.
    for stream in &streams[..20] {
        assert_eq!(peer.feed(&headers(*stream, frame::END_STREAM, &[])).expect("valid").len(), 1);
    }
    let mut queued = Vec::new();
    for stream in &streams[20..] {
        if peer.feed(&headers(*stream, frame::END_STREAM, &[])).expect("valid").is_empty() {
            break;
        }
        respond(&mut peer, *stream);
        queued.push(*stream);
    }
    assert!((20..=1 + (8 << 20) / BODY).contains(&queued.len()), "{}", queued.len());
    let refused = streams[20 + queued.len()];
    assert_eq!(peer.resets(), [(refused, Reason::RefusedStream as u32)]);
    for stream in &streams[..20] {
        respond(&mut peer, *stream);
    }
    let expected: Vec<_> =
        streams[..20].iter().map(|stream| (*stream, Reason::EnhanceYourCalm as u32)).collect();
    assert_eq!(peer.resets(), expected);
    // Windows still arrive, and what they allow is sent as fast as it is taken.
    peer.feed(&[settings(&[(4, 1 << 20)]), window_update(0, 1 << 30)].concat()).expect("valid");
    let (mut received, mut ended) = (0, 0);
    while peer.connection.may_send() {
        peer.connection.send_waiting(64 << 10);
        assert!(peer.connection.unsent().len() < 100 << 10, "{}", peer.connection.unsent().len());
        for sent in peer.sent() {
            received += if sent.kind == frame::DATA { sent.payload.len() } else { 0 };
            ended += usize::from(sent.kind == frame::HEADERS);
        }
    }
    assert_eq!((received, ended), (queued.len() * BODY, queued.len()));
    assert_eq!((peer.connection.open(), peer.connection.waiting()), (0, 0));
    assert_eq!(peer.feed(&headers(5_001, frame::END_STREAM, &[])).expect("valid").len(), 1);
}

/// A window for all but the last byte of each response must not keep all of them in memory.
#[test]
fn what_was_sent_of_a_response_is_freed() {
    let mut peer = peer();
    peer.feed(&settings(&[(4, 99_999)])).expect("valid");
    peer.feed(&[window_update(0, 1 << 30), headers(1, frame::END_STREAM, &[])].concat()).expect("valid");
    peer.connection.respond(1, b"\x88", |body| body.put_bytes(7, 100_000), b"\x89");
    assert_eq!(peer.connection.queued(1), Some(1));
    assert_eq!(peer.connection.queue_taken(1), 1);
}

/// A caller's header with space around its value is passed on by nginx; a check that fails for it would let the caller pass.
#[test]
fn space_around_a_value_is_no_part_of_it() {
    let mut peer = peer();
    // As a literal, and as a field of the table.
    let values: [&[u8]; 4] = [b" b", b"b\t ", b" \tb c ", b" "];
    for (at, (value, expected)) in values.into_iter().zip(["b", "b", "b c", ""]).enumerate() {
        let literal = [&b"\x40\x01a"[..], &[u8::try_from(value.len()).expect("short")], value].concat();
        for (stream, field) in [(1, &literal[..]), (3, &b"\xbe"[..])] {
            let block = [&b"\x83\x86\x84"[..], field].concat();
            let stream = stream + 4 * u32::try_from(at).expect("few");
            let sent = client_frame(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, stream, &block);
            assert_eq!(peer.feed(&sent).expect("valid").len(), 1, "{value:?}");
            assert_eq!(peer.connection.head().get(b"a"), Some(expected.as_bytes()));
        }
    }
    assert_eq!(peer.resets(), []);
}

/// One caller's long header must not end the checks of all others on its proxy's connection, however it is cut.
#[test]
fn a_very_large_head_is_rejected_alone() {
    let mut peer = peer();
    peer.feed(&headers(1, 0, &[])).expect("valid");
    for (stream, length, is_served) in [(3, 60 << 10, true), (5, 70_000, false), (7, 250_000, false)] {
        let block = block(&[("a", &"v".repeat(length))]);
        let mut parts = block.chunks(16_384).peekable();
        let mut bytes =
            client_frame(frame::HEADERS, frame::END_STREAM, stream, parts.next().expect("a part"));
        while let Some(part) = parts.next() {
            let flags = if parts.peek().is_none() { frame::END_HEADERS } else { 0 };
            bytes.extend(client_frame(frame::CONTINUATION, flags, stream, part));
        }
        assert_eq!(peer.feed(&bytes).expect("the connection goes on").len(), usize::from(is_served));
        let rejected: Vec<_> = peer.sent().into_iter().map(|sent| (sent.stream, sent.payload)).collect();
        assert_eq!(rejected.iter().any(|(at, block)| *at == stream && block.ends_with(b"431")), !is_served);
    }
    assert!(peer.connection.data(1).is_some());
}
