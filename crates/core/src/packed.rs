//! Packs limit state into 64 bits plus a tag from which expiry can be read without knowing the limit.
//!
//! A table of counters must find free slots without the limits that filled them: rules come and go, slots stay. So the
//! word holds its own time in its top bits, and the tag defines its layout:
//!
//! | family | word, high to low | tag | mark |
//! |---|---|---|---|
//! | bucket | TAT in microseconds : 53, fraction in 1/k : 11 | 01, code : 6 | code : 8 |
//! | window | start >> u : 53 - u, count : 11 + u | 10, u = log2 of the period | pressure |
//! | sliding | start >> u : 53 - u, previous, current : (11 + u) / 2 each | 11, u | pressure |
//!
//! The code of a bucket stands for the scale of the limit that wrote the word, its reach and its fill time (see
//! [`Scale`](crate::Scale)); a table keeps the tag and the mark beside the word, as one [layout](Packed::layout).
//!
//! A window's start, truncated to units of 2^u no longer than the period, still distinguishes windows, so nothing is
//! lost. State that does not fit (wide buckets, logs, permits, strict windows, huge sliding counts) has no packed form
//! and is stored separately. Rejected: a second word for the time, because half as many keys would fit a cache line.

use crate::algorithm::bucket::{Bucket, Tat};
use crate::algorithm::fixed_window::WindowCount;
use crate::algorithm::sliding_window::SlidingCounts;
use crate::cost::Cost;
use crate::limit::{Limit, Shape};
use crate::outcome::Outcome;
use crate::rate::Period;
use crate::scale::ScaleCode;
use crate::state::State;
use crate::time::{TimeDelta, Timestamp};

const TIME_BITS: u32 = 53;
const FRACTION_BITS: u32 = 64 - TIME_BITS;
const FRACTION: u64 = (1 << FRACTION_BITS) - 1;

/// The layout of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(u8);

impl Tag {
    const BUCKET: u8 = 0b01;
    const WINDOW: u8 = 0b10;
    const SLIDING: u8 = 0b11;

    const fn new(family: u8, log2: u32) -> Self {
        Self(family << 6 | log2 as u8)
    }

    /// Returns the tag as a byte; never zero.
    #[must_use]
    pub const fn byte(self) -> u8 {
        self.0
    }

    /// Creates a tag from a byte that [`Tag::byte`] returned.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    const fn family(self) -> u8 {
        self.0 >> 6
    }

    const fn log2(self) -> u32 {
        (self.0 & 63) as u32
    }

    /// Returns an instant from which the word is equivalent to an unused state; never too early.
    #[must_use]
    pub const fn expires(self, word: u64) -> Timestamp {
        let u = self.log2();
        match self.family() {
            Self::BUCKET => Timestamp::from_micros((word >> FRACTION_BITS) + 1),
            // start < (coarse + 1) * 2^u, and a period is shorter than 2 * 2^u
            Self::WINDOW => Timestamp::from_micros(((word >> (FRACTION_BITS + u)) + 3) << u),
            _ => Timestamp::from_micros(((word >> (FRACTION_BITS + u)) + 5) << u),
        }
    }

    /// Returns how much of its limit the key has used, in 256ths: never more than it has, and at least half of it
    /// except for rounding down (one 256th, and a microsecond of a bucket's fill time). `mark` is what was stored
    /// beside the tag.
    #[must_use]
    pub fn pressure(self, word: u64, mark: u8, now: Timestamp) -> u8 {
        if self.family() != Self::BUCKET {
            return mark;
        }
        let owed = (word >> FRACTION_BITS).saturating_sub(now.as_micros());
        let share = (u128::from(owed) << 8) >> code_of(self.layout(mark)).log2();
        u8::try_from(share).unwrap_or(u8::MAX)
    }

    /// Returns the tag and the mark of words that a bucket with this code writes.
    pub(crate) const fn layout_of(code: ScaleCode) -> u16 {
        let bits = code.bits();
        bits >> 6 << 8 | (Self::BUCKET as u16) << 6 | bits & 63
    }

    /// Returns the tag and the mark beside it as one number; see [`Packed::layout`].
    #[must_use]
    pub const fn layout(self, mark: u8) -> u16 {
        (mark as u16) << 8 | self.0 as u16
    }
}

