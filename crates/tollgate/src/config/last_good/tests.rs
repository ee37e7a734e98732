//! What steps are judged against: the rules that were active for a day, or that an operator confirmed.

use super::*;

fn files(limit: u64) -> Vec<Source> {
    let text = format!("{{domain: d, descriptors: [{{key: login, class: security, limit: {limit}/hour}}]}}");
    vec![Source::new("d.yaml", text)]
}

fn baseline(last_good: &LastGood, hours: u64) -> String {
    let rules = last_good.baseline(&Options::default(), at(hours)).expect("a baseline");
    rules.sources()[0].text.clone()
}

fn at(hours: u64) -> Timestamp {
    Timestamp::from_secs(1_000_000 + hours * 3_600)
}

#[test]
fn small_steps_keep_the_baseline_of_the_first() {
    let mut last_good = LastGood { path: None, record: None };
    last_good.accept(&files(1), Acceptance::Confirmed, at(0));
    last_good.accept(&files(5), Acceptance::Judged, at(1));
    last_good.accept(&files(9), Acceptance::Judged, at(2));
    assert_eq!(baseline(&last_good, 3), files(1)[0].text);
    // The same files again, as at a restart, change nothing.
    last_good.accept(&files(9), Acceptance::Judged, at(20));
    assert_eq!(baseline(&last_good, 21), files(1)[0].text);
    // A day later they are the baseline, and so they are once confirmed.
    assert_eq!(baseline(&last_good, 26), files(9)[0].text);
    last_good.accept(&files(50), Acceptance::Confirmed, at(27));
    assert_eq!(baseline(&last_good, 27), files(50)[0].text);
}

/// A copy that an earlier version wrote is a list of files.
#[test]
fn the_first_format_is_read() {
    let text = r#"[{"name":"d.yaml","text":"domain: d"}]"#;
    let stored: StoredRecord = serde_json::from_str(text).expect("the first format");
    assert!(matches!(stored, StoredRecord::Files(files) if files[0].name == "d.yaml"));
    let record = Record { files: Vec::new(), accepted_ms: 1, baseline: None, refused: None };
    let text = serde_json::to_string(&record).expect("JSON");
    assert!(
        matches!(serde_json::from_str(&text).expect("a record"), StoredRecord::Record(read) if read == record)
    );
}
