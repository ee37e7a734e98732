use super::*;
use crate::{KeyHasher, PriorReplicatedTerms, ReplicatedQuota, ReplicatedTerms};
use proptest::prelude::*;

const INSTALLATION: &str = "here";

fn table() -> Arc<QuotaTable> {
    Arc::new(QuotaTable::new(KeyHasher::new(b"secret")))
}

fn own(count: u64) -> QuotaOverride {
    QuotaOverride(tollgate_rules::Override::new("default", count, "minute"))
}

/// A caller with terms of several kinds, by its number.
fn quota(number: u64) -> ReplicatedQuota {
    let prior = PriorReplicatedTerms { tier: None, overrides: vec![own(3)], expires_at: Some(4_000_000_000) };
    let terms = ReplicatedTerms {
        tier: (!number.is_multiple_of(3)).then(|| "pro".to_owned()),
        overrides: (0..number % 3).map(own).collect(),
        effective_at: number.is_multiple_of(5).then_some(3_000_000_000),
        expires_at: number.is_multiple_of(7).then_some(3_500_000_000),
        until: number.is_multiple_of(5).then_some(prior),
    };
    let key = if number.is_multiple_of(2) { "api_key" } else { "user_id" };
    ReplicatedQuota {
        hash: number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        subject: Subject { key: key.into(), bits: None },
        revision: 1,
        updated_at: 0,
        terms: Some(terms),
    }
}

fn filled(callers: u64) -> Arc<QuotaTable> {
    let table = table();
    (0..callers).for_each(|number| table.apply(quota(number)));
    table
}

fn dumped(table: &Arc<QuotaTable>) -> Vec<u8> {
    let header = DumpHeader::new(INSTALLATION.to_owned(), 7, 8);
    DumpWriter::new(Arc::clone(table), header).flatten().collect()
}

fn read(
    pieces: impl IntoIterator<Item = impl AsRef<[u8]>>,
) -> Result<(Arc<QuotaTable>, DumpHeader), DumpError> {
    let table = table();
    let mut reader = DumpReader::new(Arc::clone(&table));
    pieces.into_iter().try_for_each(|piece| reader.push(piece.as_ref()))?;
    Ok((table, reader.finish(INSTALLATION)?))
}

/// A process would otherwise decide by other quotas than its server.
#[test]
fn what_is_written_is_read_whatever_the_pieces() {
    let full = filled(5_000);
    let bytes = dumped(&full);
    for size in [1, 19, 1_000, bytes.len()] {
        let (table, header) = read(bytes.chunks(size)).expect("a dump");
        assert_eq!(table.digest(), full.digest());
        assert_eq!((header.revision, header.current_at), (7, 8));
        assert_eq!(dumped(&table).len(), bytes.len());
    }
    let (empty, _) = read([dumped(&table())]).expect("a dump of nothing");
    assert!(empty.is_empty());
}

/// Half a table would be half of the callers without their quotas.
#[test]
fn a_damaged_dump_is_rejected() {
    let bytes = dumped(&filled(50));
    for end in [0, 1, bytes.len() / 2, bytes.len() - 1] {
        assert!(matches!(read([&bytes[..end]]), Err(DumpError::Damaged(_))), "cut at {end}");
    }
    let mut longer = bytes.clone();
    longer.push(b'x');
    assert!(matches!(read([longer]), Err(DumpError::Damaged(_))));
    let other = DumpHeader::new("there".to_owned(), 7, 8);
    let foreign: Vec<u8> = DumpWriter::new(filled(2), other).flatten().collect();
    assert_eq!(read([foreign]).err(), Some(DumpError::Foreign));
}

/// The digest does not depend on the order of changes, and shows every difference.
#[test]
fn a_digest_is_of_the_quotas_alone() {
    let (full, other) = (filled(100), table());
    (0..100).rev().for_each(|number| other.apply(quota(number)));
    other.apply(quota(5));
    assert_eq!(full.digest(), other.digest());
    other.apply(ReplicatedQuota { terms: None, ..quota(5) });
    assert_ne!(full.digest(), other.digest());
    other.apply(quota(5));
    assert_eq!(full.digest(), other.digest());
    let later = |mut quota: ReplicatedQuota| {
        quota.terms.as_mut().expect("terms").expires_at = Some(1);
        quota
    };
    other.apply(later(quota(5)));
    assert_ne!(full.digest(), other.digest());
    other.clear();
    assert_eq!(other.digest(), table().digest());
}

proptest! {
    /// A flipped bit is found, wherever it is, or changes nothing.
    #[test]
    fn no_damage_goes_unnoticed(at in 0_usize..10_000, bit in 0_u32..8) {
        let full = filled(50);
        let mut bytes = dumped(&full);
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        if let Ok((table, _)) = read([bytes]) {
            prop_assert_eq!(table.digest(), full.digest());
        }
    }

    /// Anything may be in a file.
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let header = b"{\"version\":3,\"installation\":\"here\",\"revision\":1,\"current_at\":1}\n";
        let _ = read([&bytes]);
        let _ = read([header.as_slice(), &bytes]);
    }
}
