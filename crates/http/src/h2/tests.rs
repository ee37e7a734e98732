//! The rules of a connection, seen by a client that sends bytes and reads frames.

use super::frame::{self, FrameHeader};
use super::{Connection, Event, PREFACE, Reason, Settings, encode_field};
use bytes::{BufMut, BytesMut};
use proptest::prelude::*;

/// A frame of a client.
fn client_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    frame::put_header(&mut out, payload.len(), kind, flags, stream);
    out.put_slice(payload);
    out.to_vec()
}

/// `POST /a` with more fields.
fn block(more: &[(&str, &str)]) -> Vec<u8> {
    let mut block = BytesMut::from(&b"\x83\x86"[..]);
    for (name, value) in [(":path", "/a"), (":authority", "x")].iter().chain(more) {
        encode_field(name.as_bytes(), value.as_bytes(), &mut block);
    }
    block.to_vec()
}

fn headers(stream: u32, flags: u8, more: &[(&str, &str)]) -> Vec<u8> {
    client_frame(frame::HEADERS, flags | frame::END_HEADERS, stream, &block(more))
}

fn window_update(stream: u32, more: u32) -> Vec<u8> {
    client_frame(frame::WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
}

fn settings(all: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> = all
        .iter()
        .flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat())
        .collect();
    client_frame(frame::SETTINGS, 0, 0, &payload)
}

/// What happened to a request, with its data.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Request(u32, String, bool),
    Data(u32, Vec<u8>, bool),
    End(u32),
    Reset(u32),
}

/// A frame that the server sent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

struct Peer {
    connection: Connection<u32>,
    unread: Vec<u8>,
    next: u32,
}

impl Peer {
    /// A server that has read the preface and empty settings.
    fn new(limits: Settings) -> Self {
        let mut peer = Self { connection: Connection::new(limits), unread: Vec::new(), next: 0 };
        peer.feed(&[&PREFACE[..], &settings(&[])].concat()).expect("a preface");
        peer.sent();
        peer
    }

    /// Sends bytes. Returns what the server made of them.
    fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Seen>, &'static str> {
        self.unread.extend_from_slice(bytes);
        let (mut seen, mut read) = (Vec::new(), 0);
        loop {
            let (connection, next) = (&mut self.connection, &mut self.next);
            let number = || {
                *next += 1;
                *next
            };
            let step = connection.receive(&self.unread[read..], number)?;
            read += step.consumed;
            match step.event {
                None => {}
                Some(Event::Request { stream, is_end }) => {
                    let path = String::from_utf8_lossy(self.connection.head().path()).into_owned();
                    seen.push(Seen::Request(stream, path, is_end));
                }
                Some(Event::Data { stream, bytes, is_end }) => {
                    seen.push(Seen::Data(stream, bytes.to_vec(), is_end));
                }
                Some(Event::End { stream }) => seen.push(Seen::End(stream)),
                Some(Event::Reset { data, .. }) => seen.push(Seen::Reset(data)),
            }
            if step.consumed == 0 {
                self.unread.drain(..read);
                return Ok(seen);
            }
        }
    }

    /// Takes the frames that the server has sent.
    fn sent(&mut self) -> Vec<Sent> {
        let mut out = std::mem::take(self.connection.unsent());
        let mut frames = Vec::new();
        while let Some(header) = FrameHeader::parse(&out) {
            let payload = out.split_to(frame::HEADER + header.length)[frame::HEADER..].to_vec();
            frames.push(Sent { kind: header.kind, flags: header.flags, stream: header.stream, payload });
        }
        assert!(out.is_empty(), "whole frames");
        frames
    }

    /// Takes the resets that the server has sent.
    fn resets(&mut self) -> Vec<(u32, u32)> {
        let resets = self.sent().into_iter().filter(|sent| sent.kind == frame::RST_STREAM);
        resets
            .map(|sent| (sent.stream, u32::from_be_bytes(sent.payload[..].try_into().expect("four bytes"))))
            .collect()
    }

    /// Sends bytes that break a rule of the connection. Returns the reason that the server gives.
    fn violation(&mut self, bytes: &[u8]) -> u32 {
        self.feed(bytes).expect_err("a violation");
        let last = self.sent().pop().expect("a frame");
        assert_eq!(last.kind, frame::GOAWAY);
        u32::from_be_bytes(last.payload[4..8].try_into().expect("a reason"))
    }
}

