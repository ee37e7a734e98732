//! Who has a stream if more are opened than there may be.

use super::streams::{Client, PATH, Running, limiter, report};
use super::*;
use bytes::{BufMut, Bytes, BytesMut};
use std::future::Future;
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;

const STREAMS: usize = 8;

fn few() -> RlqsConfig {
    RlqsConfig { streams: STREAMS, ..RlqsConfig::default() }
}

/// Runs what one connection does: in a task of its own, as the gRPC server does.
async fn connection<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    tokio::spawn(work).await.expect("no panic")
}

/// Returns how a stream ends, after any assignments.
async fn end(client: &mut Client) -> Code {
    loop {
        match client.responses.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Code::Ok,
            Err(status) => return status.code(),
        }
    }
}

/// Four connections with the most streams that they may have would leave no Envoy any, for as long as they like.
#[tokio::test(start_paused = true)]
async fn one_connection_with_many_streams_keeps_nobody_out() {
    for reports in [false, true] {
        let service = Arc::new(Running::start(few()));
        let greedy = Arc::clone(&service);
        let mut held = connection(async move {
            let mut held = Vec::new();
            for _ in 0..5 * STREAMS {
                let Ok(mut client) = greedy.open().await else { continue };
                if reports {
                    client.send(report("greedy")).await;
                    if held.len() < STREAMS {
                        client.answered(1).await;
                    }
                }
                held.push(client);
            }
            held
        })
        .await;
        assert!(held.len() >= STREAMS, "all places, while nobody else wants one");
        for _ in 0..3 {
            let service = Arc::clone(&service);
            let envoy = connection(async move {
                let mut envoy = service.open().await.expect("a stream");
                envoy.send(report("envoy")).await;
                envoy.answered(1).await;
                envoy
            });
            held.push(envoy.await);
        }
        // The others were displaced, and learn why.
        if reports {
            assert_eq!(end(&mut held[0]).await, Code::ResourceExhausted);
        }
    }
}

/// A client that leaves its streams would keep them as long as its connection.
#[tokio::test(start_paused = true)]
async fn a_stream_without_reports_ends() {
    let service = Running::start(RlqsConfig::default());
    let began = Instant::now();
    let mut client = service.open().await.expect("a stream");
    assert_eq!((end(&mut client).await, began.elapsed().as_secs()), (Code::DeadlineExceeded, 30));
    let mut client = service.open().await.expect("a stream");
    client.send(report("a")).await;
    client.answered(1).await;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_secs(5)).await;
        client.send(report("a")).await;
    }
    let last = Instant::now();
    assert_eq!((end(&mut client).await, last.elapsed().as_secs()), (Code::DeadlineExceeded, 300));
}

/// A stream with a report over a connection of its own. Returns whether it has an assignment.
async fn is_assigned(
    http2: &mut h2::client::SendRequest<Bytes>,
    held: &mut Vec<h2::SendStream<Bytes>>,
) -> bool {
    let request = http::Request::post(format!("http://edge{PATH}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .expect("a request");
    let (response, mut sent) = http2.send_request(request, false).expect("an open connection");
    let message = report("a");
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).expect("short"));
    framed.put_slice(&message);
    sent.send_data(framed.freeze(), false).expect("an open stream");
    held.push(sent);
    let Ok(response) = response.await else { return false };
    response.into_body().data().await.is_some_and(|data| data.is_ok())
}

async fn connect(to: std::net::SocketAddr) -> h2::client::SendRequest<Bytes> {
    let stream = TcpStream::connect(to).await.expect("a connection");
    let (http2, driver) = h2::client::handshake(stream).await.expect("HTTP/2");
    // Ends with the test's runtime.
    tokio::spawn(driver);
    http2
}

/// The rule above rests on it that the service can tell connections from each other, and streams of one from those of another.
#[tokio::test]
async fn connections_are_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let config = crate::rls::RlsConfig { rlqs: few(), ..crate::rls::RlsConfig::default() };
    tokio::spawn(crate::rls::serve(listener, limiter(), config, std::future::pending()));
    let (mut greedy, mut envoy, mut held) = (connect(address).await, connect(address).await, Vec::new());
    for _ in 0..STREAMS {
        assert!(is_assigned(&mut greedy, &mut held).await);
    }
    assert!(!is_assigned(&mut greedy, &mut held).await, "one connection is one");
    assert!(is_assigned(&mut envoy, &mut held).await, "and another is another");
}
