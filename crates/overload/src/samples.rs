//! Latency samples by the number of requests in flight, with exponential forgetting. A sample may stand for many requests: means are
//! those of the requests, but whether there is enough to tell is a question of how many were measured.

/// Number of buckets: exact below 16 in flight, then eight to an octave.
pub(crate) const BUCKETS: usize = 128;
/// Samples that the memory is extended for, up to [`LONGEST`] times, where few requests arrive.
const ENOUGH: f64 = 200.0;
const LONGEST: f64 = 15.0;
/// Samples that have a meaningful mean.
const SEVERAL: f64 = 8.0;

/// Returns the bucket for this many in flight.
#[inline]
pub(crate) const fn bucket(in_flight: u32) -> usize {
    if in_flight < 16 {
        return in_flight as usize;
    }
    let octave = 31 - in_flight.leading_zeros();
    let fine = (in_flight >> (octave - 3)) & 7;
    let at = 16 + (octave as usize - 4) * 8 + fine as usize;
    if at < BUCKETS { at } else { BUCKETS - 1 }
}

#[derive(Clone, Debug)]
pub(crate) struct Samples {
    weights: [f64; BUCKETS],
    seconds: [f64; BUCKETS],
    /// Requests that one sample stands for at present.
    per_sample: f64,
}

impl Default for Samples {
    fn default() -> Self {
        Self { weights: [0.0; BUCKETS], seconds: [0.0; BUCKETS], per_sample: 1.0 }
    }
}

impl Samples {
    /// Sets how many requests one sample stands for at present.
    pub(crate) const fn set_per_sample(&mut self, requests: f64) {
        self.per_sample = requests;
    }

    /// Returns the weight of this many samples.
    pub(crate) const fn weight_of(&self, samples: f64) -> f64 {
        samples * self.per_sample
    }

    /// Adds `count` requests that took `seconds` together.
    pub(crate) fn add(&mut self, bucket: usize, count: f64, seconds: f64) {
        self.weights[bucket] += count;
        self.seconds[bucket] += seconds;
    }

    /// Forgets with a time constant of `memory` seconds; longer while there are few samples because few requests arrive,
    /// not because they are held back.
    pub(crate) fn fade(&mut self, elapsed: f64, memory: f64, is_saturated: bool) {
        let total: f64 = self.weights.iter().sum();
        let longest = if is_saturated { 1.0 } else { LONGEST };
        let memory = memory * (self.weight_of(ENOUGH) / total.max(1.0)).clamp(1.0, longest);
        let keep = (-elapsed / memory).exp();
        self.weights.iter_mut().chain(&mut self.seconds).for_each(|value| *value *= keep);
    }

    /// Keeps this part of the samples below a bucket, if there are others.
    pub(crate) fn fade_below(&mut self, bucket: usize, keep: f64) {
        let above: f64 = self.weights[bucket..].iter().sum();
        if above >= self.weight_of(SEVERAL) {
            let below = self.weights[..bucket].iter_mut().chain(&mut self.seconds[..bucket]);
            below.for_each(|value| *value *= keep);
        }
    }

    /// Returns the mean latency of the samples from this bucket on, if there are several.
    pub(crate) fn mean_from(&self, bucket: usize) -> Option<f64> {
        let weight: f64 = self.weights[bucket..].iter().sum();
        (weight >= self.weight_of(SEVERAL)).then(|| self.seconds[bucket..].iter().sum::<f64>() / weight)
    }

    /// Returns the mean latency of the part of the samples that had the fewest in flight.
    pub(crate) fn low_mean(&self, part: f64) -> Option<f64> {
        let total: f64 = self.weights.iter().sum();
        if total < 1.0 {
            return None;
        }
        let mut rest = (total * part).max(self.weight_of(ENOUGH / 10.0)).min(total);
        let (mut weight, mut seconds) = (0.0, 0.0);
        for (own, sum) in self.weights.iter().zip(&self.seconds).filter(|(own, _)| **own > 0.0) {
            let taken = own.min(rest);
            weight += taken;
            seconds += sum * taken / own;
            rest -= taken;
            if rest <= 0.0 {
                break;
            }
        }
        Some(seconds / weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_rise_with_the_number_in_flight() {
        let all: Vec<_> = (0..100_000).map(bucket).collect();
        assert!(all.is_sorted_by(|a, b| a == b || a + 1 == *b), "no gap and no step back");
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
    }

    #[test]
    fn one_sample_says_nothing_however_many_requests_it_stands_for() {
        let mut samples = Samples::default();
        samples.set_per_sample(1_000.0);
        samples.add(bucket(40), 1_000.0, 400.0);
        assert_eq!(samples.mean_from(bucket(40)), None);
        samples.add(bucket(40), 7_000.0, 280.0);
        assert!((samples.mean_from(bucket(40)).expect("eight samples") - 0.085).abs() < 1e-9);
    }

    #[test]
    fn the_low_mean_ignores_requests_that_queued() {
        let mut samples = Samples::default();
        samples.add(bucket(10), 100.0, 4.0);
        samples.add(bucket(40), 300.0, 36.0);
        assert!((samples.low_mean(0.25).expect("samples") - 0.04).abs() < 1e-9);
    }
}
