//! What a node remembers of one slice of time, and how what does not fit is left out.

use crate::preview::sampled_request::SampledRequest;
use std::cell::Cell;

/// What a node remembers of one slice of time.
#[derive(Clone, Debug, Default)]
pub struct SampleSlice {
    /// Which slice.
    pub(crate) number: u64,
    /// Callers are in whose number has none of these bits, and those who made a large part of the traffic.
    pub(crate) mask: u64,
    pub(crate) requests: Vec<SampledRequest>,
}

/// Whether a caller is in where these bits tell who is.
pub(crate) const fn is_in(caller: u64, mask: u64) -> bool {
    (caller >> 20) & mask == 0
}

thread_local! {
    static DICE: Cell<u64> = const { Cell::new(0x9e37_79b9_7f4a_7c15) };
}

/// Whether one in so many.
pub(crate) fn keep_one_in(many: u32) -> bool {
    DICE.with(|rng| {
        let mut word = rng.get();
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        rng.set(word);
        ((word >> 32) * u64::from(many)) >> 32 == 0
    })
}