fn peer() -> Peer {
    Peer::new(Settings::default())
}

#[test]
fn a_request_is_read_and_answered() {
    let mut peer = peer();
    let call = [headers(1, 0, &[]), client_frame(frame::DATA, frame::END_STREAM, 1, b"abc")].concat();
    assert_eq!(
        peer.feed(&call),
        Ok(vec![Seen::Request(1, "/a".into(), false), Seen::Data(1, b"abc".into(), true)])
    );
    peer.connection.respond(1, b"\x88", |body| body.put_slice(b"def"), b"\x89");
    let sent: Vec<_> =
        peer.sent().into_iter().map(|sent| (sent.kind, sent.flags, sent.stream, sent.payload)).collect();
    assert_eq!(
        sent,
        [
            (frame::HEADERS, frame::END_HEADERS, 1, b"\x88".to_vec()),
            (frame::DATA, 0, 1, b"def".to_vec()),
            (frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 1, b"\x89".to_vec()),
        ]
    );
    assert_eq!(peer.connection.open(), 0);
}

/// An answer before the end of a request tells the client to stop, and what it has sent meanwhile is no mistake.
#[test]
fn an_early_answer_ends_the_request() {
    let mut peer = peer();
    peer.feed(&headers(1, 0, &[])).expect("valid");
    peer.connection.send_only_head(1, b"\x88");
    assert_eq!(peer.resets(), [(1, Reason::None as u32)]);
    let late =
        [client_frame(frame::DATA, 0, 1, b"late"), headers(1, frame::END_STREAM, &[]), window_update(1, 5)];
    assert_eq!(peer.feed(&late.concat()), Ok(vec![]));
    assert!(peer.sent().is_empty());
}

