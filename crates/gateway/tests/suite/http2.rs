//! HTTP/2 on both sides of the gateway, with the `h2` crate as the peer: flow control windows, headers and timeouts.

use crate::harness::{self, Gateway, Origin, Stopwatch, eventually, plain};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{Request, StatusCode};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

const RULES: &str = "domain: d\ndescriptors:\n  - {key: api_key, name: slots, concurrency: 2}\n";

/// One place in flight.
const ONE: &str = "domain: d\noverload: {workers: {limit: 1}}\n";

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Opens a connection with this window per response. The task answers pings and ends with the connection.
async fn connect(address: SocketAddr, window: u32) -> (SendRequest<Bytes>, JoinHandle<()>) {
    let stream = TcpStream::connect(address).await.expect("a connection");
    let handshake = h2::client::Builder::new().initial_window_size(window).handshake(stream);
    let (send, connection) = handshake.await.expect("HTTP/2");
    let serving = tokio::spawn(async move {
        let _ = connection.await;
    });
    (send, serving)
}

fn get(path: &str) -> Request<()> {
    let request = Request::get(format!("http://api.test{path}")).header("x-api-key", "k");
    request.body(()).expect("a request")
}

async fn exchange(
    send: &SendRequest<Bytes>,
    request: Request<()>,
) -> Result<http::Response<h2::RecvStream>, h2::Error> {
    let mut send = send.clone().ready().await?;
    send.send_request(request, true)?.0.await
}

async fn text(mut body: h2::RecvStream) -> Result<String, h2::Error> {
    let mut whole = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        whole.extend_from_slice(&piece);
    }
    Ok(String::from_utf8_lossy(&whole).into_owned())
}

/// What rules name is the same endpoint by both versions of HTTP.
#[test]
fn rules_on_endpoints_hold_on_streams() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: endpoint, value: 'GET /v1/{id}', name: v1, limit: 1/hour}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    runtime().block_on(async {
        let (send, _serving) = connect(gateway.address(), 65_535).await;
        let mut statuses = Vec::new();
        for path in ["/v1/a", "/v1/b", "/v2/b"] {
            statuses.push(exchange(&send, get(path)).await.expect("an answer").status().as_u16());
        }
        assert_eq!(statuses, [200, 429, 200]);
    });
}

/// A client that does not read its responses must not block others, however active its connection is otherwise.
#[test]
fn answers_that_are_not_read_are_given_up() {
    let origin = Origin::start();
    let section = plain(origin.address, "") + "  clients: {body_timeout: 300ms}\n";
    let gateway = Gateway::start(RULES, &section);
    let runtime = runtime();
    runtime.block_on(async {
        let (send, serving) = connect(gateway.address(), 0).await;
        let unread = exchange(&send, get("/a")).await.expect("an answer");
        let under_way = exchange(&send, get("/drip")).await.expect("an answer");
        origin.release(1);
        let _gateway = tokio::task::spawn_blocking(move || {
            let request = b"GET /a HTTP/1.1\r\nhost: t\r\nx-api-key: k\r\nconnection: close\r\n\r\n";
            eventually("a permit for another client", || {
                (gateway.exchange(request).status == 200).then_some(())
            });
            eventually("the upstream connection to be closed", || (origin.lost() == 1).then_some(()));
            gateway
        })
        .await
        .expect("another client is served");
        for answer in [unread, under_way] {
            assert_eq!(answer.status(), StatusCode::OK);
            let error = text(answer.into_body()).await.expect_err("the stream is reset");
            assert_eq!(error.reason(), Some(h2::Reason::CANCEL), "{error}");
        }
        // The streams were reset, not the connection.
        assert_eq!(exchange(&send, get("/a")).await.expect("an answer").status(), StatusCode::OK);
        assert!(!serving.is_finished());
    });
}

/// A connection is idle only when no stream is active on it, and only then is it closed.
#[test]
fn answers_under_way_keep_their_connection() {
    let origin = Origin::start();
    let section = plain(origin.address, "") + "  clients: {idle_timeout: 1s}\n";
    let gateway = Gateway::start(RULES, &section);
    let runtime = runtime();
    runtime.block_on(async {
        let (send, serving) = connect(gateway.address(), 65_535).await;
        let drips = exchange(&send, get("/drip")).await.expect("an answer");
        let watch = Stopwatch::start();
        while watch.elapsed() < Duration::from_millis(2_500) {
            let other = exchange(&send, get("/a")).await.expect("the connection takes more");
            assert_eq!(text(other.into_body()).await.expect("a body"), "hello 0");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(drips);
        serving.await.expect("it is ended when nothing is under way any more");
    });
}

/// HTTP/2 may split cookies; an HTTP/1 upstream reads one field.
#[test]
fn cookies_are_put_together() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let head = runtime().block_on(async {
        let (send, _serving) = connect(gateway.address(), 65_535).await;
        let mut request = get("/head");
        for cookie in ["a=1", "b=2", "c=3"] {
            request.headers_mut().append("cookie", cookie.parse().expect("a value"));
        }
        let answer = exchange(&send, request).await.expect("an answer");
        text(answer.into_body()).await.expect("a body")
    });
    assert!(head.contains("\r\ncookie: a=1; b=2; c=3\r\n"), "{head}");
    assert_eq!(head.matches("cookie").count(), 1, "{head}");
}

