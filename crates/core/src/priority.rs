//! Priority of a request when not all can be served.

use std::fmt;

/// Importance of a request when not all can be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Shed last.
    Critical,
    /// Shed before critical requests.
    Important,
    /// The priority of requests that no rule names.
    #[default]
    Normal,
    /// Shed first.
    Sheddable,
}

impl Priority {
    /// All priorities, the one that is shed last first.
    pub const ALL: [Self; 4] = [Self::Critical, Self::Important, Self::Normal, Self::Sheddable];

    /// Returns the position in [`ALL`](Self::ALL).
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Returns the name in rules, metrics and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Important => "important",
            Self::Normal => "normal",
            Self::Sheddable => "sheddable",
        }
    }

    /// Returns the priority of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.name() == name)
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
