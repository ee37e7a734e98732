//! What a client could fill memory with, or keep others from being served by.

use super::*;
use crate::grpc::exchange;
use timers::KEEP_ALIVE;
use tollgate_http::server::connections::{ConnectionSlots, MIN_IDLE, WhenFull};

type Settled<'s, S, F> = GrpcConnection<'s, tokio::io::Empty, Echo, S, F>;

/// A connection without a socket, whose client has sent its preface and its settings.
fn connection<'s, S, F>(
    echo: &'s Echo,
    start: S,
    settings: &'s Settings,
    drain: &'s Drain,
    activity: &'s Activity,
) -> Settled<'s, S, F>
where
    S: Fn(String) -> F,
    F: Future<Output = Result<String, Status>>,
{
    let (_, health) = tonic_health::server::health_reporter();
    let io = tokio::io::empty();
    let mut connection = GrpcConnection::new(io, echo, start, Routes::new(health), settings, drain, activity);
    assert!(connection.on_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"));
    connection
}

const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const RST_STREAM: u8 = 3;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn head(stream: u32, flags: u8, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut block = BytesMut::from(&b"\x83\x86"[..]);
    for (name, value) in [&[(":path", path)], more].concat() {
        h2::encode_field(name.as_bytes(), value.as_bytes(), &mut block);
    }
    frame(HEADERS, 4 | flags, stream, &block)
}

const MANY: Settings = Settings { streams: 1024, ..SETTINGS };

/// What follows a whole message is not collected.
#[tokio::test]
async fn a_body_that_goes_on_after_its_message_is_refused() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    // A message of no bytes, and then more: at once, and later.
    for (stream, first) in [(1, 16_000), (3, 5)] {
        assert!(connection.on_bytes(&head(stream, 0, Echo::PATH, &[])));
        assert!(connection.on_bytes(&frame(0, 0, stream, &vec![0; first])));
        assert!(connection.on_bytes(&frame(0, 0, stream, &[0; 16_000])));
        assert!(connection.http2.data(stream).is_none(), "{stream}");
    }
    assert!(connection.on_bytes(&head(5, 0, Echo::PATH, &[])));
    assert_eq!(connection.incomplete.bytes(), KEPT, "its head");
    assert!(connection.on_bytes(&frame(RST_STREAM, 0, 5, &[0; 4])));
    assert_eq!(connection.incomplete.bytes(), 0);
}

/// A connection that only looks busy could not make room for another client.
#[tokio::test]
async fn half_a_request_of_another_service_is_not_busy() {
    for (flags, is_busy) in [(0, false), (END_STREAM, true)] {
        let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
        let start = |request| echo.call(request);
        let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
        // A call that waits: of the method, whose message has arrived, or of another service, which waits for one.
        assert!(connection.on_bytes(&head(1, 0, "/grpc.health.v1.Health/Watch", &[])));
        if flags == END_STREAM {
            assert!(connection.on_bytes(&head(3, 0, Echo::PATH, &[])));
            assert!(connection.on_bytes(&frame(0, END_STREAM, 3, &framed("wait 1"))));
        }
        poll_fn(|cx| Poll::Ready(connection.wait(cx, true).is_pending())).await;
        assert_eq!(activity.is_busy(), is_busy, "{flags}");
    }
}

/// One read of many small requests must not keep the thread from all others, nor fill the memory with responses.
#[tokio::test]
async fn a_step_begins_so_many_requests() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &MANY, &drain, &activity);
    let all: Vec<_> = (0..1_000).flat_map(|at| head(1 + 2 * at, END_STREAM, "/none", &[])).collect();
    assert!(connection.on_bytes(&all));
    assert!(connection.has_unread_frames && !connection.unread.is_empty());
    let mut steps = 1;
    while connection.has_unread_frames {
        connection.http2.unsent().clear();
        assert!(connection.on_bytes(&[]));
        steps += 1;
    }
    assert_eq!((steps, connection.unread.len()), (1_000_usize.div_ceil(MAX_EVENTS), 0));
}

/// A message that does not arrive in time holds no room for others, and one that arrives late is not charged.
#[tokio::test(start_paused = true)]
async fn a_deadline_passes_while_its_message_arrives() {
    let (server, client) = connect(SETTINGS).await;
    let mut ready = client.clone().ready().await.expect("open");
    let head = || request(Echo::PATH, &[("grpc-timeout", "20m")]);
    let (stalled, mut body) = ready.send_request(head(), false).expect("sent");
    body.send_data(framed("stalls").slice(..7), false).expect("sent");
    assert_eq!(end(stalled).await.1, "4");
    // Only its head arrives.
    let began = Instant::now();
    let mut ready = client.clone().ready().await.expect("open");
    let (late, _body) = ready.send_request(head(), false).expect("sent");
    let ended = tokio::time::timeout(Duration::from_secs(5), end(late)).await.expect("a status");
    assert_eq!((ended.1.as_str(), began.elapsed().as_millis()), ("4", 20));
    assert_eq!(server.echo.begun.load(Ordering::SeqCst), 0);
}