#[test]
fn violations_end_the_connection_with_their_reason() {
    let request = || headers(1, frame::END_STREAM, &[]);
    let long = vec![0; 16_385];
    let frame_of = client_frame;
    for (name, bytes, reason) in [
        ("DATA of no stream", frame_of(frame::DATA, 0, 0, b"x"), Reason::Protocol),
        ("DATA before HEADERS", frame_of(frame::DATA, 0, 1, b"x"), Reason::Protocol),
        ("HEADERS of no stream", headers(0, 0, &[]), Reason::Protocol),
        ("HEADERS of an even stream", headers(2, 0, &[]), Reason::Protocol),
        ("a large frame", frame_of(frame::DATA, 0, 1, &long), Reason::FrameSize),
        (
            "a block that is not compressed right",
            frame_of(frame::HEADERS, 4, 1, b"\x80"),
            Reason::Compression,
        ),
        (
            "a block that is not continued",
            [frame_of(frame::HEADERS, 0, 1, b""), request()].concat(),
            Reason::Protocol,
        ),
        (
            "another stream's continuation",
            [frame_of(frame::HEADERS, 0, 1, b""), frame_of(frame::CONTINUATION, 4, 3, b"")].concat(),
            Reason::Protocol,
        ),
        ("CONTINUATION of nothing", frame_of(frame::CONTINUATION, 4, 1, b""), Reason::Protocol),
        ("a short GOAWAY", frame_of(frame::GOAWAY, 0, 0, &[0; 7]), Reason::FrameSize),
        (
            "an unopened stream that depends on itself",
            frame_of(frame::PRIORITY, 0, 7, &[0, 0, 0, 7, 1]),
            Reason::Protocol,
        ),
        ("PRIORITY of no stream", frame_of(frame::PRIORITY, 0, 0, &[0; 5]), Reason::Protocol),
        ("RST_STREAM before HEADERS", frame_of(frame::RST_STREAM, 0, 1, &[0; 4]), Reason::Protocol),
        (
            "a short RST_STREAM",
            [headers(1, 0, &[]), frame_of(frame::RST_STREAM, 0, 1, &[0; 3])].concat(),
            Reason::FrameSize,
        ),
        ("SETTINGS of a stream", frame_of(frame::SETTINGS, 0, 1, b""), Reason::Protocol),
        ("SETTINGS of five bytes", frame_of(frame::SETTINGS, 0, 0, &[0; 5]), Reason::FrameSize),
        ("an ACK with settings", frame_of(frame::SETTINGS, 1, 0, &[0; 6]), Reason::FrameSize),
        ("ENABLE_PUSH of 2", settings(&[(2, 2)]), Reason::Protocol),
        ("a large initial window", settings(&[(4, 1 << 31)]), Reason::FlowControl),
        ("a small maximum frame", settings(&[(5, 16_383)]), Reason::Protocol),
        ("a large maximum frame", settings(&[(5, 1 << 24)]), Reason::Protocol),
        ("PUSH_PROMISE", frame_of(frame::PUSH_PROMISE, 4, 1, &[0; 4]), Reason::Protocol),
        ("PING of a stream", frame_of(frame::PING, 0, 1, &[0; 8]), Reason::Protocol),
        ("PING of seven bytes", frame_of(frame::PING, 0, 0, &[0; 7]), Reason::FrameSize),
        ("GOAWAY of a stream", frame_of(frame::GOAWAY, 0, 1, &[0; 8]), Reason::Protocol),
        ("WINDOW_UPDATE of three bytes", frame_of(frame::WINDOW_UPDATE, 0, 0, &[0; 3]), Reason::FrameSize),
        ("WINDOW_UPDATE of 0", window_update(0, 0), Reason::Protocol),
        ("WINDOW_UPDATE beyond the maximum", window_update(0, (1 << 31) - 1), Reason::FlowControl),
        ("WINDOW_UPDATE before HEADERS", window_update(1, 1), Reason::Protocol),
        (
            "more padding than bytes",
            [headers(1, 0, &[]), frame_of(frame::DATA, 8, 1, &[5, 1])].concat(),
            Reason::Protocol,
        ),
        (
            "HEADERS of a closed stream",
            [request(), frame_of(frame::RST_STREAM, 0, 1, &[0; 4]), request()].concat(),
            Reason::StreamClosed,
        ),
        (
            "a block of many frames",
            [frame_of(frame::HEADERS, 0, 1, b""), frame_of(frame::CONTINUATION, 0, 1, b"").repeat(64)]
                .concat(),
            Reason::EnhanceYourCalm,
        ),
        (
            "a long block",
            [frame_of(frame::HEADERS, 0, 1, b""), frame_of(frame::CONTINUATION, 0, 1, &long[1..]).repeat(17)]
                .concat(),
            Reason::EnhanceYourCalm,
        ),
    ] {
        assert_eq!(peer().violation(&bytes), reason as u32, "{name}");
    }
    for (name, bytes) in [
        ("HTTP/1", &b"GET / HTTP/1.1\r\n\r\n"[..]),
        ("no settings", &[&PREFACE[..], &request()].concat()),
        ("an ACK before settings", &[&PREFACE[..], &frame_of(frame::SETTINGS, 1, 0, b"")].concat()),
    ] {
        let mut new = Peer { connection: Connection::new(Settings::default()), unread: Vec::new(), next: 0 };
        assert_eq!(new.violation(bytes), Reason::Protocol as u32, "{name}");
    }
}