/// A limit as a function from word to word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Layout tag, with which a word can be read without its limit.
    pub tag: Tag,
    /// The tag in the lower byte and the mark in the upper, as they are stored with a word that a bucket writes; the
    /// mark of a window changes with its word.
    pub layout: u16,
}

impl Limit {
    /// Returns how this limit's state is packed into a word; `None` if it does not fit.
    #[inline]
    #[must_use]
    pub const fn packed(&self) -> Option<Packed> {
        self.packed
    }

    /// Computes [`Limit::packed`].
    pub(crate) fn packing(&self) -> Option<Packed> {
        let tag = match self.shape {
            Shape::Blocked => Tag::new(Tag::BUCKET, 0),
            Shape::Bucket(bucket) => {
                let layout = bucket.layout;
                // A word without its writer's scale would be read in the reader's: that mints units.
                let is_packed = bucket.is_narrow() && code_of(layout).coded().is_some();
                return is_packed.then_some(Packed { tag: Tag(layout as u8), layout });
            }
            Shape::Fixed(counting) => {
                let u = self.unit_bits();
                (counting.max_count(self.capacity()) <= mask(FRACTION_BITS + u))
                    .then(|| Tag::new(Tag::WINDOW, u))?
            }
            Shape::Sliding => {
                let u = self.unit_bits();
                (2 * self.capacity() <= mask((FRACTION_BITS + u) / 2)).then(|| Tag::new(Tag::SLIDING, u))?
            }
            // How used a word's bucket is could not be read without its interval.
            Shape::Stepped(..) | Shape::Strict(_) | Shape::Log(_) | Shape::Permits => return None,
        };
        Some(Packed { tag, layout: tag.layout(0) })
    }

    /// Returns log2 of the minimum length of the period.
    fn unit_bits(&self) -> u32 {
        let shortest = match &self.rate().period {
            Period::Rolling(span) => *span,
            Period::Calendar(calendar) => calendar.min_length(),
        };
        shortest.as_micros().ilog2()
    }

    /// Steps a packed state; `None` is an unused one, and `layout` is what [`Limit::layout`] returned for its word, 0 if
    /// this limit wrote it. Only for limits whose [`Limit::packed`] is `Some`.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per_minute(nonzero!(5))).build()?;
    /// let (now, tag) = (Timestamp::from_secs(1_000), limit.packed().expect("a small window packs").tag);
    /// let (word, _) = limit.step_word(None, 0, now, Cost::ONE);
    /// let (word, outcome) = limit.step_word(Some(word), 0, now, Cost::new(2));
    /// assert_eq!(outcome.remaining, 2);
    /// assert!(tag.expires(word) > now + outcome.reset_after); // a little late, never early
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[inline(always)]
    pub fn step_word(&self, word: Option<u64>, layout: u16, now: Timestamp, cost: Cost) -> (u64, Outcome) {
        // The default algorithm is inlined: passing its outcome through memory costs as much as the step.
        if let Shape::Bucket(bucket) = &self.shape {
            let word = match word {
                Some(word) if layout != bucket.layout && layout != 0 => {
                    return step_of_another(bucket, word, layout, now, cost);
                }
                word => word,
            };
            let before = word.map_or(0, |word| unpack_tat(word, bucket.k));
            let mut tat = before;
            let outcome = bucket.step(&mut tat, bucket.reach, now, cost);
            // An unchanged word is not rewritten: that would truncate a fraction stored under another rate.
            let same = word.filter(|_| tat == before);
            return (same.unwrap_or_else(|| pack_tat(tat, bucket.k)), outcome);
        }
        self.step_window_word(word, now, cost)
    }

