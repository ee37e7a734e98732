//! Slot layout: the 16 bytes of one counter in the table.
//!
//! | half | bits, high to low |
//! |---|---|
//! | meta | fingerprint : 48 (the lowest bit always set), mark : 8, tag : 8 |
//! | word | the limit's state, as `tollgate_core::Tag` describes |
//!
//! A meta of zero is an empty slot. Tags of states are 64 and more; the tag 1 marks a slot that a thread has reserved
//! and not yet filled, and its word is the number of that reservation.

use tollgate_core::{Tag, Timestamp};

const FINGERPRINT_SHIFT: u32 = 16;
const MARK_SHIFT: u32 = 8;
/// The mark and the tag: the word's layout, as `tollgate_core::Packed` has it.
const LAYOUT: u64 = (1 << FINGERPRINT_SHIFT) - 1;
const RESERVED: u8 = 1;
/// Shift of a tag's family, its two upper bits.
const FAMILY_SHIFT: u32 = 6;
/// The family of buckets: its other bits may change with the burst without changing the meaning.
const BUCKET: u8 = 1;

/// Returns the part of a name that a slot stores, in its position within the meta. Its lowest bit is set, so that no
/// name looks like an empty slot.
#[inline]
pub(super) const fn fingerprint(name: u64) -> u64 {
    (name | 1) << FINGERPRINT_SHIFT
}

/// Contents of a slot at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SlotValue {
    pub(super) meta: u64,
    pub(super) word: u64,
}

impl SlotValue {
    pub(super) const EMPTY: Self = Self { meta: 0, word: 0 };

    #[inline]
    pub(super) const fn new(name: u64, layout: u16, word: u64) -> Self {
        Self { meta: fingerprint(name) | layout as u64, word }
    }

    pub(super) const fn reservation(name: u64, number: u64) -> Self {
        Self { meta: fingerprint(name) | RESERVED as u64, word: number }
    }

    #[inline]
    const fn tag_byte(self) -> u8 {
        self.meta as u8
    }

    pub(super) const fn is_reservation(self) -> bool {
        self.tag_byte() == RESERVED
    }

    /// Returns whether the slot belongs to this name, filled or reserved.
    #[inline]
    pub(super) const fn belongs_to(self, name: u64) -> bool {
        self.meta != 0 && self.meta >> FINGERPRINT_SHIFT == fingerprint(name) >> FINGERPRINT_SHIFT
    }

    pub(super) fn is_free(self, now: Timestamp) -> bool {
        self.meta == 0 || !self.is_reservation() && Tag::from_byte(self.tag_byte()).expires(self.word) <= now
    }

    /// Returns the eviction order of the slot, least valuable first: its pressure, then its expiry.
    pub(super) fn eviction_rank(self, now: Timestamp) -> (u8, Timestamp) {
        let tag = Tag::from_byte(self.tag_byte());
        (tag.pressure(self.word, self.mark(), now), tag.expires(self.word))
    }

    /// Returns the layout of a filled slot's word.
    #[inline]
    pub(super) const fn layout(self) -> u16 {
        (self.meta & LAYOUT) as u16
    }

    /// Returns whether `after` is the same state: the same word, and of a bucket also of the same scale.
    #[inline]
    pub(super) const fn is_same_state(self, after: Self) -> bool {
        self.word == after.word && (self.meta == after.meta || self.tag_byte() >> FAMILY_SHIFT != BUCKET)
    }

    /// Returns the state for a limit with this tag; a state left behind by another algorithm or period counts as
    /// unused.
    #[inline]
    pub(super) const fn word_for(self, tag: Tag) -> Option<u64> {
        let (mine, its) = (tag.byte(), self.tag_byte());
        let readable = mine == its || (mine >> FAMILY_SHIFT == BUCKET && its >> FAMILY_SHIFT == BUCKET);
        if readable { Some(self.word) } else { None }
    }

    /// Returns the byte beside the tag.
    const fn mark(self) -> u8 {
        (self.meta >> MARK_SHIFT) as u8
    }
}

/// Returns whether a meta has this fingerprint, filled or reserved.
#[inline]
pub(super) const fn has_fingerprint(meta: u64, fingerprint: u64) -> bool {
    (meta ^ fingerprint) >> FINGERPRINT_SHIFT == 0
}

/// Returns whether a meta is a filled slot with this fingerprint.
#[inline]
pub(super) const fn is_filled_with(meta: u64, fingerprint: u64) -> bool {
    has_fingerprint(meta, fingerprint) && meta as u8 > RESERVED
}
