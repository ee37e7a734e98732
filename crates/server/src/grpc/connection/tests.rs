//! Connections in memory, with the client of another library.

use super::*;
use crate::grpc::message;
use ::h2::client::{ResponseFuture, SendRequest};
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tollgate_http::h2::Head;
use tonic::codegen::http::{HeaderMap, Method, Request, StatusCode};

/// What is counted for a head.
const KEPT: usize = 100;

/// A method that returns its message: at once, or after `wait NAME` when the test says so.
#[derive(Default)]
struct Echo {
    waiting: Mutex<HashMap<String, oneshot::Sender<()>>>,
    begun: AtomicUsize,
    dropped: AtomicUsize,
}

struct CountDrop<'a>(&'a AtomicUsize);

impl Drop for CountDrop<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Unary for Echo {
    const PATH: &'static str = "/test.Echo/Echo";
    type Opening = ();
    type Request = String;
    type Response = String;

    fn open(&self, _: &Head) {}

    fn kept(&(): &()) -> usize {
        KEPT
    }

    fn decode(&self, (): (), message: &[u8]) -> Result<String, Status> {
        prost::Message::decode(message).map_err(|_| Status::invalid_argument("malformed"))
    }

    async fn call(&self, message: String) -> Result<String, Status> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let _count = CountDrop(&self.dropped);
        assert_ne!(message, "panic", "as the test asked for");
        if let Some(name) = message.strip_prefix("wait ") {
            let (sender, receiver) = oneshot::channel();
            self.waiting.lock().expect("no panic").insert(name.to_owned(), sender);
            let _ = receiver.await;
        }
        if message == "fail" { Err(Status::unavailable("not now: 100%")) } else { Ok(message) }
    }
}

impl Echo {
    /// Lets a call go on, once it waits.
    async fn finish(&self, name: &str) {
        loop {
            if let Some(sender) = self.waiting.lock().expect("no panic").remove(name) {
                return sender.send(()).expect("it waits");
            }
            tokio::task::yield_now().await;
        }
    }
}

struct Server {
    echo: Arc<Echo>,
    drain: Arc<Drain>,
    connection: JoinHandle<()>,
}

/// Serves one end of a connection, and returns the other.
fn serve_one(settings: Settings) -> (Server, DuplexStream) {
    let (echo, drain) = (Arc::new(Echo::default()), Arc::new(Drain::default()));
    let (client, io) = tokio::io::duplex(16 << 10);
    let (of_task, drain_of_task) = (Arc::clone(&echo), Arc::clone(&drain));
    let (_, health) = tonic_health::server::health_reporter();
    let others = Routes::new(health);
    let connection = tokio::spawn(async move {
        let guard = drain_of_task.enter();
        serve(io, &*of_task, others, &settings, &drain_of_task, &Activity::default()).await;
        drop(guard);
    });
    (Server { echo, drain, connection }, client)
}

const SETTINGS: Settings =
    Settings { message_bytes: 1 << 20, streams: 100, max_age: None, max_age_grace: None };

async fn connect(settings: Settings) -> (Server, SendRequest<Bytes>) {
    let (server, io) = serve_one(settings);
    let (client, connection) = ::h2::client::handshake(io).await.expect("HTTP/2");
    tokio::spawn(connection);
    (server, client)
}

/// Like [`connect`], with a client that does not limit what it is sent on the connection, but on each stream.
async fn connect_with_window(settings: Settings, stream: u32) -> (Server, SendRequest<Bytes>) {
    let (server, io) = serve_one(settings);
    let mut builder = ::h2::client::Builder::new();
    builder.initial_connection_window_size(1 << 30).initial_window_size(stream);
    let (client, connection) = builder.handshake(io).await.expect("HTTP/2");
    tokio::spawn(connection);
    (server, client)
}

