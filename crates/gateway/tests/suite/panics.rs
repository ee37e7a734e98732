//! A panic while deciding is answered by the rule's fail policy, over HTTP/1 and HTTP/2, and the connection lives on.

use crate::harness::{Gateway, Origin, memory, plain};
use tollgate_core::SystemClock;
use tollgate_core::conformance::PanickingStore;
use tollgate_store::MemoryStore;

type Store = PanickingStore<MemoryStore<SystemClock>>;

const RULES: &str = "domain: d\ndescriptors:\n  - {key: api_key, limit: 8/hour, on_error: closed}\n";

#[test]
fn a_panic_is_answered_and_the_connection_lives_on() {
    let origin = Origin::start();
    let gateway = Gateway::start_over(PanickingStore(memory()), 1, RULES, "", &plain(origin.address, ""));
    let mut open = gateway.open();
    for (key, passes) in
        [("a-well-key", true), (Store::AT_ONCE, false), (Store::LATER, false), ("a-well-key", true)]
    {
        open.send(format!("GET /x HTTP/1.1\r\nHost: h\r\nX-Api-Key: {key}\r\n\r\n").as_bytes())
            .expect("sent");
        let status = open.response().expect("an answer on the same connection").status;
        assert_eq!(status == 200, passes, "{key}: {status}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.address()).await.expect("a connection");
        let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        let serving = tokio::spawn(connection);
        for (key, passes) in [(Store::AT_ONCE, false), (Store::LATER, false), ("a-well-key", true)] {
            let request = http::Request::get("http://h/x").header("x-api-key", key).body(());
            let mut send = send.clone().ready().await.expect("a stream");
            let (answer, _) = send.send_request(request.expect("a request"), true).expect("sent");
            assert_eq!(answer.await.expect("an answer").status() == 200, passes, "{key}");
        }
        serving.abort();
    });
}
