//! Decision IDs: generation and text form.
//!
//! 64 random bits drawn once per thread, and a counter: unique without a shared cache line, and unguessable enough to
//! prevent enumeration. Rejected: a UUID for each decision, because it costs more than the decision.

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::str::FromStr;

/// ID of one decision: 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DecisionId(pub u128);

thread_local! {
    static NEXT: Cell<(u64, u64)> = Cell::new((random(), 0));
}

impl DecisionId {
    /// Returns an ID that no decision, reservation or lease has had, on this or any other node.
    #[must_use]
    pub fn generate() -> Self {
        NEXT.with(|next| {
            let (thread, count) = next.get();
            next.set((thread, count + 1));
            Self(u128::from(thread) << 64 | u128::from(count + 1))
        })
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

/// Returns 64 bits from the operating system's generator, taken from the standard library's hash seeds.
fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.digits()).unwrap_or_default())
    }
}

impl FromStr for DecisionId {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(Self)
    }
}