fn request(path: &str, fields: &[(&'static str, &'static str)]) -> Request<()> {
    let mut request = Request::builder().method(Method::POST).uri(format!("http://x{path}"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).expect("valid")
}

/// A message with its length, of a string field.
fn framed(text: &str) -> Bytes {
    let mut out = BytesMut::new();
    message::put(&text.to_owned(), &mut out);
    out.freeze()
}

/// Begins a call of the method.
async fn begin(
    client: &SendRequest<Bytes>,
    text: &str,
    fields: &[(&'static str, &'static str)],
) -> ResponseFuture {
    let mut ready = client.clone().ready().await.expect("open");
    let (response, mut body) = ready.send_request(request(Echo::PATH, fields), false).expect("sent");
    body.send_data(framed(text), true).expect("sent");
    response
}

/// Returns the text and the status of a response.
async fn end(response: ResponseFuture) -> (String, String) {
    let response = response.await.expect("a response");
    assert_eq!(response.status(), StatusCode::OK);
    let status = |fields: &HeaderMap| {
        fields.get("grpc-status").map(|status| status.to_str().expect("digits").to_owned())
    };
    let at_once = status(response.headers());
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(part) = body.data().await {
        let part = part.expect("data");
        body.flow_control().release_capacity(part.len()).expect("received");
        bytes.extend_from_slice(&part);
    }
    let trailers = body.trailers().await.expect("an end");
    let text = bytes.get(message::PREFIX..).map(|message| prost::Message::decode(message).expect("a string"));
    (text.unwrap_or_default(), at_once.or_else(|| status(&trailers?)).expect("a status"))
}

async fn call(client: &SendRequest<Bytes>, text: &str) -> (String, String) {
    end(begin(client, text, &[]).await).await
}

#[tokio::test]
async fn calls_are_answered_when_they_are_decided() {
    let (server, client) = connect(SETTINGS).await;
    assert_eq!(call(&client, "now").await, ("now".into(), "0".into()));
    let (first, second) = (begin(&client, "wait 1", &[]).await, begin(&client, "wait 2", &[]).await);
    server.echo.finish("2").await;
    assert_eq!(end(second).await.0, "wait 2");
    assert_eq!(call(&client, "fail").await, (String::new(), "14".into()));
    server.echo.finish("1").await;
    assert_eq!(end(first).await.0, "wait 1");
}

/// Many calls that are decided later, in another order, on places that are used again.
#[tokio::test]
async fn many_calls_are_in_progress_at_a_time() {
    let (server, client) = connect(SETTINGS).await;
    for _ in 0..3 {
        let mut calls = Vec::new();
        for at in 0..100 {
            calls.push(begin(&client, &format!("wait {at}"), &[]).await);
        }
        for at in (0..100).rev() {
            server.echo.finish(&at.to_string()).await;
        }
        for (at, call) in calls.into_iter().enumerate() {
            assert_eq!(end(call).await.0, format!("wait {at}"));
        }
    }
    assert_eq!(server.echo.dropped.load(Ordering::SeqCst), 300);
}

/// A client that gives up must not be charged: dropping the call is how the engine learns of it.
#[tokio::test]
async fn a_call_that_its_client_gives_up_is_dropped_alone() {
    let (server, client) = connect(SETTINGS).await;
    let kept = begin(&client, "wait kept", &[]).await;
    let given_up = begin(&client, "wait gone", &[]).await;
    while server.echo.begun.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    drop(given_up);
    while server.echo.dropped.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let reused = begin(&client, "wait reused", &[]).await;
    server.echo.finish("reused").await;
    assert_eq!(end(reused).await.0, "wait reused");
    server.echo.finish("kept").await;
    assert_eq!(end(kept).await.0, "wait kept");
}

/// A response that waits for its client's window is no longer in a place; giving it up must not drop the call that is.
#[tokio::test]
async fn giving_up_an_unread_response_drops_no_other_call() {
    let (server, client) = connect(SETTINGS).await;
    let long = "x".repeat(200_000);
    let unread = begin(&client, &long, &[]).await.await.expect("a head");
    let waiting = begin(&client, "wait 1", &[]).await;
    while server.echo.begun.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    drop(unread);
    assert_eq!(call(&client, "next").await.0, "next");
    server.echo.finish("1").await;
    assert_eq!(end(waiting).await.0, "wait 1");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_its_call() {
    let (server, client) = connect(SETTINGS).await;
    let later = begin(&client, "wait later", &[("grpc-timeout", "5S")]).await;
    let soon = begin(&client, "wait soon", &[("grpc-timeout", "20m")]).await;
    let never = begin(&client, "wait never", &[]).await;
    let began = Instant::now();
    assert_eq!(end(soon).await.1, "4");
    assert_eq!(began.elapsed().as_millis(), 20);
    assert_eq!(end(later).await.1, "4");
    assert_eq!(began.elapsed().as_secs(), 5);
    server.echo.finish("never").await;
    assert_eq!(end(never).await.1, "0");
}

#[tokio::test]
async fn messages_arrive_in_any_parts_and_sizes() {
    let (_server, client) = connect(SETTINGS).await;
    let long = "y".repeat(700_000);
    assert_eq!(call(&client, &long).await, (long, "0".into()));
    let mut ready = client.clone().ready().await.expect("open");
    let (response, mut body) = ready.send_request(request(Echo::PATH, &[]), false).expect("sent");
    for byte in framed("in parts").chunks(1) {
        body.send_data(Bytes::copy_from_slice(byte), false).expect("sent");
    }
    body.send_trailers(HeaderMap::new()).expect("sent");
    assert_eq!(end(response).await.0, "in parts");
}

#[tokio::test]
async fn what_is_no_message_has_a_status_that_says_so() {
    let (_server, client) = connect(SETTINGS).await;
    for (body, status) in [
        (&b""[..], "13"),
        (b"\0\0\0\0", "13"),
        (b"\0\0\0\0\x05ab", "13"),
        (b"\0\0\0\0\0\0\0\0\0\0", "13"),
        (b"\x01\0\0\0\x01a", "12"),
        (b"\0\x7f\xff\xff\xff", "11"),
        (b"\0\0\0\0\x02\x0a\xff", "3"),
    ] {
        let mut ready = client.clone().ready().await.expect("open");
        let (response, mut sender) = ready.send_request(request(Echo::PATH, &[]), false).expect("sent");
        let _ = sender.send_data(Bytes::from_static(body), true);
        assert_eq!(end(response).await.1, status, "{body:?}");
    }
    let mut ready = client.clone().ready().await.expect("open");
    let (response, _) = ready.send_request(request(Echo::PATH, &[]), true).expect("sent");
    assert_eq!(end(response).await.1, "13");
}

/// Messages that never end are not collected without a bound, and many large ones at a time all arrive: one that is rejected
/// would be a request without limits behind a proxy that fails open.
#[tokio::test(start_paused = true)]
async fn incomplete_messages_are_bounded_and_none_is_rejected() {
    const STREAMS: usize = 60;
    let text = "z".repeat(400_000);
    let whole = framed(&text);
    let (_server, client) = connect_with_window(SETTINGS, 1 << 20).await;
    let mut calls = Vec::new();
    for _ in 0..STREAMS {
        let mut ready = client.clone().ready().await.expect("open");
        let (response, mut body) = ready.send_request(request(Echo::PATH, &[]), false).expect("sent");
        body.reserve_capacity(whole.len());
        calls.push((response, body, 0));
    }
    // All but the last byte of each, as far as the server lets them.
    let mut sent = 0;
    loop {
        let more = poll_fn(|cx| {
            let mut more = 0;
            for (_, body, at) in &mut calls {
                while let Poll::Ready(Some(Ok(capacity))) = body.poll_capacity(cx) {
                    let end = (*at + capacity).min(whole.len() - 1);
                    if end == *at {
                        break;
                    }
                    more += end - *at;
                    body.send_data(whole.slice(*at..end), false).expect("sent");
                    *at = end;
                }
            }
            if more > 0 { Poll::Ready(more) } else { Poll::Pending }
        });
        // The time passes when nothing else can happen.
        match tokio::time::timeout(Duration::from_millis(1), more).await {
            Ok(more) => sent += more,
            Err(_) => break,
        }
    }
    assert!((incomplete::ROOM..incomplete::ROOM + (STREAMS + 10) * 65_535).contains(&sent), "{sent}");
    for (_, body, at) in &mut calls {
        body.send_data(whole.slice(*at..), true).expect("sent");
    }
    // Together, because they share the window of the connection.
    for answered in
        futures_util::future::join_all(calls.into_iter().map(|(response, ..)| end(response))).await
    {
        assert_eq!(answered, (text.clone(), "0".into()));
    }
}

/// Messages that are given up make room for others.
#[tokio::test(start_paused = true)]
async fn messages_that_are_given_up_make_room() {
    let (_server, client) = connect(SETTINGS).await;
    let whole = framed(&"z".repeat(1_000_000));
    for _ in 0..3 {
        let mut open = Vec::new();
        for _ in 0..20 {
            let mut ready = client.clone().ready().await.expect("open");
            let (response, mut body) = ready.send_request(request(Echo::PATH, &[]), false).expect("sent");
            body.send_data(whole.slice(..900_000), false).expect("sent");
            open.push((response, body));
        }
        assert_eq!(call(&client, &"x".repeat(300_000)).await.1, "0");
    }
}

/// A client that sends and never reads must not fill the memory.
#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_is_not_read_from() {
    let (server, mut client) = serve_one(SETTINGS);
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sent");
    let pings = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8].repeat(1_000);
    let mut sent = 0;
    let all = async {
        for _ in 0..100 {
            client.write_all(&pings).await.expect("open");
            sent += pings.len();
        }
    };
    let full = tokio::time::timeout(Duration::from_secs(1), all).await;
    assert!(full.is_err() && sent < 20 * MAX_UNSENT, "{sent}");
    // It goes on when the client reads.
    client.read_exact(&mut vec![0; 100_000]).await.expect("answers");
    client.write_all(&pings).await.expect("open");
    server.connection.abort();
}

