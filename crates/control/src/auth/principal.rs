//! Who uses the admin API: a name and a role.

use serde::Serialize;
use utoipa::ToSchema;

/// What somebody may do; each may do what those before may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Look.
    Viewer,
    /// Change quotas.
    Operator,
    /// Everything, the audit log included.
    Admin,
}

impl Role {
    /// Its word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = String;
    fn from_str(word: &str) -> Result<Self, String> {
        let roles = [Self::Viewer, Self::Operator, Self::Admin];
        let found = roles.into_iter().find(|role| role.name() == word);
        found.ok_or_else(|| format!("`{word}` is no role; write viewer, operator or admin"))
    }
}

/// Somebody who has proven who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The token's name.
    pub name: String,
    /// What they may do.
    pub role: Role,
}
