//! One time slice of a node's traffic sample, and the selection of its callers.

use crate::preview::sampled_request::SampledRequest;
use std::cell::Cell;

/// The sampled requests of one time slice.
#[derive(Clone, Debug, Default)]
pub struct SampleSlice {
    /// Slice number.
    pub(crate) number: u64,
    /// Selects the callers whose number has none of these bits; callers with a large share of the traffic are always
    /// included.
    pub(crate) mask: u64,
    pub(crate) requests: Vec<SampledRequest>,
}

/// Returns whether the mask selects a caller.
pub(crate) const fn is_in(caller: u64, mask: u64) -> bool {
    (caller >> 20) & mask == 0
}

thread_local! {
    static RNG: Cell<u64> = const { Cell::new(0x9e37_79b9_7f4a_7c15) };
}

/// Returns true once in `many` calls, at random.
pub(crate) fn keep_one_in(many: u32) -> bool {
    RNG.with(|rng| {
        let mut state = rng.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        rng.set(state);
        ((state >> 32) * u64::from(many)) >> 32 == 0
    })
}
