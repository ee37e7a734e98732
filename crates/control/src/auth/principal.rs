//! Principals of the admin API: a name and a role.

use serde::Serialize;
use utoipa::ToSchema;

/// A role; each includes the permissions of the previous ones, but for those of [`Role::Replica`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// May read what programs that follow the server need, with the secret that API keys are hashed with, and nothing else.
    Replica,
    /// May read.
    Viewer,
    /// May change quotas, rules, usage and emergency measures.
    Operator,
    /// May do everything, including read the audit log.
    Admin,
}

impl Role {
    /// Returns whether a principal with this role may do what requires `needed`. What replicas read contains a secret, so
    /// viewers and operators may not.
    #[must_use]
    pub fn permits(self, needed: Self) -> bool {
        match needed {
            Self::Replica => matches!(self, Self::Replica | Self::Admin),
            Self::Viewer | Self::Operator | Self::Admin => self >= needed,
        }
    }

    /// Returns the role's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Replica => "replica",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let roles = [Self::Replica, Self::Viewer, Self::Operator, Self::Admin];
        let found = roles.into_iter().find(|role| role.name() == name);
        found.ok_or_else(|| format!("unknown role `{name}`; use viewer, operator, admin or replica"))
    }
}

/// An authenticated user of the admin API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Name of the token or certificate.
    pub name: String,
    /// The role.
    pub role: Role,
}
