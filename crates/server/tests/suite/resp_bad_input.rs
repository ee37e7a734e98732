//! Invalid RESP input: the client receives an error, and no other client is affected.

use crate::harness::{LONG, Server, Stopwatch, eventually};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

const RULES: &str = "{domain: sample, descriptors: [{key: api_key, limit: 10/second}]}";

fn open(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.resp).expect("a connection");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    stream
}

/// Reads until the server closes the connection.
fn until_closed(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn line(stream: &mut TcpStream) -> String {
    let (mut text, mut byte) = (Vec::new(), [0]);
    while !text.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).expect("a line");
        text.push(byte[0]);
    }
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(*word);
        bytes.extend(b"\r\n");
    }
    bytes
}

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

/// Input that is not RESP gets an error, and the connection is closed.
#[test]
fn protocol_errors_are_reported_and_close_the_connection() {
    let server = Server::with_rules(RULES);
    let many = format!("*{}\r\n", "9".repeat(200));
    let flood = vec![b'x'; 300_000];
    let large = command(&[[b'x'; 8000].as_slice(); 10]);
    let cases: [(&[u8], &str); 26] = [
        (b"PING\r\n", "inline commands"),
        (b"CL.THROTTLE a 1 1 1\r\n", "inline commands"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "inline commands"),
        (b"POST / HTTP/1.1\r\nContent-Length: 14\r\n\r\n*1\r\n$4\r\nPING\r\n", "inline commands"),
        (b"\r\n", "inline commands"),
        (b"\0\0\0\0", "inline commands"),
        (b"\x16\x03\x01\x02\x00\x01", "inline commands"),
        (b"\xff\xfe", "inline commands"),
        (b"$4\r\nPING\r\n", "inline commands"),
        (b"+OK\r\n", "inline commands"),
        (b":1\r\n", "inline commands"),
        (b"%1\r\n+a\r\n+b\r\n", "inline commands"),
        (&flood, "inline commands"),
        (b"*\r\n", "whole number"),
        (b"*a\r\n", "whole number"),
        (b"*1\n$4\nPING\n", "whole number"),
        (b"*1.5\r\n", "whole number"),
        (many.as_bytes(), "whole number"),
        (b"*1000000\r\n", "multibulk length"),
        (b"*1\r\n+PING\r\n", "expected '$'"),
        (b"*2\r\n*1\r\n$1\r\na\r\n", "expected '$'"),
        (b"*1\r\n$-5\r\n", "bulk length"),
        (b"*1\r\n$536870912\r\n", "bulk length"),
        (b"*1\r\n$18446744073709551617\r\n", "bulk length"),
        (b"*1\r\n$3\r\nPING\r\n", "does not match its length"),
        (&large, "65536 bytes"),
    ];
    for (bytes, message) in cases {
        let mut stream = open(&server);
        // The server may close the connection before all is sent.
        let _ = stream.write_all(&[PING, bytes].concat());
        let reply = until_closed(&mut stream);
        let shown = bytes[..bytes.len().min(60)].escape_ascii();
        assert!(reply.starts_with("+PONG\r\n-ERR Protocol error: "), "{shown}: {reply}");
        assert!(reply.contains(message), "{shown}: {reply}");
        let mut next = open(&server);
        next.write_all(PING).expect("sent");
        assert_eq!(line(&mut next), "+PONG", "after {shown}");
    }
}