#[test]
fn mistakes_in_a_stream_end_only_it() {
    let open = |more| headers(1, 0, more);
    let request = |fields: &[(&str, &str)]| {
        let mut block = BytesMut::new();
        fields.iter().for_each(|(name, value)| encode_field(name.as_bytes(), value.as_bytes(), &mut block));
        client_frame(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 1, &block)
    };
    let good = [(":method", "POST"), (":scheme", "http"), (":path", "/")];
    let with = |field: (&'static str, &'static str)| request(&[&good[..], &[field]].concat());
    let data = |flags, bytes: &[u8]| client_frame(frame::DATA, flags, 1, bytes);
    let window = [open(&[]), data(0, &[0; 16_384]).repeat(4)].concat();
    for (name, bytes, reason) in [
        ("no method", request(&good[1..]), Reason::Protocol),
        ("no scheme", request(&[good[0], good[2]]), Reason::Protocol),
        ("no path", request(&good[..2]), Reason::Protocol),
        ("two methods", with(good[0]), Reason::Protocol),
        ("an empty path", request(&[good[0], good[1], (":path", "")]), Reason::Protocol),
        ("a pseudo field after others", request(&[("a", "b"), good[0], good[1], good[2]]), Reason::Protocol),
        ("an unknown pseudo field", with((":status", "200")), Reason::Protocol),
        ("upper case", with(("Name", "x")), Reason::Protocol),
        ("an empty name", with(("", "x")), Reason::Protocol),
        ("a line break", with(("a", "b\r\nc: d")), Reason::Protocol),
        ("a control character", with(("a", "b\u{1}c")), Reason::Protocol),
        ("space around a path", request(&[good[0], good[1], (":path", "/ ")]), Reason::Protocol),
        ("space around a length", with(("content-length", " 0")), Reason::Protocol),
        ("a field of the connection", with(("connection", "close")), Reason::Protocol),
        ("transfer-encoding", with(("transfer-encoding", "chunked")), Reason::Protocol),
        ("te", with(("te", "gzip")), Reason::Protocol),
        ("a body that is missing", with(("content-length", "1")), Reason::Protocol),
        ("a length that is no number", with(("content-length", "+0")), Reason::Protocol),
        (
            "two lengths",
            request(&[&good[..], &[("content-length", "0"), ("content-length", "1")]].concat()),
            Reason::Protocol,
        ),
        (
            "less than the length",
            [open(&[("content-length", "2")]), data(1, b"a")].concat(),
            Reason::Protocol,
        ),
        (
            "more than the length",
            [open(&[("content-length", "2")]), data(0, b"abc")].concat(),
            Reason::Protocol,
        ),
        ("trailers with a path", [open(&[]), headers(1, 1, &[])].concat(), Reason::Protocol),
        (
            "trailers that are not the end",
            [open(&[]), client_frame(frame::HEADERS, 4, 1, b"")].concat(),
            Reason::Protocol,
        ),
        (
            "a stream that depends on itself",
            client_frame(frame::HEADERS, 4 | 32, 1, &[&[0, 0, 0, 1, 0][..], &block(&[])].concat()),
            Reason::Protocol,
        ),
        (
            "PRIORITY of four bytes",
            [open(&[]), client_frame(frame::PRIORITY, 0, 1, &[0; 4])].concat(),
            Reason::FrameSize,
        ),
        ("WINDOW_UPDATE of 0", [open(&[]), window_update(1, 0)].concat(), Reason::Protocol),
        ("a large window", [open(&[]), window_update(1, (1 << 31) - 1)].concat(), Reason::FlowControl),
        ("more than the window", window, Reason::FlowControl),
        ("DATA after the end", [open(&[]), data(1, b""), data(0, b"x")].concat(), Reason::StreamClosed),
        (
            "HEADERS after the end",
            [headers(1, 1, &[]), client_frame(frame::HEADERS, 4 | 1, 1, b"")].concat(),
            Reason::StreamClosed,
        ),
    ] {
        let mut peer = peer();
        peer.feed(&bytes).unwrap_or_else(|text| panic!("{name}: {text}"));
        assert_eq!(peer.resets(), [(1, reason as u32)], "{name}");
        assert_eq!(peer.connection.open(), 0, "{name}");
        let next = peer.feed(&headers(3, 1, &[])).expect("the connection goes on");
        assert_eq!(next, [Seen::Request(3, "/a".into(), true)], "{name}");
    }
}

/// A client that gives its request up, or breaks a rule, frees what is kept for it.
#[test]
fn the_data_of_a_reset_stream_comes_back() {
    let mut peer = peer();
    let bytes = [
        headers(1, 0, &[]),
        headers(3, 0, &[]),
        client_frame(frame::RST_STREAM, 0, 1, &[0; 4]),
        window_update(3, 0),
    ];
    let seen = peer.feed(&bytes.concat()).expect("valid");
    assert_eq!(seen[2..], [Seen::Reset(1), Seen::Reset(2)]);
    assert_eq!((peer.connection.resets(), peer.connection.open()), (2, 0));
}

#[test]
fn there_are_only_so_many_streams() {
    let mut peer = Peer::new(Settings { max_streams: 2, ..Settings::default() });
    let all: Vec<u8> = [1, 3, 5].iter().flat_map(|stream| headers(*stream, 1, &[])).collect();
    assert_eq!(peer.feed(&all).expect("valid").len(), 2);
    assert_eq!(peer.resets(), [(5, Reason::RefusedStream as u32)]);
    peer.connection.send_only_head(1, b"\x88");
    assert_eq!(peer.feed(&headers(7, 1, &[])).expect("valid").len(), 1);
}

