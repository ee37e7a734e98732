//! The HTTP/1 server over real sockets, with a service that acts by the path of a request. The tests cover both sides:
//! what clients receive, and what the service observes.

mod service;

use bytes::BytesMut;
use service::{ByPath, SETTINGS, Server};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tollgate_http::server::accept::NewConnections;
use tollgate_http::server::connections::{Activity, WhenFull};
use tollgate_http::server::{self, Drain, Io, Settings};

/// Reads until the server closes the connection.
async fn rest(client: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).await.expect("an end, and no reset");
    String::from_utf8(bytes).expect("text")
}

/// Reads until the text ends with `end`.
async fn until(client: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        let byte = client.read_u8().await.unwrap_or_else(|error| panic!("{error} after {text}"));
        text.push(byte as char);
    }
    text
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: t\r\n\r\n")
}

fn post(path: &str, fields: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: t\r\n{fields}\r\n{body}")
}

/// Pipelined responses take one system call, not one each.
#[tokio::test]
async fn pipelined_requests_are_answered_in_order_in_one_write() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let requests: String =
        (0..20).map(|at| post("/echo", "content-length: 2\r\n", &format!("{at:02}"))).collect();
    client.write_all(requests.as_bytes()).await.expect("sent");
    let mut bytes = vec![0; 64 * 1024];
    let read = client.read(&mut bytes).await.expect("responses");
    let text = String::from_utf8_lossy(&bytes[..read]);
    let bodies: Vec<&str> = text.split("\r\n\r\n").skip(1).map(|part| &part[..2]).collect();
    let expected: Vec<String> = (0..20).map(|at| format!("{at:02}")).collect();
    assert_eq!(bodies, expected);
}

/// A slow request delays those after it, never those before it.
#[tokio::test]
async fn responses_do_not_wait_for_the_request_behind_them() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let both = post("/echo", "content-length: 3\r\n", "one") + &get("/wait") + &get("/two");
    client.write_all(both.as_bytes()).await.expect("sent");
    assert!(until(&mut client, "one").await.starts_with("HTTP/1.1 200 OK\r\n"));
    server.signals.go_on.notify_one();
    until(&mut client, "waited").await;
    until(&mut client, "/two").await;
}

/// A request whose client has disconnected must release its permits.
#[tokio::test]
async fn a_client_that_leaves_drops_its_request() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.write_all(get("/wait").as_bytes()).await.expect("sent");
    server.signals.begun.notified().await;
    drop(client);
    server.signals.dropped.notified().await;
}

/// A client that has finished sending receives its response, and those that it pipelined, also if they take a while.
#[tokio::test]
async fn a_client_that_closes_its_direction_is_answered() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.write_all((get("/wait") + &get("/next")).as_bytes()).await.expect("sent");
    client.shutdown().await.expect("closed");
    server.signals.begun.notified().await;
    // The server shares this thread: it sees the end before the handler continues.
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    server.signals.go_on.notify_one();
    let text = rest(&mut client).await;
    assert!(text.contains("waited") && text.ends_with("/next"), "{text}");
}

