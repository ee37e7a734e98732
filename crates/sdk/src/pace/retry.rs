//! Whether and when to try again: exponential backoff with full jitter, and a budget. Why a budget and not only a number
//! of retries? Three retries of everything quadruple the load on a server that is failing already; a budget bounds all
//! retries to a tenth of the requests.

const BASE_MS: u64 = 100;
const CAP_MS: u64 = 10_000;

/// Returns the delay before retry `attempt` (from 0); `random` in [0, 1), `wait_ms` what the server asked for.
#[must_use]
pub fn backoff(attempt: u32, random: f64, wait_ms: Option<u64>) -> u64 {
    let bound = CAP_MS.min(BASE_MS << attempt.min(30));
    wait_ms.unwrap_or(0).saturating_add((random * bound as f64).floor() as u64)
}

/// Bounds retries to a tenth of the requests, and to ten at once.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    /// In thousandths of a retry.
    balance: u32,
}

impl RetryBudget {
    const MAX: u32 = 10_000;
    const DEPOSIT: u32 = 100;
    const PRICE: u32 = 1_000;

    /// Returns what there is, in thousandths of a retry.
    #[must_use]
    pub fn balance(&self) -> u32 {
        self.balance
    }

    /// A first attempt was made.
    pub fn deposit(&mut self) {
        self.balance = Self::MAX.min(self.balance + Self::DEPOSIT);
    }

    /// Pays for a retry; returns whether there was enough.
    #[must_use]
    pub fn withdraw(&mut self) -> bool {
        let left = self.balance.checked_sub(Self::PRICE);
        self.balance = left.unwrap_or(self.balance);
        left.is_some()
    }
}

impl Default for RetryBudget {
    /// Starts full.
    fn default() -> Self {
        Self { balance: Self::MAX }
    }
}