/// An authority is a host with an optional port, without user information.
#[test]
fn authorities_are_hosts() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    runtime().block_on(async {
        let (send, _serving) = connect(gateway.address(), 65_535).await;
        for (authority, status) in [("u@a.b", 400), ("u:p@a.b:80", 400), ("a.b:80", 200), ("[::1]:80", 200)] {
            let request = Request::get(format!("http://{authority}/head")).body(()).expect("a request");
            let answer = exchange(&send, request).await.expect("an answer");
            assert_eq!(answer.status(), status, "{authority}");
        }
    });
    assert_eq!(origin.requests(), 2);
}

/// A request to `/early`.
#[derive(Default)]
struct Early {
    arrived: Notify,
    responds: Notify,
}

/// An HTTP/2 upstream: it reads the request body and responds with its length, except for `/stuck`, of which it reads nothing,
/// `/silent`, to which it does not respond, and `/early`, to which it responds before it reads, when the test says so.
async fn upstream(listener: TcpListener, early: Arc<Early>) {
    while let Ok((stream, _)) = listener.accept().await {
        let early = Arc::clone(&early);
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let early = Arc::clone(&early);
                tokio::spawn(async move {
                    if request.uri().path() == "/early" {
                        early.arrived.notify_one();
                        early.responds.notified().await;
                        let mut body = respond.send_response(http::Response::new(()), false).expect("sent");
                        let length = text(request.into_body()).await.expect("a body").len();
                        body.send_data(length.to_string().into(), true).expect("sent");
                        return;
                    }
                    if request.uri().path() == "/stuck" {
                        let _ = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                        return;
                    }
                    let is_silent = request.uri().path() == "/silent";
                    let Ok(body) = text(request.into_body()).await else { return };
                    let length = body.len();
                    if is_silent {
                        let _ = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                        return;
                    }
                    let mut body = respond.send_response(http::Response::new(()), false).expect("sent");
                    body.send_data(length.to_string().into(), true).expect("sent");
                });
            }
        });
    }
}

/// Starts such an upstream. Returns its address, and the section of a gateway before it.
fn over_http2(runtime: &Runtime, route: &str, early: &Arc<Early>) -> (SocketAddr, String) {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
    let address = listener.local_addr().expect("an address");
    runtime.spawn(upstream(listener, Arc::clone(early)));
    let pool = format!("[\"{address}\"], protocol: http2, eject: {{after: 1, for: 1h}}");
    (address, plain(address, route).replace(&format!("[\"{address}\"]"), &pool))
}

/// The response timeout starts when the body has been sent, as with HTTP/1; an upstream that stops reading times out as well.
#[test]
fn uploads_take_their_time() {
    let runtime = runtime();
    let (_, section) = over_http2(&runtime, ", timeout: 1s, idle_timeout: 3s", &Arc::default());
    let gateway = Gateway::start(RULES, &section);
    let mut open = gateway.open();
    open.send(b"POST /slow HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n").expect("sent");
    let watch = Stopwatch::start();
    let mut length = 0;
    while watch.elapsed() < Duration::from_millis(2_500) {
        open.send(b"4\r\nslow\r\n").expect("sent");
        length += 4;
        std::thread::sleep(Duration::from_millis(20));
    }
    open.send(b"0\r\n\r\n").expect("sent");
    let answer = open.response().expect("an answer");
    assert_eq!((answer.status, answer.text()), (200, length.to_string()));
    for (method, path, body) in
        [("POST", "/stuck", &[b'x'; 200_000][..]), ("POST", "/silent", b"x"), ("GET", "/silent", b"")]
    {
        let answer = gateway.exchange(&harness::request(method, path, body));
        assert_eq!(answer.status, 504, "{method} {path}");
    }
}

