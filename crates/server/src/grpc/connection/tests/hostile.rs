//! What a client could fill memory with, or keep others from being served by.

use super::*;
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

/// The beginning of a message that is longer than any part of it that is sent.
fn part_of_a_message() -> Vec<u8> {
    [&[0, 0, 0x0f, 0, 0][..], &[0; 16_000]].concat()
}

/// Fills the room for incomplete messages. Returns the next stream.
fn fill<S, F>(connection: &mut Settled<'_, S, F>) -> u32
where
    S: Fn(String) -> F,
    F: Future<Output = Result<String, Status>>,
{
    let mut stream = 1;
    while connection.partial <= MAX_PARTIAL {
        assert!(connection.on_bytes(&head(stream, 0, Echo::PATH, &[])));
        for _ in 0..4 {
            assert!(connection.on_bytes(&frame(0, 0, stream, &part_of_a_message())));
        }
        connection.http2.unsent().clear();
        stream += 2;
    }
    stream
}

const MANY: Settings = Settings { streams: 1024, ..SETTINGS };

/// What follows a whole message is collected by nobody.
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
    assert_eq!(connection.partial, 0);
}

#[tokio::test]
async fn streams_that_wait_for_room_are_remembered_once() {
    let (echo, drain, activity) = (Echo::default(), Drain::default(), Activity::default());
    let start = |request| echo.call(request);
    let mut connection = connection(&echo, start, &MANY, &drain, &activity);
    let stream = fill(&mut connection);
    assert!(connection.on_bytes(&head(stream, 0, Echo::PATH, &[])));
    for _ in 0..20_000 {
        assert!(connection.on_bytes(&frame(0, 0, stream, &[])));
    }
    assert!(connection.held.len() < 5_000, "empty parts: {}", connection.held.len());
    for stream in (stream + 2..stream + 20_000).step_by(2) {
        let frames = [
            head(stream, 0, Echo::PATH, &[]),
            frame(0, 0, stream, &[0]),
            frame(RST_STREAM, 0, stream, &[0; 4]),
        ];
        assert!(connection.on_bytes(&frames.concat()));
    }
    assert!(connection.held.len() < 5_000, "reset streams: {}", connection.held.len());
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
    // Only its head arrives in time.
    let mut ready = client.clone().ready().await.expect("open");
    let (late, mut body) = ready.send_request(head(), false).expect("sent");
    tokio::time::sleep(Duration::from_millis(30)).await;
    body.send_data(framed("late"), true).expect("sent");
    assert_eq!(end(late).await.1, "4");
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
