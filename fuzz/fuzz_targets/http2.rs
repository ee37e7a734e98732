//! HTTP/2 of untrusted clients: a connection takes any bytes, keeps within its bounds, and answers in whole frames.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tollgate_http::h2::{Connection, Event, PREFACE, Reason, Settings};

/// Length of a frame's header.
const HEADER: usize = 9;

fuzz_target!(|data: &[u8]| {
    // The first byte says how the bytes are cut and whether requests are answered at once.
    let Some((mode, rest)) = data.split_first() else { return };
    let mut connection = Connection::<Vec<u8>>::new(Settings { max_streams: 8, max_head: 4096 });
    let mut input = PREFACE.to_vec();
    let size = usize::from(mode >> 2) * 8 + 1;
    for part in rest.chunks(size) {
        input.extend_from_slice(part);
        let mut read = 0;
        loop {
            let Ok(step) = connection.receive(&input[read..], Vec::new) else { return check(&mut connection) };
            match step.event {
                Some(Event::Request { stream, is_end: true }) if mode & 1 == 0 => {
                    let body = connection.head().path().to_vec();
                    connection.respond(stream, b"\x88", |out| out.extend_from_slice(&body), b"\x88");
                }
                Some(Event::Data { stream, bytes, is_end }) => {
                    if let Some(kept) = connection.data(stream) {
                        kept.extend_from_slice(bytes);
                        assert!(kept.len() < 1 << 20);
                    }
                    connection.release(stream, bytes.len());
                    if is_end {
                        connection.send_head(stream, b"\x88");
                        connection.send_data(stream, &[0; 100]);
                        connection.send_end(stream, None);
                    }
                }
                Some(Event::End { stream }) => drop(connection.reset(stream, Reason::Cancel)),
                _ => {}
            }
            assert!(connection.open() <= 8);
            if step.consumed == 0 {
                break;
            }
            read += step.consumed;
        }
        input.drain(..read);
        connection.send_waiting(64 << 10);
        if mode & 2 != 0 {
            connection.begin_shutdown();
        }
        check(&mut connection);
    }
});

/// What is sent is whole frames.
fn check(connection: &mut Connection<Vec<u8>>) {
    let out = std::mem::take(connection.unsent());
    let mut left = &out[..];
    while !left.is_empty() {
        let length = u32::from_be_bytes([0, left[0], left[1], left[2]]) as usize;
        left = &left[HEADER + length..];
    }
}
