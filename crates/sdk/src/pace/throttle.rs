//! Adaptive throttling, from Google's SRE book ("Handling overload"): a client whose requests are mostly refused drops
//! some of them itself, with a probability that grows with the share of refusals over the last two minutes. So a server
//! spends its time on answers instead of refusals.

const BUCKETS: usize = 120;
const BUCKET_MS: u64 = 1_000;
/// With fewer requests in the window nothing is rejected locally.
const MIN_REQUESTS: u64 = 10;

/// Decides whether a request to one host is worth sending.
#[derive(Clone, Debug)]
pub struct AdaptiveThrottle {
    /// A ring of seconds: requests and accepts of each.
    buckets: Box<[(u32, u32)]>,
    /// The second that was written last.
    newest: u64,
    requests: u64,
    accepts: u64,
}

impl Default for AdaptiveThrottle {
    fn default() -> Self {
        Self { buckets: vec![(0, 0); BUCKETS].into(), newest: 0, requests: 0, accepts: 0 }
    }
}

impl AdaptiveThrottle {
    /// A request's outcome is known: a response, a failure, or a local rejection. Those under way do not count yet.
    pub fn request(&mut self, now: u64) {
        let bucket = self.advance(now);
        bucket.0 = bucket.0.saturating_add(1);
        self.requests += 1;
    }

    /// A response arrived that is no refusal.
    pub fn accept(&mut self, now: u64) {
        let bucket = self.advance(now);
        bucket.1 = bucket.1.saturating_add(1);
        self.accepts += 1;
    }

    /// Returns the probability with which to reject a request locally.
    pub fn probability(&mut self, now: u64) -> f64 {
        self.advance(now);
        let (requests, accepts) = (self.requests as f64, self.accepts as f64);
        ((requests - 2.0 * accepts) / (requests + 1.0)).max(0.0)
    }

    /// Returns whether to reject a request locally; `random` in [0, 1). A few refusals are no overload: they are
    /// waited for.
    pub fn rejects(&mut self, now: u64, random: f64) -> bool {
        let probability = self.probability(now);
        self.requests >= MIN_REQUESTS && random < probability
    }

    /// Empties the seconds that have left the window; returns the current one.
    fn advance(&mut self, now: u64) -> &mut (u32, u32) {
        let second = now / BUCKET_MS;
        let steps = second.saturating_sub(self.newest).min(BUCKETS as u64);
        for step in 0..steps {
            let bucket = &mut self.buckets[((second - step) % BUCKETS as u64) as usize];
            let (requests, accepts) = std::mem::take(bucket);
            self.requests = self.requests.saturating_sub(u64::from(requests));
            self.accepts = self.accepts.saturating_sub(u64::from(accepts));
        }
        self.newest = self.newest.max(second);
        &mut self.buckets[(self.newest % BUCKETS as u64) as usize]
    }
}