#[tokio::test]
async fn draining_finishes_the_calls_in_progress() {
    let (server, client) = connect(SETTINGS).await;
    let running = begin(&client, "wait 1", &[]).await;
    while server.echo.begun.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let drain = Arc::clone(&server.drain);
    let drained = tokio::spawn(async move { drain.run().await });
    let refused = async {
        // The client learns of it at some point.
        while let Ok(mut ready) = client.clone().ready().await {
            let Ok((response, _)) = ready.send_request(request(Echo::PATH, &[]), true) else { break };
            if response.await.is_err() {
                break;
            }
        }
    };
    refused.await;
    server.echo.finish("1").await;
    assert_eq!(end(running).await, ("wait 1".into(), "0".into()));
    drained.await.expect("the connection ends");
    server.connection.await.expect("no panic");
}

/// What clients neither complete nor read must not keep a server from its end; what the store decides is waited for.
#[tokio::test(start_paused = true)]
async fn draining_ends_what_clients_do_not_complete_or_read() {
    let (server, client) = connect_with_window(SETTINGS, 60_000).await;
    let running = begin(&client, "wait 1", &[]).await;
    let unread = begin(&client, &"x".repeat(200_000), &[]).await.await.expect("a head");
    let mut open = Vec::new();
    for (path, part) in [
        (Echo::PATH, &b"\0\0\0"[..]),
        ("/grpc.health.v1.Health/Check", b""),
        // A message, and no end.
        ("/grpc.health.v1.Health/Check", b"\0\0\0\0\0"),
    ] {
        let mut ready = client.clone().ready().await.expect("open");
        let (response, mut body) = ready.send_request(request(path, &[]), false).expect("sent");
        body.send_data(Bytes::from_static(part), false).expect("sent");
        open.push((response, body));
    }
    let watch = begin_other(&client, "/grpc.health.v1.Health/Watch").await.await.expect("a response");
    while server.echo.begun.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    let drain = Arc::clone(&server.drain);
    let drained = tokio::spawn(async move { drain.run().await });
    for (response, _body) in open {
        let ended = tokio::time::timeout(Duration::from_secs(3), end(response)).await.expect("it is ended");
        assert_eq!(ended.1, "14");
    }
    tokio::time::sleep_until(began + Duration::from_secs(3)).await;
    server.echo.finish("1").await;
    assert_eq!(end(running).await.1, "0");
    // A watch is the service's to end.
    drop(watch);
    tokio::time::timeout(Duration::from_secs(1), drained)
        .await
        .expect("the connection ends")
        .expect("no panic");
    drop(unread);
}