/// A client that waits for `100 Continue` receives it if and only if the body is read.
#[tokio::test]
async fn continue_is_sent_only_if_the_body_is_read() {
    let server = Server::start().await;
    let expecting = "content-length: 4\r\nexpect: 100-continue\r\n";
    for path in ["/echo", "/pull"] {
        let mut client = server.connect().await;
        client.write_all(post(path, expecting, "").as_bytes()).await.expect("sent");
        assert_eq!(until(&mut client, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n", "{path}");
        client.write_all(b"body").await.expect("sent");
        assert!(until(&mut client, "body").await.starts_with("HTTP/1.1 200 OK\r\n"), "{path}");
    }
    let mut client = server.connect().await;
    client.write_all(post("/skip", expecting, "").as_bytes()).await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("/skip"), "{text}");
}

/// Chunked bodies are read completely; malformed, too large and skipped bodies do not corrupt the next request.
#[tokio::test]
async fn bodies_are_delimited_correctly() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let chunked = "transfer-encoding: chunked\r\n";
    client
        .write_all(post("/echo", chunked, "3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nt: 1\r\n\r\n").as_bytes())
        .await
        .expect("sent");
    until(&mut client, "abcd").await;
    // Larger than the limit: the body is discarded and the connection stays open.
    let large = "x".repeat(200);
    client.write_all(post("/echo", "content-length: 200\r\n", &large).as_bytes()).await.expect("sent");
    assert!(until(&mut client, "too large").await.starts_with("HTTP/1.1 413 "));
    let chunks = format!("c8\r\n{large}\r\n0\r\n\r\n");
    client.write_all(post("/echo", chunked, &chunks).as_bytes()).await.expect("sent");
    assert!(until(&mut client, "too large").await.starts_with("HTTP/1.1 413 "));
    client
        .write_all((post("/skip", "content-length: 5\r\n", "GET /") + &get("/next")).as_bytes())
        .await
        .expect("sent");
    until(&mut client, "/skip").await;
    until(&mut client, "/next").await;
    client.write_all(post("/echo", chunked, "zz\r\n").as_bytes()).await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 400 ") && text.contains("connection: close\r\n"), "{text}");
}

/// Unread bytes from a client must not cause a reset, which could lose the response.
#[tokio::test]
async fn the_last_response_arrives_though_the_client_goes_on_sending() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    let request = post("/skip", "content-length: 500000\r\n", &"x".repeat(400_000));
    client.write_all(request.as_bytes()).await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.contains("connection: close\r\n") && text.ends_with("/skip"), "{text}");
    let mut client = server.connect().await;
    client.write_all(&[b"bad request\r\n\r\n".as_slice(), &[b'x'; 400_000]].concat()).await.expect("sent");
    assert!(rest(&mut client).await.starts_with("HTTP/1.1 400 "));
}

/// Slow clients receive a 408; idle connections are closed without a response.
#[tokio::test]
async fn slow_and_idle_clients_time_out() {
    let settings = Settings {
        header_timeout: Duration::from_secs(1),
        idle_timeout: Some(Duration::from_secs(2)),
        body_timeout: Duration::from_secs(1),
        ..SETTINGS
    };
    let server = Server::with_settings(settings, 64, WhenFull::Wait, NewConnections::Reject).await;
    for (sent, expected) in
        [("GET / HT", "HTTP/1.1 408 "), (&post("/echo", "content-length: 9\r\n", "x")[..], "HTTP/1.1 408 ")]
    {
        let mut client = server.connect().await;
        client.write_all(sent.as_bytes()).await.expect("sent");
        let text = rest(&mut client).await;
        assert!(text.starts_with(expected), "{sent}: {text}");
    }
    let mut client = server.connect().await;
    client.write_all(get("/a").as_bytes()).await.expect("sent");
    assert!(rest(&mut client).await.ends_with("/a"), "nothing follows the response");
}

/// The client can detect the end of a body, however it is streamed.
#[tokio::test]
async fn streamed_bodies_are_delimited() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.write_all(get("/stream/known").as_bytes()).await.expect("sent");
    let text = until(&mut client, "onetwo").await;
    assert!(text.contains("content-length: 6\r\n") && text.contains("x-own: 1\r\n"), "{text}");
    client.write_all(get("/stream/unknown").as_bytes()).await.expect("sent");
    let text = until(&mut client, "0\r\n\r\n").await;
    assert!(text.contains("transfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n"), "{text}");
    client.write_all(b"HEAD /stream/known HTTP/1.1\r\nhost: t\r\n\r\n").await.expect("sent");
    let text = until(&mut client, "\r\n\r\n").await;
    assert!(text.contains("content-length: 6\r\n"), "{text}");
    client.write_all(b"GET /stream/unknown HTTP/1.0\r\nhost: t\r\n\r\n").await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.contains("connection: close\r\n") && text.ends_with("\r\n\r\nonetwo"), "{text}");
    // A body that fails is truncated without its last chunk.
    let mut client = server.connect().await;
    client.write_all(get("/stream/fails").as_bytes()).await.expect("sent");
    let text = rest(&mut client).await;
    assert!(!text.ends_with("0\r\n\r\n"), "{text}");
}

