//! Argument of `lua/buckets.lua`, whose parts describe the layout: the requests of nothing but buckets, by far the most usual.
//!
//! The limits of a request come as the text of their state: a pattern that matches it and a format that writes it, so that a
//! script neither parses states nor puts them together. Requests of the same limits and costs share these.

use super::compact::EPOCH;
use super::script_args::{double, numbers};
use super::shard_request::{BundleCounter, ShardRequest};
use tollgate_core::{LimitParams, Timestamp};

/// The argument of one call.
#[derive(Default)]
pub(super) struct BucketArgs {
    lists: Vec<u8>,
    /// Where each list ends.
    ends: Vec<usize>,
    requests: Vec<u8>,
}

/// One bucket of a request.
struct Bucket<'a> {
    name: &'a [u8],
    /// The first characters of its short form; empty if it has none.
    short: &'a [u8],
    unit: u64,
    reach: u8,
    cost: u64,
    capacity: u64,
    max_ahead: u64,
}

impl BucketArgs {
    /// Appends a request that has only buckets in whole microseconds; bundles are numbered from 1.
    pub(super) fn request(&mut self, request: &ShardRequest, bundle: usize) {
        let buckets = request.charges.iter().filter_map(|want| {
            let BundleCounter { name, short, .. } = &request.counters[want.counter];
            let LimitParams::Bucket { unit, max_ahead, reach, .. } = want.limit.params() else { return None };
            let (_, [cost, capacity, ..]) = numbers(&want.limit, want.cost, want.phase);
            Some(Bucket { name, short, unit, reach, cost, capacity, max_ahead })
        });
        self.add(buckets, request.charges.len(), bundle);
    }

    /// Returns the argument that charges 1 µs of a second to a bucket named 000, in the first bundle, without a short form and
    /// by the server's time: it expires within seconds.
    pub(super) fn probe() -> Vec<u8> {
        let mut probe = Self::default();
        let (capacity, max_ahead) = (1_000_000, 2_000_000);
        let bucket = Bucket { name: b"000", short: b"", unit: 1, reach: 0, cost: 1, capacity, max_ahead };
        probe.add(std::iter::once(bucket), 1, 1);
        probe.finish(None)
    }

    fn add<'a>(&mut self, buckets: impl Iterator<Item = Bucket<'a>>, count: usize, bundle: usize) {
        let start = self.lists.len();
        let (mut pattern, mut form) = (Vec::with_capacity(40 * count), Vec::with_capacity(32 * count));
        let mut numbers = Vec::with_capacity(32 * count);
        pattern.push(b'^');
        for bucket in buckets {
            let shift = bucket.text(&mut pattern, &mut form, count == 1);
            for number in [double(bucket.cost), double(bucket.capacity), shift, double(bucket.max_ahead)] {
                numbers.extend_from_slice(&number.to_le_bytes());
            }
        }
        self.lists.push(u8::try_from(count).unwrap_or(u8::MAX));
        self.lists.extend(pattern);
        self.lists.extend_from_slice(b"$\0");
        self.lists.extend(form);
        self.lists.push(0);
        self.lists.extend(numbers);
        let number = self.number_of_last(start);
        self.requests.push(u8::try_from(bundle).unwrap_or(u8::MAX));
        self.requests.push(number);
    }

    /// Returns the number of the list that begins at `start`, which is dropped if there is the same before it.
    fn number_of_last(&mut self, start: usize) -> u8 {
        let (before, list) = self.lists.split_at(start);
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let known = starts.zip(&self.ends).position(|(start, end)| before[start..*end] == *list);
        let index = known.unwrap_or(self.ends.len());
        match known {
            Some(_) => self.lists.truncate(start),
            None => self.ends.push(self.lists.len()),
        }
        u8::try_from(index + 1).unwrap_or(u8::MAX)
    }

    /// Returns the argument: the time, which is the server's own if none is told, the lists and the requests.
    pub(super) fn finish(self, fixed_time: Option<Timestamp>) -> Vec<u8> {
        let mut ask = Vec::with_capacity(9 + self.lists.len() + self.requests.len());
        let time = fixed_time.map_or(-1.0, |now| double(now.as_micros()));
        ask.extend_from_slice(&time.to_le_bytes());
        ask.push(u8::try_from(self.ends.len()).unwrap_or(u8::MAX));
        ask.extend(self.lists);
        ask.extend(self.requests);
        ask
    }
}

impl Bucket<'_> {
    /// Appends what matches the bucket's state and what writes it; returns what its instant has more than its TAT.
    fn text(&self, pattern: &mut Vec<u8>, form: &mut Vec<u8>, is_alone: bool) -> f64 {
        if is_alone && !self.short.is_empty() {
            literal(pattern, self.short);
            pattern.extend_from_slice(b"(%d+)");
            form.extend_from_slice(self.short);
            form.extend_from_slice(b"%015d");
            return -double(EPOCH);
        }
        let (kind, shift): (&[u8], f64) = if self.reach > 0 { (b":f", 1.0) } else { (b":b", 0.0) };
        pattern.push(b';');
        literal(pattern, self.name);
        pattern.extend_from_slice(kind);
        pattern.extend_from_slice(b"(%d+)");
        form.push(b';');
        form.extend_from_slice(self.name);
        form.extend_from_slice(kind);
        form.extend_from_slice(b"%d");
        let start = form.len();
        if self.reach > 0 {
            form.extend_from_slice(b",0,");
            decimal(form, u64::from(self.reach));
            form.extend_from_slice(b",1,");
        } else {
            form.push(b',');
        }
        decimal(form, self.unit);
        pattern.extend_from_slice(&form[start..]);
        shift
    }
}

/// Appends a text to a pattern that matches it. Of the characters of names only the minus has a meaning in patterns.
fn literal(pattern: &mut Vec<u8>, text: &[u8]) {
    for byte in text {
        if *byte == b'-' {
            pattern.push(b'%');
        }
        pattern.push(*byte);
    }
}

/// Appends a number in decimal.
fn decimal(text: &mut Vec<u8>, number: u64) {
    if number > 9 {
        decimal(text, number / 10);
    }
    text.push(b'0' + (number % 10) as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(name: &'static [u8], short: &'static [u8], reach: u8) -> Bucket<'static> {
        Bucket { name, short, unit: 36_000, reach, cost: 72_000, capacity: 3_600_000, max_ahead: 7_200_000 }
    }

    /// Requests of the same limits send these once: without it a shared call costs Redis as much as separate ones.
    #[test]
    fn requests_of_the_same_limits_share_a_list() {
        let mut args = BucketArgs::default();
        let [hour, day] = [bucket(b"701", b"-5641", 0), bucket(b"a-b_cdefghi", b"", 24)];
        args.add(std::iter::once(hour), 1, 1);
        args.add([bucket(b"701", b"-5641", 0), day].into_iter(), 2, 2);
        args.add(std::iter::once(bucket(b"701", b"-5641", 0)), 1, 3);
        let all = args.finish(None);
        let shown = String::from_utf8_lossy(&all);
        for text in [
            "\u{1}^%-5641(%d+)$\0-5641%015d\0",
            "\u{2}^;701:b(%d+),36000;a%-b_cdefghi:f(%d+),0,24,1,36000$\0;701:b%d,36000;a-b_cdefghi:f%d,0,24,1,36000\0",
        ] {
            assert_eq!(shown.matches(text).count(), 1, "{shown:?}");
        }
        assert!(all.ends_with(&[1, 1, 2, 2, 3, 1]), "{all:?}");
    }
}
