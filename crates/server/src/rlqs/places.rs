//! Places of buckets: how many buckets, and how many bytes of entries, streams may have.
//!
//! A place is reserved when a report is read, before the task that owns the accounts knows of it, and is free again when
//! nothing refers to it anymore: the account has been abandoned or, if its stream is lost, its assignments have expired,
//! and no report of it waits. So strangers cannot fill the memory however many reports wait.
//!
//! An eighth of all is kept for the first buckets of each stream, so that greedy streams do not shut out one that comes
//! later. Rejected: counting in the task, because reports arrive faster than it assigns; and taking places from streams that
//! have many, because their clients would be denied what they were assigned.

use super::table::Bucket;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory of one entry beside its text.
const ENTRY_BYTES: u64 = 64;
/// One in so many is kept for streams that have no more than [`FIRST`].
const KEPT_PART: u64 = 8;
/// The first buckets of a stream.
const FIRST: Amount = Amount { buckets: 16, bytes: 16 << 10 };

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the memory of a bucket's entries.
fn bytes_of(bucket: &Bucket) -> u64 {
    bucket.entries.iter().map(|(key, value)| (key.len() + value.len()) as u64 + ENTRY_BYTES).sum()
}

/// Buckets, and bytes of their entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) buckets: u64,
    pub(super) bytes: u64,
}

impl Amount {
    const fn of_one(bytes: u64) -> Self {
        Self { buckets: 1, bytes }
    }

    const fn plus(self, more: Self) -> Self {
        Self { buckets: self.buckets + more.buckets, bytes: self.bytes + more.bytes }
    }

    const fn minus(self, less: Self) -> Self {
        Self {
            buckets: self.buckets.saturating_sub(less.buckets),
            bytes: self.bytes.saturating_sub(less.bytes),
        }
    }

    const fn is_within(self, most: Self) -> bool {
        self.buckets <= most.buckets && self.bytes <= most.bytes
    }
}

/// The places of all streams.
#[derive(Debug)]
pub(super) struct Places {
    most: Amount,
    taken: Mutex<Amount>,
}

impl Places {
    pub(super) fn new(most: Amount) -> Arc<Self> {
        Arc::new(Self { most, taken: Mutex::default() })
    }

    /// Returns the places of a new stream, at most `buckets`.
    pub(super) fn stream(self: &Arc<Self>, buckets: u64) -> Arc<StreamPlaces> {
        Arc::new(StreamPlaces { all: Arc::clone(self), buckets, own: Mutex::default() })
    }

    /// Reserves `more` for a stream that has `own`. Returns whether it could.
    fn reserve(&self, own: Amount, more: Amount) -> bool {
        let mut taken = lock(&self.taken);
        let next = taken.plus(more);
        let kept = Amount { buckets: self.most.buckets / KEPT_PART, bytes: self.most.bytes / KEPT_PART };
        let is_first = own.plus(more).is_within(FIRST);
        let fits = next.is_within(if is_first { self.most } else { self.most.minus(kept) });
        if fits {
            *taken = next;
        }
        fits
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> Amount {
        *lock(&self.taken)
    }
}

#[derive(Debug, Default)]
struct Own {
    known: HashMap<Arc<Bucket>, Weak<Place>>,
    taken: Amount,
}

/// The places of one stream.
#[derive(Debug)]
pub(super) struct StreamPlaces {
    all: Arc<Places>,
    /// Maximum number of buckets.
    buckets: u64,
    own: Mutex<Own>,
}

impl StreamPlaces {
    /// Returns the place of a bucket: the one it has, or a new one. `None` if there is none left.
    pub(super) fn take(self: &Arc<Self>, bucket: Bucket) -> Option<Arc<Place>> {
        let mut own = lock(&self.own);
        if let Some(known) = own.known.get(&bucket).and_then(Weak::upgrade) {
            return Some(known);
        }
        let size = Amount::of_one(bytes_of(&bucket));
        if own.taken.buckets >= self.buckets || !self.all.reserve(own.taken, size) {
            return None;
        }
        // A former place of the same bucket may still be on its way out: its key goes with it.
        own.known.remove(&bucket);
        let bucket = Arc::new(bucket);
        let place = Arc::new(Place {
            bucket: Arc::clone(&bucket),
            bytes: size.bytes,
            stream: Some(Arc::clone(self)),
        });
        own.known.insert(bucket, Arc::downgrade(&place));
        own.taken = own.taken.plus(size);
        Some(place)
    }
}

/// The place of one bucket on one stream, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) bucket: Arc<Bucket>,
    bytes: u64,
    stream: Option<Arc<StreamPlaces>>,
}

