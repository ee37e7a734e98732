//! Messages between cells: what is sent arrives, and nothing that a peer sends breaks a cell.

use proptest::prelude::*;
use std::sync::Arc;
use tollgate_cells::message::{
    Batch, BatchEntry, Hello, MAX_MESSAGE, Message, MessageError, PREFIX, Sighting, Sign, decode,
    decode_leniently, encode, length,
};
use tollgate_cells::{KeyValues, SentCharge, SentCounter};
use tollgate_core::{
    Admission, Algorithm, Calendar, CalendarUnit, Cost, Enforcement, KeyPart, Limit, LimitSpec, LossPolicy,
    Outcome, Outcomes, OwnedKeyPart, Period, PermitId, Rate, Scope, TimeDelta, Timestamp, Verdict,
};

fn limits() -> Vec<Limit> {
    let minute = |algorithm| LimitSpec::new(algorithm, Rate::per(100, TimeDelta::from_secs(60)));
    let zone = Calendar::new(CalendarUnit::Month, "Europe/Zurich").expect("a zone");
    let month = Rate { count: 9, period: Period::Calendar(zone) };
    let specs = [
        minute(Algorithm::Gcra).burst(20),
        minute(Algorithm::TokenBucket).refill_interval(TimeDelta::from_secs(10)),
        minute(Algorithm::LeakyBucket).with_delay(),
        minute(Algorithm::StrictWindow).slots(7),
        minute(Algorithm::FixedWindow).count_denied(),
        minute(Algorithm::SlidingLog),
        minute(Algorithm::Concurrency),
        LimitSpec::new(Algorithm::FixedWindow, month),
    ];
    specs.into_iter().map(|spec| spec.build().expect("valid")).collect()
}

fn charge(limit: Limit) -> SentCharge {
    let parts = vec![
        OwnedKeyPart::Text("alice".into()),
        OwnedKeyPart::Secret("0123abcd".into()),
        OwnedKeyPart::Network { address: 0xffff_0a00_0000, prefix: 104 },
    ];
    SentCharge {
        counter: SentCounter {
            scope: Scope::in_group("%&owner=eu|api|user|gcra|1m", "%&owner=eu|api|user"),
            limit,
        },
        parts,
        cost: Cost::refund(3),
        enforcement: Enforcement::Alternative,
        permit: PermitId(u128::MAX - 1),
        loss_policy: LossPolicy::AssumeExhausted,
    }
}

fn messages() -> Vec<Message> {
    let charges: Vec<SentCharge> = limits().into_iter().map(charge).collect();
    let outcome = Outcome {
        verdict: Verdict::Denied { retry_after: Some(TimeDelta::from_millis(7)) },
        remaining: 0,
        next_after: TimeDelta::from_millis(5),
        reset_after: TimeDelta::from_secs(60),
    };
    let outcomes = Outcomes {
        admission: Admission::Denied,
        at: Timestamp::from_micros(1_790_000_000_000_000),
        per_charge: [outcome, Outcome::UNKNOWN].into_iter().collect(),
    };
    let seen = |sign| Sighting { cell: "us/10.0.0.2:7400".to_owned(), age: 150, sign };
    let hello = Hello {
        version: 1,
        cell: "eu/10.0.0.1:7400".to_owned(),
        region: "eu".to_owned(),
        incarnation: u64::MAX,
        key_check: 7,
        cells_check: 8,
        rank: 3,
        silence: Some(2_000_000),
    };
    let batch = Batch {
        sequence: 300,
        counters: charges.iter().map(|charge| charge.counter.clone()).collect(),
        entries: vec![
            BatchEntry { counter: 0, values: KeyValues::from_owned(&charges[0].parts), units: 5 },
            BatchEntry { counter: 7, values: KeyValues::new(&[]), units: -2 },
        ],
        covers: Some(200_000),
        made_at: Some(1_700_000_000_000_000),
        skipped: 0,
    };
    vec![
        Message::Hello(hello),
        Message::Charge(charges.clone()),
        Message::Debit(charges.clone()),
        Message::Release(charges.clone()),
        Message::Return {
            units: Box::new(charges[0].clone()),
            taken_at: Timestamp::from_micros(1),
            full_at: Timestamp::from_micros(2),
            id: PermitId(3),
        },
        Message::Batch(Arc::new(batch)),
        Message::Outcomes(outcomes),
        Message::Done(vec![seen(Sign::Answered)]),
        Message::Done(vec![seen(Sign::Answered), seen(Sign::Requested), seen(Sign::Able)]),
        Message::Failed("no".to_owned()),
        Message::NotApplied("no".to_owned(), vec![seen(Sign::Answered), seen(Sign::Able)]),
        Message::OtherProcess("two".to_owned()),
        Message::Busy(vec![seen(Sign::Answered)]),
        Message::Unknown(77),
    ]
}

/// Without it a cell charges another limit than its peer's rules say.
#[test]
fn every_message_arrives_as_it_was_sent() {
    for message in messages() {
        let bytes = encode(9, &message);
        let announced = length(bytes[..PREFIX].try_into().expect("a prefix")).expect("short enough");
        assert_eq!(announced, bytes.len() - PREFIX);
        assert_eq!(decode(&bytes[PREFIX..]), Ok((9, message)));
    }
}