    fn step_window_word(&self, word: Option<u64>, now: Timestamp, cost: Cost) -> (u64, Outcome) {
        match self.shape {
            Shape::Fixed(counting) => {
                let bounds = self.window_at(now);
                let mut window =
                    word.map_or_else(WindowCount::default, |word| self.unpack_window(word, bounds));
                let bounds = self.window_of(&mut window, bounds);
                let outcome = window.step(bounds, now, self.capacity(), counting, cost);
                (self.pack_window(window), outcome)
            }
            Shape::Sliding => {
                let mut counts =
                    word.map_or_else(SlidingCounts::default, |word| self.unpack_sliding(word, now));
                let outcome = counts.step(now, self.rate().period.length(), self.capacity(), cost);
                (self.pack_sliding(counts), outcome)
            }
            _ => (word.unwrap_or(0), self.blocked(cost)),
        }
    }

    /// Debits a packed state; see [`Limit::debit`].
    pub fn debit_word(&self, word: Option<u64>, layout: u16, now: Timestamp, units: u64) -> u64 {
        match self.shape {
            Shape::Bucket(bucket) => {
                let layout = if layout == 0 { bucket.layout } else { layout };
                let before = word.map_or_else(Tat::default, |word| unpack_bucket(word, layout));
                let mut tat = before;
                bucket.debit_tat(&mut tat, now, units);
                word.filter(|_| tat == before).unwrap_or_else(|| pack_bucket(tat))
            }
            Shape::Fixed(counting) => {
                let bounds = self.window_at(now);
                let mut window =
                    word.map_or_else(WindowCount::default, |word| self.unpack_window(word, bounds));
                let bounds = self.window_of(&mut window, bounds);
                window.debit(bounds.0, self.capacity(), counting, units);
                self.pack_window(window)
            }
            Shape::Sliding => {
                let mut counts =
                    word.map_or_else(SlidingCounts::default, |word| self.unpack_sliding(word, now));
                counts.debit(now, self.rate().period.length(), self.capacity(), units);
                self.pack_sliding(counts)
            }
            _ => word.unwrap_or(0),
        }
    }

    /// Returns the tag and the mark to be stored with a word that a charge of `cost` changed with this outcome at `now`,
    /// where `before` was stored (0 for nothing).
    #[inline(always)]
    #[must_use]
    pub fn layout(&self, before: u16, word: u64, now: Timestamp, cost: Cost, outcome: &Outcome) -> u16 {
        match &self.shape {
            Shape::Bucket(bucket) => {
                let stays = before != bucket.layout && (cost.is_refund() || outcome.verdict.is_denied());
                if stays { layout_after_refund(bucket, before, word, now) } else { bucket.layout }
            }
            // It changes no word, so its writer's scale stays too.
            Shape::Blocked if before != 0 => before,
            _ => self.packed.map_or(0, |packed| packed.tag.layout(self.pressure(outcome))),
        }
    }

    /// Returns the used share of the limit according to an outcome, in 256ths, to be stored with the word.
    #[inline]
    #[must_use]
    pub fn pressure(&self, outcome: &Outcome) -> u8 {
        // A bucket's pressure is read from its word and falls as time passes; a blocked limit stores nothing.
        if matches!(self.shape, Shape::Bucket(_) | Shape::Blocked) {
            return 0;
        }
        let used = self.capacity().saturating_sub(outcome.remaining);
        // No limit exceeds 2^40, so this does not overflow.
        let share = used * 255 / self.capacity().max(1);
        u8::try_from(share).unwrap_or(u8::MAX)
    }