/// A head that is too large is answered, and does not disturb the compression of those behind it.
#[test]
fn a_large_head_is_rejected_alone() {
    let mut peer = Peer::new(Settings { max_head: 1_000, ..Settings::default() });
    let long = "v".repeat(900);
    let mut bytes = headers(1, 0, &[("a", &long)]);
    let mut table = block(&[]);
    table.extend_from_slice(b"\x40\x01n\x01v");
    bytes.extend(client_frame(frame::HEADERS, 4 | 1, 3, &table));
    let large = [block(&[("b", &long)]), b"\x40\x01m\x01w".to_vec()].concat();
    bytes.extend(client_frame(frame::HEADERS, 4 | 1, 5, &large));
    bytes.extend(client_frame(frame::HEADERS, 4 | 1, 7, &[block(&[]), vec![0xbe, 0xbf]].concat()));
    let seen = peer.feed(&bytes).expect("valid");
    assert_eq!(seen, [Seen::Request(3, "/a".into(), true), Seen::Request(7, "/a".into(), true)]);
    let head = peer.connection.head();
    assert_eq!((head.get(b"m"), head.get(b"n")), (Some(&b"w"[..]), Some(&b"v"[..])));
    let rejected: Vec<_> = peer.sent().into_iter().filter(|sent| sent.kind == frame::HEADERS).collect();
    assert_eq!(rejected.iter().map(|sent| sent.stream).collect::<Vec<_>>(), [1, 5]);
    assert!(rejected.iter().all(|sent| sent.payload.ends_with(b"\x03431")), "{rejected:?}");
}

#[test]
fn a_shutdown_serves_what_was_sent_before_it_was_known() {
    let mut peer = peer();
    peer.feed(&headers(1, 1, &[])).expect("valid");
    peer.connection.begin_shutdown();
    let sent = peer.sent();
    assert_eq!((sent[0].kind, sent[1].kind), (frame::GOAWAY, frame::PING));
    assert_eq!(peer.feed(&headers(3, 1, &[])).expect("in transit").len(), 1);
    peer.feed(&client_frame(frame::PING, frame::ACK, 0, &sent[1].payload)).expect("valid");
    assert_eq!(peer.sent()[0].payload[..4], [0, 0, 0, 3]);
    assert_eq!(peer.feed(&headers(5, 1, &[])), Ok(vec![]));
    assert_eq!(peer.resets(), [(5, Reason::RefusedStream as u32)]);
    for stream in [1, 3] {
        assert!(!peer.connection.is_done());
        peer.connection.send_only_head(stream, b"\x88");
    }
    assert!(peer.connection.is_done());
}

#[test]
fn pings_and_settings_are_acknowledged() {
    let mut peer = peer();
    peer.feed(&[client_frame(frame::PING, 0, 0, b"12345678"), settings(&[(3, 7), (99, 1)])].concat())
        .expect("valid");
    let sent = peer.sent();
    assert_eq!(
        (sent[0].kind, sent[0].flags, &sent[0].payload[..]),
        (frame::PING, frame::ACK, &b"12345678"[..])
    );
    assert_eq!((sent[1].kind, sent[1].flags), (frame::SETTINGS, frame::ACK));
    assert!(peer.connection.ping() && !peer.connection.ping(), "one that is not answered");
    let ping = peer.sent().remove(0);
    peer.feed(&client_frame(frame::PING, frame::ACK, 0, &ping.payload)).expect("valid");
    assert!(peer.connection.ping());
}

/// Padding and released bytes come back to the client, or a long body would never arrive.
#[test]
fn windows_are_returned() {
    let mut peer = peer();
    peer.feed(&headers(1, 0, &[])).expect("valid");
    let mut left = 65_535_u32;
    for at in 0..200 {
        let padded = [&[200][..], &[at; 8_000], &[0; 200]].concat();
        assert!(left >= padded.len() as u32, "the window is returned in time");
        left -= padded.len() as u32;
        peer.feed(&client_frame(frame::DATA, frame::PADDED, 1, &padded)).expect("within the windows");
        peer.connection.release(1, 8_000);
        for sent in peer.sent() {
            if (sent.kind, sent.stream) == (frame::WINDOW_UPDATE, 1) {
                left += u32::from_be_bytes(sent.payload[..].try_into().expect("four bytes"));
            }
        }
    }
}

/// One step of a client that reads responses.
#[derive(Clone, Debug)]
enum Grant {
    Connection(u32),
    Stream(u32),
    Initial(u32),
}

fn grant() -> impl Strategy<Value = Grant> {
    prop_oneof![
        (1_u32..30_000).prop_map(Grant::Connection),
        (1_u32..30_000).prop_map(Grant::Stream),
        (0_u32..70_000).prop_map(Grant::Initial),
    ]
}