/// The upstream connection's own task reads the body: a client that waits for `100 Continue` must get it immediately, not when
/// some timer expires.
#[test]
fn expectations_are_answered_with_an_http2_upstream() {
    let runtime = runtime();
    // Longer than any test: nothing else wakes the connection.
    let (_, section) = over_http2(&runtime, ", idle_timeout: 1h", &Arc::default());
    let gateway = Gateway::start(RULES, &section);
    let mut open = gateway.open();
    open.send(b"POST /a HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        .expect("sent");
    assert_eq!(open.read_until(b"\r\n\r\n").expect("a go-ahead"), b"HTTP/1.1 100 Continue\r\n\r\n");
    open.send(b"body").expect("sent");
    assert_eq!(open.response().expect("an answer").text(), "4");
}

/// Otherwise any client has a backend ejected that serves all others.
#[test]
fn a_body_that_is_refused_is_no_failure_of_an_http2_upstream() {
    let runtime = runtime();
    let (address, section) = over_http2(&runtime, ", max_body: 1KB", &Arc::default());
    let gateway = Gateway::start(RULES, &section);
    let mut open = gateway.open();
    open.send(b"POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n")
        .expect("sent");
    open.send(format!("7d0\r\n{}\r\n0\r\n\r\n", "x".repeat(2_000)).as_bytes()).expect("sent");
    let refused = open.response().expect("an answer");
    assert_eq!(refused.status, 413, "{}", refused.text());
    let usable = format!("gateway_endpoint_usable{{upstream=\"api\",address=\"{address}\"}}");
    assert_eq!(gateway.metric(&usable), 1);
}

/// Streams in both directions: an upstream that has begun to respond must get the end of the request, although no place is free.
#[test]
fn the_end_of_a_body_goes_on_when_the_response_begins() {
    let runtime = runtime();
    let early = Arc::default();
    // Longer than any test: no timer sends the end.
    let (_, section) = over_http2(&runtime, ", timeout: 1h", &early);
    let gateway = Gateway::start(ONE, &section);
    let state = || gateway.overload();
    // Several, because the end may also be sent by chance.
    for _ in 0..8 {
        let mut upload = gateway.open();
        upload
            .send(b"POST /early HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n")
            .expect("sent");
        runtime.block_on(early.arrived.notified());
        eventually("the place to be given back", || (state().in_flight == 0).then_some(()));
        let mut other = gateway.open();
        other.send(&harness::request("GET", "/silent", b"")).expect("sent");
        eventually("another request to have it", || (state().in_flight == 1).then_some(()));
        upload.send(b"0\r\n\r\n").expect("sent");
        eventually("the end to wait", || (state().waiting == 1).then_some(()));
        early.responds.notify_one();
        let answer = upload.response().expect("an answer");
        assert_eq!((answer.status, answer.text().as_str()), (200, "4"));
        drop(other);
        eventually("the place to be free", || (state().in_flight == 0).then_some(()));
    }
}

/// An upstream over HTTP/1 works on a request once it has the stated length, whether or not the client has ended its stream.
#[test]
fn the_last_byte_of_a_stated_length_waits_for_a_place() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    let state = || gateway.overload();
    runtime().block_on(async {
        let (send, _serving) = connect(gateway.address(), 65_535).await;
        let mut uploads = Vec::new();
        for before in 0..2 {
            let request = Request::post("http://api.test/hold").header("content-length", "4").body(());
            let mut send = send.clone().ready().await.expect("a stream");
            let (answer, mut body) = send.send_request(request.expect("a request"), false).expect("sent");
            body.send_data(Bytes::from_static(b"abc"), false).expect("sent");
            tokio::task::block_in_place(|| {
                eventually("the upstream has the head", || (origin.requests() > before).then_some(()));
                eventually("the place is given back", || (state().in_flight == 0).then_some(()));
            });
            uploads.push((answer, body));
        }
        for (waiting, (_, body)) in uploads.iter_mut().enumerate() {
            body.send_data(Bytes::from_static(b"d"), false).expect("sent");
            tokio::task::block_in_place(|| {
                eventually("one to be at the upstream, the other to wait", || {
                    (state().in_flight == 1 && state().waiting as usize == waiting).then_some(())
                });
            });
        }
        for (answer, _body) in uploads {
            origin.release(1);
            assert_eq!(answer.await.expect("an answer").status(), StatusCode::OK);
        }
    });
}

/// A client that has nothing to send for a while must not lose a stream whose response goes on.
#[test]
fn a_stream_in_both_directions_may_pause() {
    let origin = Origin::start();
    let section = plain(origin.address, "") + "  clients: {body_timeout: 200ms}\n";
    let gateway = Gateway::start(RULES, &section);
    runtime().block_on(async {
        let (send, _serving) = connect(gateway.address(), 65_535).await;
        let request = Request::post("http://api.test/echo").body(()).expect("a request");
        let mut send = send.ready().await.expect("a stream");
        let (answer, mut body) = send.send_request(request, false).expect("sent");
        body.send_data(Bytes::from_static(b"one"), false).expect("sent");
        let mut echo = answer.await.expect("an answer").into_body();
        assert_eq!(echo.data().await.expect("a part").expect("no error"), "one");
        // Several times as long as a body may pause that the response waits for.
        tokio::time::sleep(Duration::from_secs(1)).await;
        body.send_data(Bytes::from_static(b"two"), true).expect("sent");
        assert_eq!(text(echo).await.expect("the rest"), "two");
    });
}
