//! Records that nodes share: one of several writers wins, and what has expired is gone.

use crate::open;
use tollgate_core::{RecordName, RecordStore, TimeDelta};

const NAME: RecordName = RecordName([7; 16]);
const LONG: TimeDelta = TimeDelta::from_secs(3_600);

pub(crate) async fn an_exchange_compares_and_expires(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    let read = one.exchange(NAME, None, None).await.expect("an answer");
    assert_eq!((read.is_stored, read.record), (false, None));
    let first = one.exchange(NAME, None, Some((b"a", LONG))).await.expect("an answer");
    assert!(first.is_stored && first.record.is_none());
    let late = two.exchange(NAME, None, Some((b"b", LONG))).await.expect("an answer");
    assert_eq!((late.is_stored, late.record.as_deref()), (false, Some(&b"a"[..])), "there is one already");
    let other = two.exchange(NAME, Some(b"x"), Some((b"b", LONG))).await.expect("an answer");
    assert_eq!((other.is_stored, other.record.as_deref()), (false, Some(&b"a"[..])));
    let next = two.exchange(NAME, Some(b"a"), Some((b"b", LONG))).await.expect("an answer");
    assert_eq!((next.is_stored, next.record.as_deref()), (true, Some(&b"a"[..])));
    assert!(next.at >= read.at, "the database's clock");
    // Of many that expect the same, one is stored.
    let writers = (0..8_u8).map(|n| {
        let node = if n.is_multiple_of(2) { one.clone() } else { two.clone() };
        tokio::spawn(async move {
            let stored = node.exchange(NAME, Some(b"b"), Some((&[n], LONG))).await;
            u8::from(stored.expect("an answer").is_stored)
        })
    });
    let mut stored = 0;
    for writer in writers.collect::<Vec<_>>() {
        stored += writer.await.expect("a writer");
    }
    assert_eq!(stored, 1);
    let winner = one.exchange(NAME, None, None).await.expect("an answer").record.expect("a record");
    let brief = TimeDelta::from_millis(1);
    assert!(one.exchange(NAME, Some(&winner), Some((b"brief", brief))).await.expect("an answer").is_stored);
    while two.exchange(NAME, None, None).await.expect("an answer").record.is_some() {
        tokio::task::yield_now().await;
    }
    assert!(two.exchange(NAME, None, Some((b"anew", LONG))).await.expect("an answer").is_stored);
    two.remove(NAME).await.expect("removed");
    two.remove(NAME).await.expect("again");
    assert_eq!(one.exchange(NAME, None, None).await.expect("an answer").record, None);
    assert_eq!(one.revision(), 0, "no operator's change");
}