/// Calls that are given up at their deadline are still under way in the store, as those that are reset.
#[tokio::test(start_paused = true)]
async fn deadlines_are_no_way_around_the_maximum_of_calls() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    for at in 0..SETTINGS.streams {
        let stream = 1 + 2 * at;
        assert!(connection.on_bytes(&head(stream, 0, Echo::PATH, &[("grpc-timeout", "1m")])));
        assert!(connection.on_bytes(&frame(0, END_STREAM, stream, &framed(&format!("wait {at}")))));
    }
    tokio::time::advance(Duration::from_millis(2)).await;
    connection.end_overdue();
    assert_eq!((connection.calls.running(), connection.overdue), (0, u64::from(SETTINGS.streams)));
    assert!(poll_fn(|cx| Poll::Ready(connection.is_paused(cx))).await);
}

/// A check that fails by a bug answers so, and takes no other call of its proxy with it.
#[tokio::test]
async fn a_call_that_panics_ends_alone() {
    let (server, client) = connect(SETTINGS).await;
    let waits = begin(&client, "wait 1", &[]).await;
    assert_eq!(call(&client, "panic").await.1, "13");
    server.echo.finish("1").await;
    assert_eq!(end(waits).await.1, "0");
}

/// A connection that has freed what it had needed goes on.
#[tokio::test(start_paused = true)]
async fn what_an_idle_connection_had_needed_is_freed() {
    let (server, client) = connect(SETTINGS).await;
    for round in 0..3 {
        assert_eq!(call(&client, "x").await.1, "0", "{round}");
        tokio::time::sleep(3 * KEEP_ALIVE).await;
    }
    server.connection.abort();
}

/// A client that keeps its place by frames that ask for nothing would keep all others out with a few of them.
#[tokio::test(start_paused = true)]
async fn frames_that_are_no_request_keep_no_place() {
    const PRIORITY: u8 = 2;
    const PING: u8 = 6;
    let (echo, drain) = (Echo::default(), Drain::default());
    let start = |request| echo.call(request);
    let slots = ConnectionSlots::new(1, WhenFull::Wait);
    let client = std::net::Ipv4Addr::LOCALHOST.into();
    let slot = slots.admit(client).expect("room");
    let activity = slot.activity();
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    let mut receive = async |bytes: &[u8]| {
        assert!(connection.on_bytes(bytes));
        poll_fn(|cx| Poll::Ready(connection.wait(cx, true).is_pending())).await
    };
    // Heads without a message, and of what is no request.
    for bytes in [
        head(1, 0, Echo::PATH, &[]),
        head(3, 0, "/grpc.health.v1.Health/Watch", &[]),
        head(5, END_STREAM, Echo::PATH, &[("te", "gzip")]),
        frame(0, 0, 1, b"\0\0"),
        frame(PING, 1, 0, &[0; 8]),
    ] {
        receive(&bytes).await;
        assert!(activity.is_silent());
    }
    let call = [head(7, 0, Echo::PATH, &[]), frame(0, END_STREAM, 7, &framed("x"))].concat();
    receive(&call).await;
    assert!(!activity.is_silent() && !activity.is_busy());
    assert!(slots.admit(client).is_none(), "it was just used");
    for bytes in [frame(PING, 1, 0, &[0; 8]), frame(PRIORITY, 0, 9, &[0; 5])] {
        tokio::time::advance(MIN_IDLE * 2 / 3).await;
        receive(&bytes).await;
    }
    assert!(slots.admit(client).is_some() && activity.has_ended());
}

/// The first message of a stream that does not end is a request: Envoy's quota streams never end.
#[tokio::test]
async fn a_stream_with_a_message_is_not_silent() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    for (part, is_silent) in [(&b"\0\0\0"[..], true), (b"\0\0", false)] {
        if is_silent {
            assert!(connection.on_bytes(&head(1, 0, "/grpc.health.v1.Health/Watch", &[])));
        }
        assert!(connection.on_bytes(&frame(0, 0, 1, part)));
        poll_fn(|cx| Poll::Ready(connection.wait(cx, true).is_pending())).await;
        assert_eq!(activity.is_silent(), is_silent);
    }
}

/// A proxy that cannot go on with the message that the server waits for would wait for ever, with all its clients.
#[tokio::test(start_paused = true)]
async fn a_message_arrives_although_others_stall() {
    let (_server, client) = connect(SETTINGS).await;
    let whole = framed(&"z".repeat(1_000_000));
    let mut open = Vec::new();
    for _ in 0..20 {
        let mut ready = client.clone().ready().await.expect("open");
        let (response, mut body) = ready.send_request(request(Echo::PATH, &[]), false).expect("sent");
        body.send_data(whole.slice(..900_000), false).expect("sent");
        open.push((response, body));
    }
    // All that the server lets them send has arrived.
    tokio::time::sleep(Duration::from_millis(1)).await;
    let other = tokio::time::timeout(Duration::from_secs(1), call(&client, &"x".repeat(300_000))).await;
    assert_eq!(other.expect("a response").1, "0");
}