/// After an upgrade the service owns the connection, including bytes that the client has already sent.
#[tokio::test]
async fn an_upgrade_takes_the_connection_over() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.write_all((get("/upgrade") + "early").as_bytes()).await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.starts_with("HTTP/1.1 101 ") && text.ends_with("\r\n\r\nearly"), "{text}");
}

/// HTTP/1.0 clients may keep the connection alive; the response confirms it.
#[tokio::test]
async fn connections_stay_open_as_the_client_requests() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.write_all(b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").await.expect("sent");
    assert!(until(&mut client, "/a").await.contains("connection: keep-alive\r\n"));
    client.write_all(b"GET /b HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").await.expect("sent");
    let text = rest(&mut client).await;
    assert!(text.contains("connection: close\r\n") && text.ends_with("/b"), "{text}");
}

/// A shutdown completes requests in flight, closes idle connections, and still responds to a probe.
#[tokio::test]
async fn draining_loses_no_request() {
    let server = Server::with(8, WhenFull::Wait, NewConnections::Serve).await;
    let (mut idle, mut busy, mut fresh) =
        (server.connect().await, server.connect().await, server.connect().await);
    idle.write_all(get("/a").as_bytes()).await.expect("sent");
    until(&mut idle, "/a").await;
    busy.write_all(get("/wait").as_bytes()).await.expect("sent");
    server.signals.begun.notified().await;
    server.stop.notify_one();
    assert_eq!(rest(&mut idle).await, "");
    // A new connection may have a request in transit.
    fresh.write_all(get("/first").as_bytes()).await.expect("sent");
    let text = rest(&mut fresh).await;
    assert!(text.contains("connection: close\r\n") && text.ends_with("/first"), "{text}");
    let mut probe = server.connect().await;
    probe.write_all(get("/probe").as_bytes()).await.expect("sent");
    until(&mut probe, "/probe").await;
    server.signals.go_on.notify_one();
    let text = rest(&mut busy).await;
    assert!(text.contains("connection: close\r\n") && text.ends_with("waited"), "{text}");
    drop(probe);
    tokio::time::timeout(Duration::from_secs(30), server.ended).await.expect("it ends").expect("well");
}

/// Tasks may wake spuriously, also between the start of a drain and its signal.
#[tokio::test]
async fn a_new_connection_keeps_its_grace_period_however_often_it_is_polled() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut client = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("connected");
    let (stream, _) = listener.accept().await.expect("accepted");
    let drain = Arc::new(Drain::default());
    let guard = drain.enter();
    let serve = async {
        let service = ByPath(Arc::default());
        let activity = Arc::new(Activity::default());
        server::serve(Io::Tcp(stream), BytesMut::new(), &SETTINGS, &drain, &activity, &service).await;
        drop(guard);
    };
    let request = async {
        // Each yield polls the other two futures as well.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        client.write_all(get("/first").as_bytes()).await.expect("sent");
        rest(&mut client).await
    };
    let (text, ..) = tokio::join!(request, drain.run(), serve);
    assert!(text.contains("connection: close\r\n") && text.ends_with("/first"), "{text}");
}