    /// Returns the state that a word with this layout holds for this limit, at `now`; a word of another algorithm or
    /// period is unused. Nothing is lost: a table without words can take the counter over.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, Timestamp, nonzero};
    /// let per_hour = |count| LimitSpec::new(Algorithm::Gcra, Rate::per_hour(count)).build();
    /// let (narrow, wide) = (per_hour(nonzero!(3_000))?, per_hour(nonzero!(4_999))?);
    /// let (now, layout) = (Timestamp::from_secs(1_000), narrow.packed().expect("whole microseconds").layout);
    /// let (word, _) = narrow.step_word(None, 0, now, Cost::new(3_000));
    /// assert!(wide.packed().is_none());
    /// let mut state = wide.unpack(layout, word, now);
    /// assert_eq!(wide.step(&mut state, now, Cost::PEEK).remaining, 1_999);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn unpack(&self, layout: u16, word: u64, now: Timestamp) -> State {
        let tag = Tag(layout as u8);
        match self.shape {
            Shape::Bucket(_) if tag.family() == Tag::BUCKET => State::Bucket(unpack_bucket(word, layout)),
            Shape::Fixed(_) if tag == Tag::new(Tag::WINDOW, self.unit_bits()) => {
                State::Window(self.unpack_window(word, self.window_at(now)))
            }
            Shape::Sliding if tag == Tag::new(Tag::SLIDING, self.unit_bits()) => {
                State::Sliding(self.unpack_sliding(word, now))
            }
            _ => State::Unused,
        }
    }

    /// Returns the word and the layout of a state that this limit has just changed with this outcome; `None` if it does
    /// not fit.
    #[must_use]
    pub fn pack(&self, state: &State, outcome: &Outcome) -> Option<(u64, u16)> {
        let tag = self.packed?.tag;
        let (word, layout) = match (state, self.shape) {
            (State::Bucket(tat), Shape::Bucket(bucket)) if tat.fraction <= FRACTION => {
                // A refund leaves the scale of another, which may be one that has no packed form.
                let own = tat.scale == Some(bucket.scale()) && tat.reach == bucket.reach;
                (pack_bucket(*tat), own.then_some(bucket.layout)?)
            }
            (State::Window(window), Shape::Fixed(_)) => {
                (self.pack_window(*window), tag.layout(self.pressure(outcome)))
            }
            (State::Sliding(counts), Shape::Sliding) => {
                (self.pack_sliding(*counts), tag.layout(self.pressure(outcome)))
            }
            _ => return None,
        };
        // A count of a larger limit may need more bits than this one's.
        let fits = match state {
            State::Window(window) => window.count <= mask(FRACTION_BITS + self.unit_bits()),
            State::Sliding(counts) => {
                counts.previous.max(counts.current) <= mask((FRACTION_BITS + self.unit_bits()) / 2)
            }
            _ => true,
        };
        fits.then_some((word, layout))
    }

    /// Returns whether limits of the same counter, with other numbers, may have a packed state.
    #[must_use]
    pub const fn may_be_packed(&self) -> bool {
        matches!(self.shape, Shape::Blocked | Shape::Bucket(_) | Shape::Fixed(_) | Shape::Sliding)
    }

    fn unpack_window(&self, word: u64, (start, end): (Timestamp, Timestamp)) -> WindowCount {
        let u = self.unit_bits();
        let bits = FRACTION_BITS + u;
        let start = match (word >> bits).cmp(&(start.as_micros() >> u)) {
            std::cmp::Ordering::Less => Timestamp::ZERO,
            std::cmp::Ordering::Equal => start,
            std::cmp::Ordering::Greater => end,
        };
        WindowCount { start, count: word & mask(bits) }
    }

    fn pack_window(&self, window: WindowCount) -> u64 {
        let u = self.unit_bits();
        let bits = FRACTION_BITS + u;
        (window.start.as_micros() >> u) << bits | window.count.min(mask(bits))
    }

    fn unpack_sliding(&self, word: u64, now: Timestamp) -> SlidingCounts {
        let u = self.unit_bits();
        let half = (FRACTION_BITS + u) / 2;
        let period = self.rate().period.length();
        let present = crate::algorithm::sliding_window::window_start(now, period);
        let coarse = word >> (FRACTION_BITS + u);
        let start = if coarse == present.as_micros() >> u {
            present
        } else if present >= Timestamp::ZERO + period && coarse == (present - period).as_micros() >> u {
            present - period
        } else if coarse > present.as_micros() >> u {
            present + period
        } else {
            return SlidingCounts::default();
        };
        SlidingCounts { start, previous: word >> half & mask(half), current: word & mask(half) }
    }

    fn pack_sliding(&self, counts: SlidingCounts) -> u64 {
        let u = self.unit_bits();
        let half = (FRACTION_BITS + u) / 2;
        (counts.start.as_micros() >> u) << (FRACTION_BITS + u)
            | counts.previous.min(mask(half)) << half
            | counts.current.min(mask(half))
    }

    /// Returns the maximum time for which a state of this limit matters: how long after a step it may still change an
    /// outcome, also if the step was made by a clock that had moved backward.
    #[must_use]
    pub fn retention(&self) -> TimeDelta {
        let period = self.rate().period.length().as_micros();
        TimeDelta::from_micros(match self.shape {
            Shape::Blocked => 0,
            Shape::Bucket(bucket) => bucket.max_ahead,
            Shape::Stepped(bucket, _) => {
                bucket.max_ahead + self.refill_interval.map_or(0, TimeDelta::as_micros)
            }
            // This window and, if the state lies in the future, the next; a sliding window counts for one more.
            Shape::Fixed(_) => 2 * period,
            Shape::Sliding => 3 * period,
            Shape::Strict(slots) => (slots.k + 2) * slots.width,
            Shape::Log(_) | Shape::Permits => period,
        })
    }
}

