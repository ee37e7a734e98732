//! Properties of the decoders of files and of other nodes' messages, which hold for every input. The fuzz targets and a
//! test call these functions, which panic if a property is violated.

use crate::preview::encoding;
use crate::replication::snapshot;
use crate::{ImportLine, KeyHasher};
use tollgate_core::Timestamp;

/// Asserts that a snapshot that is read is the same after it is written.
///
/// # Panics
/// If a property is violated.
pub fn snapshot(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        snapshot::properties(text);
    }
}

/// Asserts that a line of an import has one meaning, however it is spaced.
///
/// # Panics
/// If a property is violated.
pub fn import_line(bytes: &[u8]) {
    let read = |line: &[u8]| serde_json::from_slice::<ImportLine>(line).ok().map(|line| format!("{line:?}"));
    let Some(request) = read(bytes) else { return };
    let value: serde_json::Value = serde_json::from_slice(bytes).expect("it was read");
    assert_eq!(read(value.to_string().as_bytes()), Some(request));
}

/// Asserts that what is accepted of another node's sample is bounded, and that its requests are within their slices.
///
/// # Panics
/// If a property is violated.
pub fn peer_sample(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        encoding::properties(
            text,
            &KeyHasher::new(b"a secret of the installation"),
            Timestamp::from_secs(1_000_000),
        );
    }
}

#[cfg(test)]
mod tests {
    /// The properties hold for the inputs that fuzzing starts from, so that a target is not useless from the start.
    #[test]
    fn the_seeds_of_the_fuzz_targets_have_the_properties() {
        type Target = (&'static str, fn(&[u8]));
        let targets: [Target; 3] = [
            ("snapshot", super::snapshot),
            ("import_line", super::import_line),
            ("peer_sample", super::peer_sample),
        ];
        for (name, property) in targets {
            tollgate_testing::fuzz_seeds::each(name, property);
        }
    }
}