/// An empty line before a request is ignored, however its bytes arrive.
#[tokio::test]
async fn an_empty_line_before_a_request_is_ignored() {
    let server = Server::start().await;
    for pieces in [&["\r\nGET /a"][..], &["\r", "\nGET /a"], &["\r\n", "GET /a"], &["\r\n\r", "\nGET /a"]] {
        let mut client = server.connect().await;
        client.set_nodelay(true).expect("set");
        for piece in pieces {
            client.write_all(piece.as_bytes()).await.expect("sent");
            // The server shares this thread: it has read the piece before the next is sent.
            for _ in 0..500 {
                tokio::task::yield_now().await;
            }
        }
        client.write_all(b" HTTP/1.1\r\nhost: t\r\n\r\n").await.expect("sent");
        assert!(until(&mut client, "/a").await.starts_with("HTTP/1.1 200 OK\r\n"), "{pieces:?}");
    }
}

/// The number of connections is bounded: one too many waits for a slot, or is rejected.
#[tokio::test]
async fn connections_are_bounded() {
    let server = Server::with(1, WhenFull::Wait, NewConnections::Reject).await;
    let mut first = server.connect().await;
    first.write_all(get("/wait").as_bytes()).await.expect("sent");
    server.signals.begun.notified().await;
    let mut second = server.connect().await;
    second.write_all(get("/second").as_bytes()).await.expect("sent");
    let mut byte = [0];
    let early = tokio::time::timeout(Duration::from_millis(20), second.peek(&mut byte)).await;
    assert!(early.is_err(), "there is one slot, and its request is under way");
    drop(first);
    until(&mut second, "/second").await;
    let server = Server::with(1, WhenFull::Reject(b"full\n"), NewConnections::Reject).await;
    let mut first = server.connect().await;
    first.write_all(get("/wait").as_bytes()).await.expect("sent");
    server.signals.begun.notified().await;
    assert_eq!(rest(&mut server.connect().await).await, "full\n");
}

/// A client that has sent half a request, or does not read a response, delays only itself: its slot is a new client's
/// soon, long before its timeouts.
#[tokio::test]
async fn half_a_request_protects_no_connection() {
    let long = Duration::from_secs(300);
    let settings =
        Settings { header_timeout: long, idle_timeout: Some(long), body_timeout: long, ..SETTINGS };
    let half_sent = [
        (false, "POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"),
        (false, "POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf"),
        (true, ""),
        (true, "GET /a HT"),
        (true, "POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"),
        (true, "POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf"),
        (true, "POST /pull HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"),
        // The response is sent before the body, whose rest is awaited to keep the connection.
        (true, "POST /skip HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"),
        // Lingers for the rest of what it rejects.
        (true, "BAD\r\n\r\n"),
    ];
    for (has_asked, half) in half_sent {
        let server = Server::with_settings(settings, 1, WhenFull::Wait, NewConnections::Reject).await;
        let mut first = server.connect().await;
        if has_asked {
            first.write_all(get("/a").as_bytes()).await.expect("sent");
            until(&mut first, "/a").await;
        }
        first.write_all(half.as_bytes()).await.expect("sent");
        let mut probe = server.connect().await;
        probe.write_all(get("/probe").as_bytes()).await.expect("sent");
        let answered = tokio::time::timeout(Duration::from_secs(30), until(&mut probe, "/probe")).await;
        assert!(answered.is_ok(), "{half:?} keeps its slot");
    }
    // A response that is not read: far more than the kernel's buffers hold.
    let server = Server::with_settings(settings, 1, WhenFull::Wait, NewConnections::Reject).await;
    let mut deaf = server.connect().await;
    let flooding = async {
        while deaf.write_all(get("/a").repeat(1_000).as_bytes()).await.is_ok() {}
        std::future::pending::<()>().await;
    };
    let probing = async {
        let mut probe = server.connect().await;
        probe.write_all(get("/probe").as_bytes()).await.expect("sent");
        until(&mut probe, "/probe").await
    };
    tokio::select! {
        _ = tokio::time::timeout(Duration::from_secs(30), flooding) => panic!("an unread response keeps its slot"),
        _ = probing => {}
    }
}
