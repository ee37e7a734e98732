//! The Redis protocol with an independent client library.

use crate::harness::Server;
use redis::Value;

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 10/hour}
  - {key: login, name: login, class: security, limit: 10/hour}
";

type Five = (i64, i64, i64, i64, i64);

fn throttle(connection: &mut redis::Connection, words: &str) -> redis::RedisResult<Five> {
    let mut command = redis::cmd("CL.THROTTLE");
    words.split(' ').for_each(|word| {
        command.arg(word);
    });
    command.query(connection)
}

/// The client library opens its own connections, with RESP2 and RESP3.
#[test]
fn the_redis_crate_works_with_both_protocol_versions() {
    let server = Server::with_rules(RULES);
    for version in ["2", "3"] {
        let url = format!("redis://{}/?protocol=resp{version}", server.resp);
        let mut connection =
            redis::Client::open(url).and_then(|client| client.get_connection()).expect("a connection");
        let reply: Five = throttle(&mut connection, &format!("k{version} 15 30 60")).expect("a reply");
        assert_eq!(reply, (0, 16, 15, -1, 2));
        let reply: Value =
            redis::cmd("TG.PEEK").arg(&["d", "user", version]).query(&mut connection).expect("a reply");
        match (version, &reply) {
            ("2", Value::Array(values)) => assert_eq!(values.len(), 9),
            ("3", Value::Map(pairs)) => assert_eq!(pairs.len(), 10),
            _ => panic!("RESP{version}: {reply:?}"),
        }
        let mut pipe = redis::pipe();
        for _ in 0..100 {
            pipe.cmd("CL.THROTTLE").arg(&[&format!("p{version}"), "9", "1", "3600"]);
        }
        let replies: Vec<Five> = pipe.query(&mut connection).expect("replies");
        assert_eq!(replies.iter().filter(|reply| reply.0 == 0).count(), 10);
        let error = throttle(&mut connection, "k 1 0 60").expect_err("a zero rate");
        assert!(error.to_string().contains("count must be at least 1"), "{error}");
    }
}

/// A client that is denied with other numbers must not get its used quota back: 200 of 200 passed at 5 an hour.
#[test]
fn a_denied_throttle_with_other_numbers_gives_nothing_back() {
    let server = Server::with_rules(RULES);
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("a URL");
    let mut connection = client.get_connection().expect("a connection");
    for other in ["0 1 1", "0 1 60", "9 1000 1", "4999 1 60", "3 7 86400"] {
        let key = other.replace(' ', "_");
        for _ in 0..5 {
            assert_eq!(throttle(&mut connection, &format!("{key} 4 5 3600")).expect("a reply").0, 0);
        }
        for _ in 0..20 {
            let _ = throttle(&mut connection, &format!("{key} {other} 5000")).expect("a reply");
            assert_eq!(throttle(&mut connection, &format!("{key} {other} 100000")).expect("a reply").0, 1);
            assert_eq!(
                throttle(&mut connection, &format!("{key} 4 5 3600")).expect("a reply").0,
                1,
                "{other}"
            );
        }
    }
}