impl Place {
    /// Returns a place that counts nowhere.
    #[cfg(test)]
    pub(super) fn uncounted(bucket: &Arc<Bucket>) -> Arc<Self> {
        Arc::new(Self { bucket: Arc::clone(bucket), bytes: 0, stream: None })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(stream) = &self.stream else { return };
        let size = Amount::of_one(self.bytes);
        let mut own = lock(&stream.own);
        own.taken = own.taken.minus(size);
        // Another place of the bucket may have been taken meanwhile.
        if own.known.get(&self.bucket).is_some_and(|place| place.strong_count() == 0) {
            own.known.remove(&self.bucket);
        }
        drop(own);
        let mut taken = lock(&stream.all.taken);
        *taken = taken.minus(size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Amount = Amount { buckets: 1_000, bytes: 1_000_000 };

    fn bucket(name: &str) -> Bucket {
        let entries = vec![("tenant".to_owned(), name.to_owned())].into_boxed_slice();
        Bucket { domain: Arc::from("edge"), entries }
    }

    fn fill(stream: &Arc<StreamPlaces>, value: &str) -> Vec<Arc<Place>> {
        (0..2_000).map_while(|at| stream.take(bucket(&format!("{at}{value}")))).collect()
    }

    /// A stream whose buckets come and go would otherwise get no assignments after a day.
    #[test]
    fn what_is_dropped_leaves_the_count() {
        let all = Places::new(MOST);
        let stream = all.stream(10);
        for _ in 0..3 {
            let places = fill(&stream, "");
            assert_eq!((places.len(), all.taken().buckets), (10, 10));
            drop(places);
            assert_eq!(all.taken(), Amount::default());
        }
        assert!(lock(&stream.own).known.is_empty());
    }

    /// A report that waits keeps its place, so that none is counted twice or not at all.
    #[test]
    fn a_bucket_has_one_place_as_long_as_anything_refers_to_it() {
        let all = Places::new(MOST);
        let stream = all.stream(10);
        let account = stream.take(bucket("a")).expect("a place");
        let waiting = stream.take(bucket("a")).expect("the same place");
        assert_eq!(all.taken().buckets, 1);
        drop(account);
        assert_eq!(all.taken().buckets, 1);
        drop(waiting);
        assert_eq!(all.taken().buckets, 0);
        assert_eq!(stream.take(bucket("a")).map(|place| place.bytes), Some(71));
    }

    /// One client with many streams must not shut out all others, by number or by size.
    #[test]
    fn a_new_stream_has_places_however_greedy_the_others_are() {
        for value in ["", &"x".repeat(8_000)] {
            let all = Places::new(MOST);
            let streams: Vec<_> = (0..4).map(|_| all.stream(500)).collect();
            let taken: Vec<_> = streams.iter().map(|stream| fill(stream, value)).collect();
            let counts: Vec<_> = taken.iter().map(Vec::len).collect();
            assert!(counts[0] > 100 && all.taken().is_within(MOST), "{counts:?}: {:?}", all.taken());
            assert!(fill(&all.stream(500), "").len() >= 16, "{:?}", all.taken());
            assert!(all.taken().is_within(MOST), "{:?}", all.taken());
        }
    }
}
