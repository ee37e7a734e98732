//! The stable hash of a key: what machines of different ages must agree on.

use tollgate_core::{CounterKey, KeyPart, Scope};

fn hash(scope: &str, parts: &[KeyPart<'_>]) -> u64 {
    CounterKey { scope: &Scope::new(scope), parts }.stable_hash()
}

/// Without it two machines of different versions put a key's window, or its shard, in different places.
#[test]
fn the_stable_hash_never_changes() {
    assert_eq!(Scope::new("api/user").id(), PINNED_SCOPE);
    assert_eq!(hash("api/user", &[KeyPart::Text("alice")]), PINNED_TEXT);
    assert_eq!(
        hash("api/user", &[KeyPart::Network { address: 0xffff_0a00_0000, prefix: 104 }]),
        PINNED_NETWORK
    );
}

/// Without it keys that only look alike turn their windows together, and land on one shard together.
#[test]
fn keys_that_look_alike_hash_apart() {
    const BYTES: u128 = u128::from_be_bytes(*b"sixteen bytes ..");
    let text = KeyPart::Text;
    let keys: [&[KeyPart<'_>]; 9] = [
        &[],
        &[text("")],
        &[text("abc")],
        &[text("a"), text("bc")],
        &[text("ab"), text("c")],
        &[text("sixteen bytes .."), text("")],
        &[KeyPart::Network { address: BYTES, prefix: 0 }],
        &[KeyPart::Network { address: BYTES, prefix: 64 }],
        &[KeyPart::Network { address: BYTES.swap_bytes(), prefix: 0 }],
    ];
    let mut hashes: Vec<u64> = keys.iter().map(|parts| hash("api", parts)).collect();
    hashes.extend(keys.iter().map(|parts| hash("api/", parts)));
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 2 * keys.len());
}

const PINNED_SCOPE: u64 = 0x61a4_b0d4_1055_db90;
const PINNED_TEXT: u64 = 0x928c_0486_a9a3_38fc;
const PINNED_NETWORK: u64 = 0x5269_6c38_545f_310a;
