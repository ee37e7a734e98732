//! The API keys of callers who stand in the lists, so that an operator can act on one of them by its id: known to this process
//! alone, told to nobody, and forgotten with the lists.

use std::collections::HashMap;
use std::fmt;

/// The most that are known at once.
const MOST: usize = 8_192;

#[derive(Default)]
pub(super) struct Keys(HashMap<u64, Box<str>>);

impl Keys {
    /// Whether it would take the key of this caller.
    pub(super) fn wants(&self, id: u64) -> bool {
        self.0.len() < MOST && !self.0.contains_key(&id)
    }

    pub(super) fn see(&mut self, id: u64, key: &str) {
        if self.0.len() < MOST {
            self.0.entry(id).or_insert_with(|| key.into());
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<&str> {
        self.0.get(&id).map(|key| &**key)
    }

    /// Forgets all but these.
    pub(super) fn keep(&mut self, is_listed: impl Fn(u64) -> bool) {
        self.0.retain(|id, _| is_listed(*id));
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}