/// Frames that a client may send, in any order and right or wrong.
fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let payload =
        prop_oneof![prop::collection::vec(any::<u8>(), 0..40), Just(block(&[])), Just(vec![0, 0, 0, 7])];
    prop_oneof![
        (0_u8..11, any::<u8>(), 0_u32..12, payload)
            .prop_map(|(kind, flags, stream, payload)| client_frame(kind, flags, stream, &payload)),
        (0_u32..8).prop_map(|stream| headers(stream * 2 + 1, 0, &[])),
        (0_u32..8, any::<bool>()).prop_map(|(stream, end)| client_frame(
            frame::DATA,
            u8::from(end),
            stream * 2 + 1,
            b"data"
        )),
    ]
}

proptest! {
    /// However bytes are cut, they mean the same.
    #[test]
    fn cuts_do_not_matter(frames in prop::collection::vec(any_frame(), 0..30), sizes in prop::collection::vec(1_usize..40, 1..8)) {
        let bytes = [&PREFACE[..], &settings(&[]), &frames.concat()].concat();
        let new = || Peer { connection: Connection::new(Settings { max_streams: 3, ..Settings::default() }), unread: Vec::new(), next: 0 };
        let (mut whole, mut cut) = (new(), new());
        let expected = whole.feed(&bytes);
        let (mut seen, mut rest, mut error, mut sizes) = (Vec::new(), &bytes[..], None, sizes.iter().cycle());
        while !rest.is_empty() && error.is_none() {
            let (part, after) = rest.split_at(rest.len().min(*sizes.next().expect("a cycle")));
            match cut.feed(part) {
                Ok(more) => seen.extend(more),
                Err(text) => error = Some(text),
            }
            rest = after;
        }
        match expected {
            Ok(all) => prop_assert_eq!((seen, error), (all, None)),
            Err(text) => prop_assert_eq!(error, Some(text)),
        }
        prop_assert_eq!(whole.sent(), cut.sent());
        prop_assert!(whole.connection.open() <= 3);
    }

    /// A response never exceeds what the client allows, and all of it arrives when it does.
    #[test]
    fn responses_keep_within_the_windows(length in 0_usize..200_000, parts in any::<bool>(), grants in prop::collection::vec(grant(), 0..40)) {
        let mut peer = peer();
        peer.feed(&headers(1, 1, &[])).expect("valid");
        let body: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        if parts {
            peer.connection.send_head(1, b"\x88");
            body.chunks(7_000).for_each(|part| peer.connection.send_data(1, part));
            peer.connection.send_end(1, Some(b"\x89"));
        } else {
            peer.connection.respond(1, b"\x88", |out| out.put_slice(&body), b"\x89");
        }
        // The last grants allow everything.
        let all = [Grant::Initial(65_535), Grant::Connection(1 << 30), Grant::Stream(1 << 30)];
        let (mut connection, mut credit, mut initial) = (65_535_i64, 0_i64, 65_535_i64);
        let (mut received, mut has_ended) = (Vec::new(), false);
        for grant in [Grant::Connection(1)].into_iter().chain(grants).chain(all) {
            for sent in peer.sent() {
                prop_assert!(!has_ended || sent.stream != 1);
                if sent.kind == frame::DATA {
                    connection -= sent.payload.len() as i64;
                    credit -= sent.payload.len() as i64;
                    prop_assert!(connection >= 0 && (sent.payload.is_empty() || initial + credit >= 0));
                    received.extend_from_slice(&sent.payload);
                }
                has_ended |= sent.flags & frame::END_STREAM != 0 && sent.stream == 1;
            }
            let bytes = match grant {
                Grant::Connection(more) => {
                    connection += i64::from(more);
                    window_update(0, more)
                }
                Grant::Stream(more) => {
                    credit += i64::from(more);
                    window_update(1, more)
                }
                Grant::Initial(all) => {
                    initial = all.into();
                    settings(&[(4, all)])
                }
            };
            peer.feed(&bytes).expect("valid");
            peer.connection.send_waiting(usize::MAX);
        }
        for sent in peer.sent() {
            received.extend_from_slice(if sent.kind == frame::DATA { &sent.payload } else { &[] });
            has_ended |= sent.flags & frame::END_STREAM != 0 && sent.stream == 1;
        }
        prop_assert!(has_ended && received == body);
        prop_assert_eq!(peer.connection.open(), 0);
    }
}

mod hostile;
