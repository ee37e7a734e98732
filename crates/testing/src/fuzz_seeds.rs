//! The inputs that fuzzing starts from, in `fuzz/seeds`.

use std::path::Path;

/// Calls `property` with each seed of a fuzz target.
///
/// # Panics
/// The target has no seeds.
pub fn each(target: &str, property: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&folder).expect("a folder of seeds") {
        property(&std::fs::read(entry.expect("a file").path()).expect("a seed"));
        seeds += 1;
    }
    assert!(seeds > 0, "{target}");
}