/// Half requests must not keep streams for ever. Streams that have sent a message, and calls that wait for the store, go on.
#[tokio::test(start_paused = true)]
async fn a_message_that_does_not_arrive_ends_its_call() {
    let (server, client) = connect(SETTINGS).await;
    let began = Instant::now();
    let running = begin(&client, "wait 1", &[]).await;
    let watch = begin_other(&client, "/grpc.health.v1.Health/Watch").await.await.expect("a response");
    let mut open = Vec::new();
    for (path, part) in
        [(Echo::PATH, &b""[..]), (Echo::PATH, b"\0\0\0\0\x05ab"), ("/grpc.health.v1.Health/Check", b"\0")]
    {
        let mut ready = client.clone().ready().await.expect("open");
        let (response, mut body) = ready.send_request(request(path, &[]), false).expect("sent");
        body.send_data(Bytes::from_static(part), false).expect("sent");
        open.push((response, body));
    }
    for (response, _body) in open {
        let ended = tokio::time::timeout(Duration::from_secs(60), end(response)).await.expect("it is ended");
        assert_eq!(ended.1, "4");
        assert!((20..=30).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    server.echo.finish("1").await;
    assert_eq!(end(running).await.1, "0");
    let mut watched = watch.into_body();
    watched.data().await.expect("a message").expect("data");
    assert!(tokio::time::timeout(Duration::from_secs(1), watched.data()).await.is_err(), "it is open");
}

/// A window for much at a time must not have all of it copied at once, and what is left must be sent without another one.
#[tokio::test]
async fn responses_that_have_waited_are_all_sent() {
    const CALLS: u32 = 20;
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    let window = |bytes: u32| frame(4, 0, 0, &[&[0, 4][..], &bytes.to_be_bytes()].concat());
    assert!(connection.on_bytes(&window(0)));
    let message = framed(&"z".repeat(16_000));
    for at in 0..CALLS {
        let call = [head(1 + 2 * at, 0, Echo::PATH, &[]), frame(0, END_STREAM, 1 + 2 * at, &message)];
        assert!(connection.on_bytes(&call.concat()));
    }
    assert_eq!(connection.http2.open(), CALLS as usize);
    let all = [window(1 << 20), frame(8, 0, 0, &(1_u32 << 30).to_be_bytes())].concat();
    assert!(connection.on_bytes(&all));
    assert!(poll_fn(|cx| Poll::Ready(connection.poll_send(cx).is_ok_and(|sent| sent.is_ready()))).await);
    assert_eq!(connection.http2.open(), 0);
}

/// A stream that is always open must not keep the memory of the largest response.
#[tokio::test]
async fn the_buffer_of_a_large_response_is_freed() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &SETTINGS, &drain, &activity);
    connection.http2.unsent().extend_from_slice(&[0; 4 * MAX_UNSENT]);
    assert!(poll_fn(|cx| Poll::Ready(connection.poll_send(cx).is_ok_and(|sent| sent.is_ready()))).await);
    let out = connection.http2.unsent();
    out.reserve(MAX_UNSENT);
    assert!(out.capacity() < 2 * MAX_UNSENT, "{}", out.capacity());
}

/// References of a byte to fields must not become maps of a hundred bytes each, nor fail for an authority that is none.
#[tokio::test]
async fn a_request_keeps_the_fields_that_services_read() {
    let mut http2 = Connection::<()>::new(h2::Settings::default());
    let mut block = BytesMut::from(&b"\x83\x86"[..]);
    for (name, value) in [
        (":path", "/a"),
        (":authority", "work%2Fa.sock"),
        ("content-type", "application/grpc"),
        ("grpc-encoding", "gzip"),
        ("x", "y"),
    ] {
        h2::encode_field(name.as_bytes(), value.as_bytes(), &mut block);
    }
    block.extend_from_slice(&[&b"\x40\x01z\0"[..], &[0xbe; 400]].concat());
    let bytes = [&h2::PREFACE[..], &frame(4, 0, 0, b""), &frame(HEADERS, 4, 1, &block)].concat();
    let mut read = 0;
    while http2.open() == 0 {
        read += http2.receive(&bytes[read..], || ()).expect("valid").consumed;
    }
    let request = exchange::request(http2.head(), Inbox::new().body()).expect("a request");
    assert_eq!((request.uri().path(), request.uri().authority()), ("/a", None));
    assert_eq!((request.headers().len(), request.headers()["grpc-encoding"].as_bytes()), (2, &b"gzip"[..]));
    assert!(request.headers().capacity() < 20);
}