/// An invalid command in valid RESP gets an error, and the connection stays open.
#[test]
fn an_invalid_command_gets_an_error_and_the_next_one_works() {
    let server = Server::with_rules(RULES);
    let mut stream = open(&server);
    let throttle = |rest: &[&'static [u8]]| [&[b"CL.THROTTLE".as_slice(), b"k"], rest].concat();
    let cases: Vec<(Vec<&[u8]>, &str)> = vec![
        (vec![b""], "unknown command ''"),
        (vec![b"GET", b"a"], "unknown command 'GET'"),
        (vec![b"FLUSHALL"], "unknown command"),
        (vec![b"EVAL", b"return 1", b"0"], "unknown command"),
        (vec![b"\xff\r\n\0"], "unknown command"),
        (vec![b"CL.THROTTLE"], "wrong number"),
        (throttle(&[b"1", b"1"]), "wrong number"),
        (throttle(&[b"1", b"1", b"1", b"1", b"1"]), "wrong number"),
        (throttle(&[b"x", b"1", b"1"]), "max_burst is not an integer"),
        (throttle(&[b"1", b"1e3", b"1"]), "count is not an integer"),
        (throttle(&[b"1", b" 1", b"1"]), "count is not an integer"),
        (throttle(&[b"1", b"1", b""]), "period is not an integer"),
        (throttle(&[b"1", b"1", b"\xc3\x28"]), "period is not an integer"),
        (throttle(&[b"1", b"1", b"1", b"9223372036854775808"]), "quantity is not an integer"),
        (throttle(&[b"-1", b"1", b"1"]), "max_burst must be"),
        (throttle(&[b"1", b"0", b"1"]), "count must be"),
        (throttle(&[b"1", b"1", b"0"]), "period must be"),
        (throttle(&[b"9223372036854775807", b"1", b"1"]), "at most"),
        (throttle(&[b"1", b"9223372036854775807", b"1"]), "at most"),
        (throttle(&[b"1", b"1", b"9223372036854775807"]), "out of range"),
        (throttle(&[b"99999999", b"1", b"99999999"]), "35 years"),
        (vec![b"TG.CHECK"], "wrong number"),
        (vec![b"TG.CHECK", b"sample", b"api_key"], "wrong number"),
        (vec![b"TG.CHECK", b"", b"api_key", b"x"], "domain"),
        (vec![b"TG.CHECK", b"\xff", b"api_key", b"x"], "UTF-8"),
        (vec![b"TG.CHECK", b"sample", b"a", b"x", b"a", b"y"], "duplicate attribute"),
        (vec![b"TG.CHECK", b"sample", b"a", b"x", b"COST", b"-1"], "COST"),
        (vec![b"TG.PEEK", b"sample", b"a", b"x", b"COST", b"1"], "COST"),
        (vec![b"HELLO", b"4"], "NOPROTO"),
        (vec![b"HELLO", b"x"], "not an integer"),
        (vec![b"HELLO", b"3", b"WHAT"], "Syntax error"),
        (vec![b"AUTH", b"x"], "without any password"),
        (vec![b"AUTH"], "wrong number"),
        (vec![b"SELECT", b"1"], "out of range"),
        (vec![b"SELECT", b"x"], "not an integer"),
        (vec![b"CLIENT"], "wrong number"),
        (vec![b"CLIENT", b"KILL"], "CLIENT takes"),
        (vec![b"CLIENT", b"SETNAME", b"a b"], "Client names"),
        (vec![b"COMMAND", b"X"], "COMMAND takes"),
        (vec![b"ECHO"], "wrong number"),
    ];
    for (words, message) in &cases {
        stream.write_all(&command(words)).expect("sent");
        let reply = line(&mut stream);
        assert!(reply.starts_with('-') && reply.contains(message), "{message}: {reply}");
    }
    // None of them charged anything.
    stream.write_all(&command(&throttle(&[b"4", b"1", b"60", b"0"]))).expect("sent");
    let reply: Vec<String> = (0..6).map(|_| line(&mut stream)).collect();
    assert_eq!(reply, ["*5", ":0", ":5", ":5", ":-1", ":0"]);
    // All of them in one pipeline get the same replies in the same order.
    let all: Vec<u8> = cases.iter().flat_map(|(words, _)| command(words)).collect();
    stream.write_all(&all).expect("sent");
    for (_, message) in &cases {
        let reply = line(&mut stream);
        assert!(reply.contains(message), "{message}: {reply}");
    }
}

/// A connection allows ten wrong passwords.
#[test]
fn a_client_with_too_many_wrong_passwords_is_disconnected() {
    let server = Server::start(&[RULES], "resp_password: hunter2");
    let mut stream = open(&server);
    for n in 0..10 {
        stream.write_all(&command(&[b"AUTH", format!("guess{n}").as_bytes()])).expect("sent");
        assert!(line(&mut stream).starts_with("-WRONGPASS"));
    }
    assert_eq!(until_closed(&mut stream), "");
}

/// A client that sends and never reads fills only its own socket buffers.
#[test]
fn a_client_that_does_not_read_replies_is_not_read_from() {
    let server = Server::with_rules(RULES);
    let mut greedy = open(&server);
    greedy.set_nonblocking(true).expect("settable");
    let batch = command(&[b"COMMAND", b"DOCS"]).repeat(500);
    let mut sent = 0;
    let stuck = eventually("full socket buffers", || {
        let mut quiet = 0;
        loop {
            match greedy.write(&batch) {
                Ok(n) => (sent, quiet) = (sent + n, 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    quiet += 1;
                    if quiet > 50 {
                        return Some(sent);
                    }
                    std::thread::yield_now();
                }
            }
            assert!(sent < 512 << 20, "the server reads commands without limit");
        }
    });
    assert!(stuck > 0);
    let watch = Stopwatch::start();
    for _ in 0..100 {
        let mut other = open(&server);
        other.write_all(PING).expect("sent");
        assert_eq!(line(&mut other), "+PONG");
    }
    assert!(watch.elapsed() < LONG);
}

/// A command may arrive one byte at a time, and hundreds of incomplete commands delay no other client.
#[test]
fn slow_senders_do_not_delay_others() {
    let server = Server::with_rules(RULES);
    let slow: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = open(&server);
            stream.write_all(b"*5\r\n$11\r\nCL.THR").expect("sent");
            stream
        })
        .collect();
    let mut stream = open(&server);
    stream.set_nodelay(true).expect("settable");
    for byte in command(&[b"CL.THROTTLE", b"slow", b"1", b"1", b"60"]) {
        stream.write_all(&[byte]).expect("sent");
    }
    let reply: Vec<String> = (0..6).map(|_| line(&mut stream)).collect();
    assert_eq!(reply, ["*5", ":0", ":2", ":1", ":-1", ":60"]);
    drop(slow);
}

/// A drain closes idle connections immediately; a client in the middle of a command receives its reply first.
#[test]
fn a_drain_completes_commands_in_flight() {
    let server = Server::with_rules(RULES);
    let mut idle = open(&server);
    idle.write_all(PING).expect("sent");
    assert_eq!(line(&mut idle), "+PONG");
    let mut half = open(&server);
    half.write_all(&[PING, &PING[..7]].concat()).expect("sent");
    assert_eq!(line(&mut half), "+PONG");
    server.drain();
    assert_eq!(until_closed(&mut idle), "");
    assert!(!server.has_ended());
    half.write_all(&PING[7..]).expect("sent");
    assert_eq!(until_closed(&mut half), "+PONG\r\n");
    eventually("the end of the server", || server.has_ended().then_some(()));
}