#[inline]
const fn code_of(layout: u16) -> ScaleCode {
    ScaleCode::from_bits(layout >> 8 << 6 | layout & 63)
}

fn unpack_bucket(word: u64, layout: u16) -> Tat {
    let (micros, fraction, code) = (word >> FRACTION_BITS, word & FRACTION, code_of(layout));
    match code.coded() {
        Some(coded) => Tat { micros, fraction, reach: coded.reach, scale: Some(coded.scale) },
        // Never further ahead than two full buckets.
        None => Tat { micros, fraction, reach: (code.log2() + 1).min(52) as u8, scale: None },
    }
}

const fn pack_bucket(tat: Tat) -> u64 {
    tat.micros << FRACTION_BITS | tat.fraction
}

/// Steps a word that a bucket with another code wrote.
#[cold]
#[inline(never)]
fn step_of_another(bucket: &Bucket, word: u64, layout: u16, now: Timestamp, cost: Cost) -> (u64, Outcome) {
    let before = unpack_bucket(word, layout);
    let mut tat = before;
    let outcome = bucket.step_tat(&mut tat, now, cost);
    (if tat == before { word } else { pack_bucket(tat) }, outcome)
}

/// Returns the layout of a word that a refund or a correction has left: of its writer as long as it holds more.
#[cold]
fn layout_after_refund(bucket: &Bucket, before: u16, word: u64, now: Timestamp) -> u16 {
    let own = bucket.layout;
    match code_of(before).coded() {
        _ if before == 0 => own,
        Some(coded) if coded.scale != bucket.scale() => {
            // What has nothing left was stepped as an unused one.
            if word >> FRACTION_BITS > now.as_micros() || word & FRACTION > 0 { before } else { own }
        }
        _ if word >> FRACTION_BITS <= now.as_micros() + bucket.max_ahead => own,
        _ => before,
    }
}

#[inline]
const fn unpack_tat(word: u64, k: u64) -> u64 {
    let (micros, fraction) = (word >> FRACTION_BITS, word & FRACTION);
    // A fraction stored under a former rate is reduced to the maximum of this one.
    micros * k + if fraction < k { fraction } else { k - 1 }
}

#[inline]
const fn pack_tat(tat: u64, k: u64) -> u64 {
    if k == 1 {
        return tat << FRACTION_BITS;
    }
    ((tat / k) << FRACTION_BITS) | (tat % k)
}

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}
