//! Decision IDs: generation and text form.
//!
//! 64 random bits drawn once per thread, and a counter, which a keyed permutation then mixes: unique without a shared
//! cache line, and a collector of IDs can neither order them nor count what was decided in between. It takes four
//! multiplications, each of which waits for the one before, so that the numbers are drawn when a decision begins and mixed
//! when its ID is read. Rejected: the plain counter, which reveals the volume, and a UUID for each decision, which
//! costs more than the decision. An ID is not a credential: it allows only to look the decision up.

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::str::FromStr;
use std::sync::LazyLock;

/// ID of one decision: 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DecisionId(pub u128);

thread_local! {
    static GENERATOR: Generator = Generator { thread: random(), count: Cell::new(0) };
}

/// What a thread draws IDs from.
struct Generator {
    thread: u64,
    count: Cell<u64>,
}

/// The ID of a decision, mixed when it is read: not all are.
#[derive(Clone, Copy)]
pub(crate) enum DrawnId {
    /// Numbers of the thread that began the decision.
    Drawn { thread: u64, count: u64 },
    /// The ID of an earlier decision, which is repeated.
    Known(DecisionId),
}

/// Rounds of the permutation: with four, every bit of the counter reaches every bit of the ID on two ways.
const ROUNDS: usize = 4;

/// The same in all threads of a process: two threads never give the same ID, because their random halves differ.
static PROCESS_KEYS: LazyLock<[u64; ROUNDS]> = LazyLock::new(|| std::array::from_fn(|_| random()));

/// Permutes 128 bits: a Feistel network, whatever its rounds do, never gives two inputs the same output.
#[inline]
fn permute(high: u64, low: u64, keys: &[u64; ROUNDS]) -> u128 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let (mut high, mut low) = (high, low);
    for key in keys {
        let product = u128::from(low ^ key) * u128::from(key | ODD);
        (high, low) = (low, high ^ (product as u64) ^ ((product >> 64) as u64));
    }
    u128::from(high) << 64 | u128::from(low)
}

impl DecisionId {
    /// Returns an ID that no decision, reservation or lease has had, on this or any other node.
    #[must_use]
    #[inline]
    pub fn generate() -> Self {
        DrawnId::draw().id()
    }

    /// Returns the hexadecimal digits. Uses a table because every response carries an ID, and the standard formatting
    /// divides 128 bits for each digit.
    #[must_use]
    pub fn digits(self) -> [u8; 32] {
        let mut digits = [0_u8; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(self.0.to_be_bytes()) {
            pair[0] = b"0123456789abcdef"[usize::from(byte >> 4)];
            pair[1] = b"0123456789abcdef"[usize::from(byte & 15)];
        }
        digits
    }
}

impl DrawnId {
    /// Draws an ID as [`DecisionId::generate`] returns it.
    #[inline]
    pub(crate) fn draw() -> Self {
        GENERATOR.with(|Generator { thread, count }| {
            count.set(count.get() + 1);
            Self::Drawn { thread: *thread, count: count.get() }
        })
    }

    /// Returns the ID, which is the same every time.
    #[inline]
    pub(crate) fn id(self) -> DecisionId {
        match self {
            Self::Drawn { thread, count } => DecisionId(permute(thread, count, &PROCESS_KEYS)),
            Self::Known(id) => id,
        }
    }
}

/// Shows the ID alone: what it is mixed from reveals the volume.
impl fmt::Debug for DrawnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.id(), f)
    }
}

/// Returns 64 bits from the operating system's generator, taken from the standard library's hash seeds.
fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.digits()).unwrap_or_default())
    }
}

/// A text that is no decision ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a decision ID; write its 32 digits, 0 to 9 and a to f")]
pub struct InvalidDecisionId;

/// Reads the one spelling that is written: with others (`+`, capitals, fewer digits) two texts would be one ID.
impl FromStr for DecisionId {
    type Err = InvalidDecisionId;
    fn from_str(text: &str) -> Result<Self, InvalidDecisionId> {
        let id = u128::from_str_radix(text, 16).map(Self).map_err(|_| InvalidDecisionId)?;
        if id.digits() == *text.as_bytes() { Ok(id) } else { Err(InvalidDecisionId) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// An ID is compared as text in logs and by clients, so it has one spelling.
        #[test]
        fn an_id_has_one_spelling(id in any::<u128>(), other in "[+-]?[0-9a-fA-F]{0,34}") {
            let written = DecisionId(id).to_string();
            prop_assert_eq!(written.parse(), Ok(DecisionId(id)));
            for text in [other, written.to_uppercase(), format!("+{}", &written[1..]), format!("0{written}")] {
                if let Ok(read) = text.parse::<DecisionId>() {
                    prop_assert_eq!(read.to_string(), text);
                }
            }
        }
    }

    /// Without it a client that sends two requests reads from their IDs how many others were decided in between.
    #[test]
    fn ids_are_unique_and_reveal_no_volume() {
        let ids: Vec<u128> = (0..10_000).map(|_| DecisionId::generate().0).collect();
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
        // Of consecutive IDs each half changes about half of its bits, whatever the distance.
        for half in [0, 64] {
            let changed: u32 =
                ids.windows(2).map(|pair| (((pair[0] ^ pair[1]) >> half) as u64).count_ones()).sum();
            let mean = f64::from(changed) / (ids.len() - 1) as f64;
            assert!((31.0..33.0).contains(&mean), "{mean} bits of the half at {half}");
            let rising =
                ids.windows(2).filter(|pair| (pair[0] >> half) as u64 <= (pair[1] >> half) as u64).count();
            assert!((4_500..5_500).contains(&rising), "{rising} of 9,999 rise");
        }
    }
}