/// Without it an upgraded cell breaks the links to those that are not.
#[test]
fn what_a_later_version_adds_is_skipped() {
    assert_eq!(decode(&[200, 5, 1, 2, 3]), Ok((5, Message::Unknown(200))));
    let mut bytes = encode(1, &Message::Failed("no".to_owned()));
    bytes.extend([1, 2, 3]);
    assert_eq!(decode(&bytes[PREFIX..]), Ok((1, Message::Failed("no".to_owned()))), "fields that were added");
}

/// Without it an upgraded cell takes the messages of those that are not for malformed ones.
#[test]
fn what_an_earlier_version_leaves_out_is_unknown() {
    // A hello without the silence time, and a reply that tells of the cells that answered alone.
    let hello = [1, 5, 1, 1, b'a', 2, b'e', b'u', 7, 8, 9, 3];
    let Ok((5, Message::Hello(read))) = decode(&hello) else { panic!("not read") };
    assert_eq!((read.cell.as_str(), read.rank, read.silence), ("a", 3, None));
    let seen = Sighting { cell: "b".to_owned(), age: 4, sign: Sign::Answered };
    assert_eq!(decode(&[8, 6, 1, 1, b'b', 4]), Ok((6, Message::Done(vec![seen]))));
    // Outcomes without the time of the next unit: it is there by the reset.
    let Ok((7, Message::Outcomes(read))) = decode(&[7, 7, 1, 9, 2, 2, 0, 0, 60, 0, 0, 3, 60]) else {
        panic!("not read")
    };
    let times: Vec<_> = read.per_charge.iter().map(|outcome| outcome.next_after).collect();
    assert_eq!(times, [TimeDelta::from_micros(60), TimeDelta::ZERO]);
}

/// Without it one message takes a cell's memory.
#[test]
fn sizes_are_bounded() {
    let long = u32::try_from(MAX_MESSAGE + 1).expect("fits");
    assert_eq!(length(long.to_le_bytes()), Err(MessageError::TooLong(MAX_MESSAGE + 1)));
    assert_eq!(length(*b"HTTP"), Err(MessageError::Http), "an address that a peer was given by mistake");
    // A batch that announces a billion counters and contains none.
    assert_eq!(decode(&[6, 0, 1, 0x80, 0x94, 0xeb, 0xdc, 0x03]), Err(MessageError::Malformed));
    // A counter in a batch that it does not have.
    assert_eq!(decode(&[6, 0, 1, 0, 1, 9, 0, 2]), Err(MessageError::Malformed));
}

/// A counter in a tick takes at most 48 bytes on the wire.
#[test]
fn a_counter_of_a_batch_is_short() {
    let counter = charge(limits().remove(0)).counter;
    let entry = |n: usize| BatchEntry {
        counter: 0,
        values: KeyValues::new(&[KeyPart::Secret(&format!("{n:032x}"))]),
        units: 1_000,
    };
    let batch = Batch {
        sequence: 1,
        counters: vec![counter],
        entries: (0..1_000).map(entry).collect(),
        ..Batch::default()
    };
    let bytes = encode(1, &Message::Batch(Arc::new(batch))).len();
    assert!(bytes <= 48 * 1_000, "{} bytes for each counter", bytes / 1_000);
}

proptest! {
    #[test]
    fn no_bytes_break_the_decoder(bytes in proptest::collection::vec(any::<u8>(), 0..512), kind in 0_u8..12) {
        let _ = decode(&bytes);
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        let _ = decode(&bytes);
    }

    #[test]
    fn no_damage_breaks_the_decoder(at in any::<prop::sample::Index>(), byte in any::<u8>(), which in 0_usize..11) {
        let mut bytes = encode(3, &messages()[which])[PREFIX..].to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok((id, mut message)) = decode(&bytes) {
            if let Message::Batch(batch) = &mut message {
                // What was skipped is not sent again.
                Arc::make_mut(batch).skipped = 0;
            }
            let again = encode(id, &message);
            prop_assert_eq!(decode(&again[PREFIX..]), Ok((id, message)));
        }
    }
}

/// Without it one limit of a later version, or one long reason, stops the exchange of all others.
#[test]
fn what_cannot_be_read_does_not_stop_the_rest() {
    let counters: Vec<_> = limits().into_iter().take(2).map(|limit| charge(limit).counter).collect();
    let entry = |counter| BatchEntry { counter, values: KeyValues::new(&[]), units: 5 + i64::from(counter) };
    let batch = Batch { sequence: 1, counters, entries: vec![entry(0), entry(1)], ..Batch::default() };
    let mut bytes = encode(1, &Message::Batch(Arc::new(batch.clone())));
    let name = batch.counters[0].limit.algorithm().name().as_bytes();
    // The label ends with the name as well.
    let mut found = bytes.windows(name.len()).enumerate().filter(|(_, part)| *part == name);
    let at = found.nth(1).map(|(at, _)| at).expect("the first limit's algorithm");
    bytes[at] = b'?';
    let Ok((1, Message::Batch(read))) = decode(&bytes[PREFIX..]) else { panic!("not read") };
    assert_eq!((read.counters.len(), read.skipped, read.entries[0].units), (1, 1, 6));
    let malformed = [6, 7, 1, 0, 1, 9, 0, 2];
    assert_eq!(decode_leniently(&malformed), Ok((7, Message::Unknown(6))));
    let long = encode(1, &Message::Failed("ä".repeat(2_000)));
    assert!(matches!(decode(&long[PREFIX..]), Ok((1, Message::Failed(why))) if why.len() == 1_024));
}