/// Begins a call of another service with an empty message.
async fn begin_other(client: &SendRequest<Bytes>, path: &str) -> ResponseFuture {
    let mut ready = client.clone().ready().await.expect("open");
    let (response, mut body) = ready.send_request(request(path, &[]), false).expect("sent");
    body.send_data(Bytes::from_static(b"\0\0\0\0\0"), true).expect("sent");
    response
}

#[tokio::test]
async fn other_services_are_served_with_streams() {
    let (_server, client) = connect(SETTINGS).await;
    let get = |path| begin_other(&client, path);
    let check = get("/grpc.health.v1.Health/Check").await.await.expect("a response");
    let mut body = check.into_body();
    assert_eq!(body.data().await.expect("a message").expect("data"), &b"\0\0\0\0\x02\x08\x01"[..]);
    assert_eq!(body.trailers().await.expect("an end").expect("trailers")["grpc-status"], "0");
    let watch = get("/grpc.health.v1.Health/Watch").await.await.expect("a response");
    let mut watched = watch.into_body();
    assert_eq!(watched.data().await.expect("a message").expect("data"), &b"\0\0\0\0\x02\x08\x01"[..]);
    assert_eq!(end(get("/grpc.health.v1.Health/Other").await).await.1, "12");
    assert_eq!(end(get("/no.Such/Method").await).await.1, "12");
}

mod hostile;
