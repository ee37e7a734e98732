//! Tests that another node decodes exactly what this one sampled, and that no stored text can do harm.

use super::*;
use proptest::prelude::*;
use tollgate_engine::{Check, CheckInput};
use tollgate_replica::KeyHasher;
use tollgate_rules::{Descriptor, Ruleset, Wildcards};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);
const MAX: usize = 1 << 20;

fn hasher() -> KeyHasher {
    KeyHasher::new(b"secret")
}

fn rules() -> Ruleset {
    Ruleset::load(&[], &tollgate_rules::Options::default()).expect("no rules")
}

fn slice(requests: Vec<SampledRequest>) -> Vec<SampleSlice> {
    vec![SampleSlice { number: NOW.as_micros() / SLICE, mask: 3, requests }]
}

fn request(key: &str, path: &str, cost: u64) -> SampledRequest {
    let pairs = [("api_key", key), ("path", path)];
    let check = Check::attributes("d", &pairs).with_cost(Cost::new(cost));
    SampledRequest { callers: 4, ..SampledRequest::new(&check, NOW, 77, 2).expect("a short request") }
}

fn shown(one: &SampledRequest) -> String {
    let form = one.with(|check| match check.input {
        CheckInput::Attributes(all) => format!("{all:?}"),
        CheckInput::Descriptors(all) => format!("{all:?}"),
    });
    format!("{:?} {} {} {} {} {:?} {form}", one.at, one.caller, one.own, one.callers, one.domain, one.cost)
}

proptest! {
    #[test]
    fn samples_survive_a_round_trip(
        keys in prop::collection::vec(("\\PC{1,20}", "/[a-z?]{0,8}", 0_u64..100), 1..30)
    ) {
        let requests: Vec<SampledRequest> = keys.iter().map(|(key, path, cost)| request(key, path, *cost)).collect();
        let known = KnownValues::new(&hasher(), requests.iter(), &[]);
        let text = encode(slice(requests.clone()), NOW, &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()), MAX, 1_000);
        let back = decode(&text, NOW, &known, MAX).expect("a sample");
        prop_assert_eq!((back.len(), back[0].mask), (1, 3));
        let back: Vec<String> = back[0].requests.iter().map(shown).collect();
        prop_assert_eq!(back, requests.iter().map(shown).collect::<Vec<_>>());
    }

    /// Any text is decoded or rejected.
    #[test]
    fn corrupt_samples_do_no_harm(at in 0_usize..400, byte in 0_u8..128) {
        let mut text = encode(slice(vec![request("k", "/", 1); 3]), NOW, &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()), MAX, 10).into_bytes();
        let at = at % text.len();
        text[at] = byte;
        let known = KnownValues::new(&hasher(), std::iter::empty(), &[]);
        if let Ok(read) = decode(&String::from_utf8_lossy(&text), NOW, &known, MAX) {
            let merged = crate::preview::merge::merge([read], SliceBudget { requests: 2, bytes: MAX });
            prop_assert!(merged.len() <= 2);
        }
    }
}

#[test]
fn descriptors_keep_their_hits_and_limits() {
    let one = [("tenant", "t")];
    let all = [
        Descriptor { entries: &one, hits: Some(Cost::refund(3)), limit: Some((5, Unit::Hour.length())) },
        Descriptor { entries: &[("path", "/a")], hits: None, limit: None },
    ];
    let request = SampledRequest::new(&Check::descriptors("d", &all), NOW, 1, 1).expect("a short request");
    let known = KnownValues::new(&hasher(), [&request].into_iter(), &[]);
    let text = encode(
        slice(vec![request.clone()]),
        NOW,
        &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()),
        MAX,
        10,
    );
    let back = decode(&text, NOW, &known, MAX).expect("a sample");
    assert_eq!(shown(&back[0].requests[0]), shown(&request));
}

#[test]
fn a_sample_is_cut_to_the_requested_size() {
    let requests: Vec<SampledRequest> = (0..2_000)
        .map(|i| SampledRequest { caller: i << 22, ..request(&format!("key-{i}"), "/", 1) })
        .collect();
    let known = KnownValues::new(&hasher(), std::iter::empty(), &[]);
    for max in [0, 100, 2_000, 200_000] {
        let text = encode(
            slice(requests.clone()),
            NOW,
            &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()),
            max,
            1_000,
        );
        assert!(text.len() <= max, "{} of {max}", text.len());
        if max == 200_000 {
            let back = decode(&text, NOW, &known, max).expect("a sample");
            let weight: u64 = back[0].requests.iter().map(|one| one.own * one.callers).sum();
            assert!(back[0].requests.len() > 50 && (12_000..=20_000).contains(&weight), "{weight}");
        }
    }
}

#[test]
fn a_clock_that_is_wrong_by_hours_is_corrected() {
    let known = KnownValues::new(&hasher(), std::iter::empty(), &[]);
    let wrong = Timestamp::from_secs(1_000_000 - 7_200);
    let text = encode(
        slice(vec![request("k", "/", 1)]),
        NOW,
        &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()),
        MAX,
        10,
    );
    let back = decode(&text, wrong, &known, MAX).expect("a sample");
    assert_eq!(back[0].requests[0].at, wrong);
    // Requests that are too old by the sender's own clock are not recent traffic.
    let text = encode(
        slice(vec![request("k", "/", 1)]),
        Timestamp::from_secs(1_000_400),
        &mut Pseudonymizer::new(&hasher(), &rules(), Wildcards::default()),
        MAX,
        10,
    );
    assert_eq!(decode(&text, wrong, &known, MAX).expect("a sample").len(), 0);
}

#[test]
fn a_sample_that_expands_without_bound_is_rejected() {
    let long = "x".repeat(10_000);
    let pairs = vec!["[0,0]"; 100_000].join(",");
    let text = format!(
        r#"{{"version":1,"now":0,"words":["{long}"],"slices":[[0,0,[[0,1,1,1,0,{{"a":[{pairs}]}},[1,false]]]]]}}"#
    );
    let known = KnownValues::new(&hasher(), std::iter::empty(), &[]);
    let error = decode(&text, Timestamp::from_secs(0), &known, MAX).expect_err("too much");
    assert!(error.contains("expands"), "{error}");
}
